"""The stages between judging and collecting: what is compared, in what order, and what each comparison sees.

    sign ─ same_url ─ same_text ─ (units ─ same_units ─ take_out) ─ link ─ near ─ (anchors … take_out_strings) ─ collect

Every comparison is a map over files (keys) and an exchange between maps (one range of all keys per task). What is not
asked for adds no stage. Reads judged files, gives what is left of them and the decisions that are still to be applied.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_pipeline.dedup.index import open_earlier
from data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA
from data_pipeline.dedup.naming import EXACT, NEAR, URL
from data_pipeline.graph import Workshop
from data_pipeline.indexing import INDEXING_STAGES, keep_index
from data_pipeline.journal import Record
from data_pipeline.language.profile import found_by_characters
from data_pipeline.left import Left, Signed
from data_pipeline.stages.link import drop_near, link_range
from data_pipeline.stages.same import Range, drop_same
from data_pipeline.stages.sign import sign_file
from data_pipeline.task import Stage, Task
from data_pipeline.thinning import THINNING_STAGES, take_out_spans, take_out_strings
from llmsys.config.data import CrawlConfig
from llmsys.config.deduplicate import KeepDuplicates, MinhashDuplicates, UrlDuplicates

_RULES = {"url": URL, "text": EXACT}

DEDUPLICATION_STAGES = (
    *("sign", "same_url", "same_text", "sign_left", "link", "near"),
    *INDEXING_STAGES,
    *THINNING_STAGES,
)


class Deduplication:
    """The comparisons that one config asks for."""

    def __init__(self, data: CrawlConfig, workshop: Workshop, stage: Stage) -> None:
        self.data, self.config, self.name = data, data.deduplicate, data.name
        self.workshop, self.folder, self._do = workshop, data.folder, stage
        digest = workshop.journal.input_digest
        self.by_characters = found_by_characters(data) if self.config.minhash.kind != "none" else {}
        self.earlier = [open_earlier(one, self.config, self.by_characters, digest) for one in self.config.against]
        self.cuts = not isinstance(self.config.spans, KeepDuplicates)
        self.near = ["near"] if self.config.minhash.kind != "none" else []
        parts = (("url", self.config.url), ("text", self.config.exact))
        self.exact = [relation for relation, part in parts if part.kind != "none"]

    def run(self, judged: Sequence[Record], names: Sequence[str]) -> Left:
        """Do every comparison that is asked for."""
        left = Left(names, judged, [judged])
        states = []
        if self._relations:
            signed = self._sign("sign", left, self._relations)
            for relation in self.exact:
                left = left.decided(_RULES[relation], self._same(relation, _RULES[relation], left, signed))
            states = [(left, signed)]
        if self.cuts:
            left = take_out_spans(self, left)
            states = states if not self.near else [*states, (left, self._sign("sign_left", left, self.near))]
        if self.near:
            left = left.decided(NEAR, self._near(left, states[-1][1]))
            states[-1] = (left, states[-1][1])
        keep_index(self, states)
        return left if isinstance(self.config.substring, KeepDuplicates) else take_out_strings(self, left)

    def signing(self) -> Callable[[Record, str], Task] | None:
        """What gives, from the record of a judged file and its name, the task of the first stage here, if it is one."""
        if not self._relations:
            return None
        return partial(self._signing("sign", self._relations), 0, ())

    @property
    def _relations(self) -> list[str]:
        """What judged files are compared by as they are; near duplicates come after whatever changes texts."""
        return self.exact if self.cuts else [*self.exact, *self.near]

    def stage(self, name: str, tasks: list[Task], unit: str) -> list[Record]:
        """Do the tasks of a stage."""
        return self._do(name, tasks, unit)

    def path(self, record: Record, output: int = 0) -> Path:
        """Where an output of a record lies."""
        return self.folder / record.outputs[output].name

    def paths(self, records: Sequence[Record], output: int = 0) -> list[Path]:
        """Where an output of each record lies."""
        return [self.path(record, output) for record in records]

    def _sign(self, stage: str, left: Left, relations: Sequence[str]) -> Signed:
        signing = self._signing(stage, relations)
        files = enumerate(zip(left.kept, left.names, strict=True))
        tasks = [signing(number, left.decisions, record, name) for number, (record, name) in files]
        return Signed(self.stage(stage, tasks, "document"), relations)

    def _signing(self, stage: str, relations: Sequence[str]) -> Callable[[int, Sequence[Record], Record, str], Task]:
        """What gives the task of one file, by its number and the decisions to apply, which know it by this number."""
        config = self.config
        part: dict[str, Any] = {"relations": list(relations)}
        part |= {"url": config.url.model_dump(mode="json")} if "url" in relations else {}
        near = "near" in relations
        unspaced = [code for code, by_characters in self.by_characters.items() if by_characters]
        part |= {"minhash": config.minhash.model_dump(mode="json"), "unspaced": unspaced} if near else {}

        def task(number: int, decisions: Sequence[Record], record: Record, name: str) -> Task:
            outputs = [f"work/{stage}/{name}.{relation}.arrow" for relation in ("documents", *relations)]
            job = partial(
                sign_file,
                source=self.path(record),
                number=number,
                dropped=self.paths(decisions),
                documents=self.folder / outputs[0],
                keys={relation: self.folder / path for relation, path in zip(relations, outputs[1:], strict=True)},
                url=config.url if isinstance(config.url, UrlDuplicates) else None,
                minhash=config.minhash if isinstance(config.minhash, MinhashDuplicates) else None,
                unspaced=unspaced,
            )
            rows = sum(rows for _, rows in record.result["kept_batches"])
            decides = [record.digests[0], [decision.digests for decision in decisions], part]
            return Task(f"{stage}/{name}", decides, outputs, job, rows)

        return task

    def ranges(
        self, stage: str, keys: int, inputs: Sequence[Any], job_of: Callable[[int, int, Path], Callable[..., Any]]
    ) -> list[Record]:
        """Compare keys, one range of them per task; `job_of` gets number, ranges and output."""
        ranges = max(1, math.ceil(keys / self.config.keys.keys_per_task))
        tasks = []
        for number in range(ranges):
            output = f"work/{stage}/{number:05d}-of-{ranges:05d}.arrow"
            job = job_of(number, ranges, self.folder / output)
            tasks.append(Task(f"{stage}/{number:05d}-of-{ranges:05d}", [*inputs, number, ranges], [output], job, 1))
        return self.stage(stage, tasks, "range")

    def range_of(
        self, records: Sequence[Record], output: int, schema: pa.Schema, dropped: Sequence[Record]
    ) -> Callable[..., Range]:
        """Return what makes the ranges of the keys in an output of records."""
        sources, gone = self.paths(records, output), self.paths(dropped)
        return partial(Range, sources, schema, gone, config=self.config.keys)

    def _of_relation(self, relation: str, left: Left, signed: Signed) -> tuple[Callable[..., Range], list[Any]]:
        """Ranges of the keys of a relation, here and in earlier datasets, and what they depend on."""
        output = 1 + list(signed.relations).index(relation)
        schema = BUCKET_SCHEMA if relation == "near" else ITEM_SCHEMA
        make = self.range_of(signed.records, output, schema, left.decisions)
        inputs: list[Any] = [[[record.digests[0], record.digests[output]] for record in signed.records]]
        inputs += [[record.digests for record in left.decisions], [dataset.digest for dataset in self.earlier]]
        return partial(make, earlier=self.earlier, relation=relation), inputs

    def _same(self, relation: str, rule: str, left: Left, signed: Signed) -> list[Record]:
        make, inputs = self._of_relation(relation, left, signed)
        documents = self.paths(signed.records)

        def job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            part = make(number=number, ranges=ranges)
            return partial(drop_same, rule=rule, part=part, documents=documents, output=output)

        return self.ranges(f"same_{relation}", signed.count(relation), [inputs, rule], job)

    def _near(self, left: Left, signed: Signed) -> list[Record]:
        make, inputs = self._of_relation("near", left, signed)
        documents = self.paths(signed.records)

        def job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            return partial(link_range, part=make(number=number, ranges=ranges), documents=documents, output=output)

        links = self.ranges("link", signed.count("near"), inputs, job)
        output = "work/near/near.arrow"
        join = partial(drop_near, links=self.paths(links), documents=documents, earlier=self.earlier)
        decides = [[record.digests for record in links], inputs]
        task = Task("near/all", decides, [output], partial(join, output=self.folder / output), len(links))
        return self.stage("near", [task], "range")

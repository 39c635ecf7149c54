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

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.task import Stage, Task
from data_pipeline.dedup.dedup_index import load_earlier_dataset
from data_pipeline.dedup.duplicate_decisions import EXACT, NEAR, URL
from data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA
from data_pipeline.graph.stage_runner import StageRunner
from data_pipeline.language.rules_by_language import get_character_dedup_flags
from data_pipeline.pipelines.dataset_state import DatasetState, SignedFiles
from data_pipeline.pipelines.index_stages import INDEXING_STAGES, run_index_stages
from data_pipeline.pipelines.repeat_removal_stages import (
    THINNING_STAGES,
    remove_repeated_segments,
    remove_repeated_substrings,
)
from data_pipeline.stages.cluster_near_duplicates import write_link_forest, write_near_duplicates
from data_pipeline.stages.compute_signatures import write_signatures
from data_pipeline.stages.find_equal_keys import KeyRange, write_equal_duplicates
from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import MinHashDedupConfig, NoDeduplication, UrlDedupConfig

_RULES = {"url": URL, "text": EXACT}

DEDUPLICATION_STAGES = (
    *("sign", "same_url", "same_text", "sign_left", "link", "near"),
    *INDEXING_STAGES,
    *THINNING_STAGES,
)


class DeduplicationStages:
    """The comparisons that one config asks for."""

    def __init__(self, data: CrawlConfig, workshop: StageRunner, stage: Stage) -> None:
        self.data, self.config, self.name = data, data.deduplicate, data.name
        self.workshop, self.folder, self._do = workshop, data.folder, stage
        digest = workshop.journal.get_input_digest
        self.by_characters = get_character_dedup_flags(data) if self.config.minhash.kind != "none" else {}
        self.earlier = [
            load_earlier_dataset(one, self.config, self.by_characters, digest) for one in self.config.earlier_datasets
        ]
        self.cuts = not isinstance(self.config.repeated_segments, NoDeduplication)
        self.near = ["near"] if self.config.minhash.kind != "none" else []
        parts = (("url", self.config.url), ("text", self.config.exact))
        self.exact = [relation for relation, part in parts if part.kind != "none"]

    def run_comparisons(self, judged: Sequence[TaskRecord], names: Sequence[str]) -> DatasetState:
        """Do every comparison that is asked for."""
        left = DatasetState(names, judged, [judged])
        states = []
        if self._initial_relations:
            signed = self._run_signature_stage("sign", left, self._initial_relations)
            for relation in self.exact:
                left = left.add_decisions(
                    _RULES[relation], self._run_equal_key_stage(relation, _RULES[relation], left, signed)
                )
            states = [(left, signed)]
        if self.cuts:
            left = remove_repeated_segments(self, left)
            states = (
                states if not self.near else [*states, (left, self._run_signature_stage("sign_left", left, self.near))]
            )
        if self.near:
            left = left.add_decisions(NEAR, self._run_near_duplicate_stages(left, states[-1][1]))
            states[-1] = (left, states[-1][1])
        run_index_stages(self, states)
        return left if isinstance(self.config.substring, NoDeduplication) else remove_repeated_substrings(self, left)

    def build_first_task_factory(self) -> Callable[[TaskRecord, str], Task] | None:
        """What gives, from the record of a judged file and its name, the task of the first stage here, if it is one."""
        if not self._initial_relations:
            return None
        return partial(self._build_signature_task_factory("sign", self._initial_relations), 0, ())

    @property
    def _initial_relations(self) -> list[str]:
        """What judged files are compared by as they are; near duplicates come after whatever changes texts."""
        return self.exact if self.cuts else [*self.exact, *self.near]

    def run_stage(self, name: str, tasks: list[Task], unit: str) -> list[TaskRecord]:
        """Do the tasks of a stage."""
        return self._do(name, tasks, unit)

    def get_output_path(self, record: TaskRecord, output: int = 0) -> Path:
        """Where an output of a record lies."""
        return self.folder / record.outputs[output].name

    def get_output_paths(self, records: Sequence[TaskRecord], output: int = 0) -> list[Path]:
        """Where an output of each record lies."""
        return [self.get_output_path(record, output) for record in records]

    def _run_signature_stage(self, stage: str, left: DatasetState, relations: Sequence[str]) -> SignedFiles:
        signing = self._build_signature_task_factory(stage, relations)
        files = enumerate(zip(left.kept, left.names, strict=True))
        tasks = [signing(number, left.decisions, record, name) for number, (record, name) in files]
        return SignedFiles(self.run_stage(stage, tasks, "document"), relations)

    def _build_signature_task_factory(
        self, stage: str, relations: Sequence[str]
    ) -> Callable[[int, Sequence[TaskRecord], TaskRecord, str], Task]:
        """What gives the task of one file, by its number and the decisions to apply, which know it by this number."""
        config = self.config
        part: dict[str, Any] = {"relations": list(relations)}
        part |= {"url": config.url.model_dump(mode="json")} if "url" in relations else {}
        near = "near" in relations
        unspaced = [code for code, by_characters in self.by_characters.items() if by_characters]
        part |= {"minhash": config.minhash.model_dump(mode="json"), "unspaced": unspaced} if near else {}

        def build_task(number: int, decisions: Sequence[TaskRecord], record: TaskRecord, name: str) -> Task:
            outputs = [f"work/{stage}/{name}.{relation}.arrow" for relation in ("documents", *relations)]
            job = partial(
                write_signatures,
                source=self.get_output_path(record),
                number=number,
                dropped=self.get_output_paths(decisions),
                documents=self.folder / outputs[0],
                keys={relation: self.folder / path for relation, path in zip(relations, outputs[1:], strict=True)},
                url=config.url if isinstance(config.url, UrlDedupConfig) else None,
                minhash=config.minhash if isinstance(config.minhash, MinHashDedupConfig) else None,
                unspaced=unspaced,
            )
            rows = sum(rows for _, rows in record.result["kept_batches"])
            decides = [record.digests[0], [decision.digests for decision in decisions], part]
            return Task(f"{stage}/{name}", decides, outputs, job, rows)

        return build_task

    def compare_key_ranges(
        self, stage: str, keys: int, inputs: Sequence[Any], job_of: Callable[[int, int, Path], Callable[..., Any]]
    ) -> list[TaskRecord]:
        """Compare keys, one range of them per task; `build_job` gets number, ranges and output."""
        ranges = max(1, math.ceil(keys / self.config.key_filter.keys_per_task))
        tasks = []
        for number in range(ranges):
            output = f"work/{stage}/{number:05d}-of-{ranges:05d}.arrow"
            job = job_of(number, ranges, self.folder / output)
            tasks.append(Task(f"{stage}/{number:05d}-of-{ranges:05d}", [*inputs, number, ranges], [output], job, 1))
        return self.run_stage(stage, tasks, "range")

    def build_range_factory(
        self, records: Sequence[TaskRecord], output: int, schema: pa.Schema, dropped: Sequence[TaskRecord]
    ) -> Callable[..., KeyRange]:
        """Return what makes the ranges of the keys in an output of records."""
        sources, gone = self.get_output_paths(records, output), self.get_output_paths(dropped)
        return partial(KeyRange, sources, schema, gone, config=self.config.key_filter)

    def _build_relation_range_factory(
        self, relation: str, left: DatasetState, signed: SignedFiles
    ) -> tuple[Callable[..., KeyRange], list[Any]]:
        """Ranges of the keys of a relation, here and in earlier datasets, and what they depend on."""
        output = 1 + list(signed.relations).index(relation)
        schema = BUCKET_SCHEMA if relation == "near" else ITEM_SCHEMA
        make = self.build_range_factory(signed.records, output, schema, left.decisions)
        inputs: list[Any] = [[[record.digests[0], record.digests[output]] for record in signed.records]]
        inputs += [[record.digests for record in left.decisions], [dataset.digest for dataset in self.earlier]]
        return partial(make, earlier=self.earlier, relation=relation), inputs

    def _run_equal_key_stage(
        self, relation: str, rule: str, left: DatasetState, signed: SignedFiles
    ) -> list[TaskRecord]:
        make, inputs = self._build_relation_range_factory(relation, left, signed)
        documents = self.get_output_paths(signed.records)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            part = make(number=number, ranges=ranges)
            return partial(write_equal_duplicates, rule=rule, part=part, documents=documents, output=output)

        return self.compare_key_ranges(f"same_{relation}", signed.count_keys(relation), [inputs, rule], build_job)

    def _run_near_duplicate_stages(self, left: DatasetState, signed: SignedFiles) -> list[TaskRecord]:
        make, inputs = self._build_relation_range_factory("near", left, signed)
        documents = self.get_output_paths(signed.records)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            return partial(
                write_link_forest, part=make(number=number, ranges=ranges), documents=documents, output=output
            )

        links = self.compare_key_ranges("link", signed.count_keys("near"), inputs, build_job)
        output = "work/near/near.arrow"
        join = partial(
            write_near_duplicates, links=self.get_output_paths(links), documents=documents, earlier=self.earlier
        )
        decides = [[record.digests for record in links], inputs]
        task = Task("near/all", decides, [output], partial(join, output=self.folder / output), len(links))
        return self.run_stage("near", [task], "range")

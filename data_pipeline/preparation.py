"""The stages that a dataset of documents is made by, in order: each is a list of tasks for the workshop.

Reads the `data` and `tokenizer` sections of a run, gives the records of every stage. A task says what decides its
outputs; nothing else may.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

from data_pipeline.cleaning import clean_documents, collected_names
from data_pipeline.copies import copy_final
from data_pipeline.deduplication import Deduplication
from data_pipeline.extract.reference import extract_libraries
from data_pipeline.following import Following
from data_pipeline.graph import Workshop
from data_pipeline.inputs import input_identity, input_name, input_size, stamp
from data_pipeline.journal import Record, digest_of
from data_pipeline.language.profile import rules_by_language
from data_pipeline.left import Left
from data_pipeline.outcome import Outcome, funnel_stages
from data_pipeline.quarantine import not_quarantined, without_block, without_pages
from data_pipeline.readers.remote import is_remote
from data_pipeline.side_files import (
    digests_of,
    require_languages,
    rule_files,
    rule_libraries,
    url_files,
)
from data_pipeline.stage_code import code_of
from data_pipeline.stages.collect import collect_shard
from data_pipeline.stages.extract import extract_file
from data_pipeline.stages.judge import judge_file
from data_pipeline.stages.survey import Block, blocks_of, survey_file
from data_pipeline.staging import get_place_to_write
from data_pipeline.task import Task
from data_pipeline.thresholds import find_borders
from data_pipeline.token_stages import encode_documents, make_tokenizer, write_tokens
from llmsys.config.data import CrawlConfig
from llmsys.config.language_profile import read_language_rules
from llmsys.config.tokenizer import TokenizerConfig

Until = Literal["documents", "tokenizer", "tokens"]


class Preparation:
    """The stages of one dataset, in order; each method is one stage."""

    def __init__(self, data: CrawlConfig, tokenizer: TokenizerConfig, workshop: Workshop) -> None:
        self.data, self.tokenizer, self.workshop = data, tokenizer, workshop
        self.folder = data.folder

    def run(self, inputs: list[str], until: Until) -> Outcome:
        """Do the stages up to `until` and return the records of each; DataError when no document stays."""
        deduplication = Deduplication(self.data, self.workshop, self._stage)
        blocks = self._survey(inputs)
        outcome = Outcome(inputs=inputs, extracted=self._extract(blocks, deduplication))
        extracted, names = not_quarantined(outcome.extracted, [block.name for block in blocks])
        outcome.judged = self._judge(extracted, names)
        read = [record for record, judged in zip(extracted, outcome.judged, strict=True) if judged.outputs]
        judged, names = not_quarantined(outcome.judged, names)
        left = deduplication.run(judged, names)
        outcome.thinned = left.changed
        outcome.collected = self._collect(left.with_unread(read))
        outcome.collected = clean_documents(self.data, self.workshop, self._stage, outcome.collected)
        outcome.require_documents()
        outcome.copies = copy_final(self.data, self._stage, outcome.collected)
        outcome.borders = find_borders(self.data, self.rules, self._stage, outcome.collected, funnel_stages(self.data))
        if until == "documents":
            return outcome
        outcome.tokenizer = make_tokenizer(self.data, self.tokenizer, self.workshop, self._stage, outcome.collected)
        if until == "tokenizer":
            return outcome
        outcome.encoded = encode_documents(self.data, self._stage, outcome.collected, outcome.tokenizer)
        outcome.tokens = write_tokens(self.data, self._stage, outcome.encoded, outcome.tokenizer)
        return outcome

    @cached_property
    def rules(self) -> str:
        """The words and rules of each language, see `rules_by_language`."""
        return rules_by_language(self.data)

    def _stage(self, name: str, tasks: list[Task], unit: str, following: Following | None = None) -> list[Record]:
        return self.workshop.stage(name, tasks, unit=unit, code=code_of(name), following=following)

    def _survey(self, inputs: list[str]) -> list[Block]:
        """Cut long files into blocks; a file elsewhere is one, known by its tag or time."""
        names = [f"{input_name(path)}-{digest_of(path)[:8]}" for path in inputs]
        here = [(path, name) for path, name in zip(inputs, names, strict=True) if not is_remote(path)]
        size = self.data.executor.block_bytes
        tasks = []
        for path, name in here:
            job = partial(survey_file, source=path, block_bytes=size)
            tasks.append(Task(f"survey/{name}", [path, stamp(path), size], [], job, input_size(path)))
        records = self._stage("survey", tasks, "B") if tasks else []
        found = {path: record.result for (path, _), record in zip(here, records, strict=True)}
        blocks = []
        for path, name in zip(inputs, names, strict=True):
            identity = "" if path in found else input_identity(self.workshop.journal, path)
            result = found.get(path) or {"blocks": [[0, input_size(path), identity]]}
            blocks += blocks_of(path, name, result)
        return blocks

    def _extract(self, blocks: list[Block], deduplication: Deduplication) -> list[Record]:
        config, read = self.data.extract, self.data.read
        part: list[Any] = [part.model_dump(mode="json") for part in (config, read, self.data.url)]
        lists = digests_of(self.workshop.journal, url_files(self.data))
        part += extract_libraries(config)
        tasks = []
        for block in blocks:
            outputs = [f"work/extracted/{block.name}.arrow", f"work/unread/{block.name}.arrow"]
            job = partial(
                extract_file,
                source=block.source,
                start=block.start,
                stop=block.stop,
                output=self.folder / outputs[0],
                unread=self.folder / outputs[1],
                config=config,
                read=read,
                urls=self.data.url,
                lists=tuple(lists),
            )
            decides = [block.source, block.digest, block.start, part, lists]
            without = partial(without_block, block)
            tasks.append(Task(f"extract/{block.name}", decides, outputs, job, block.size, without))
        sign = self._following("sign", deduplication.signing(), blocks)
        return self._stage("extract", tasks, "B", self._following("judge", self._judging, blocks, sign))

    def _following(
        self, stage: str, task: Callable[[Record, str], Task] | None, blocks: list[Block], then: Following | None = None
    ) -> Following | None:
        if task is None:
            return None
        return Following(stage, code_of(stage), lambda index, record: task(record, blocks[index].name), then)

    def _judge(self, extracted: list[Record], names: list[str]) -> list[Record]:
        return self._stage("judge", list(map(self._judging, extracted, names)), "page")

    @cached_property
    def _judging(self) -> Callable[[Record, str], Task]:
        """What gives, from the record of an extracted block and its name, the task that judges it."""
        require_languages(self.data, read_language_rules(self.rules))
        part = self.data.model_dump(mode="json", include={"unicode", "language", "documents"}) | {"rules": self.rules}
        part["documents"].pop("copies")
        files = (*digests_of(self.workshop.journal, rule_files(self.data)), *rule_libraries(self.data))
        part["files"] = files

        def task(extracted: Record, name: str) -> Task:
            outputs = [f"work/judged/{name}.arrow", f"work/judged/{name}.dropped.arrow"]
            job = partial(
                judge_file,
                source=self.folder / extracted.outputs[0].name,
                kept=self.folder / outputs[0],
                dropped=self.folder / outputs[1],
                config=self.data,
                rules=self.rules,
                files=files,
            )
            pages, html_bytes = extracted.result["pages"], extracted.result["html_bytes"]
            decides = [extracted.digests[:1], part]
            return Task(f"judge/{name}", decides, outputs, job, pages, partial(without_pages, pages, html_bytes))

        return task

    def _collect(self, left: Left) -> list[Record]:
        sources = left.sources(self.folder)
        decisions = [self.folder / record.outputs[0].name for record in left.decisions]
        decides = [left.digests, self.data.documents.batch_bytes]
        tasks = []
        for shard in range(self.data.documents.shards):
            outputs = collected_names(self.data, shard)
            job = partial(
                collect_shard,
                shard=shard,
                sources=sources,
                decisions=decisions,
                rules=left.rules,
                documents=get_place_to_write(self.folder, outputs[0]),
                dropped=get_place_to_write(self.folder, outputs[1]),
                batch_bytes=self.data.documents.batch_bytes,
            )
            rows = sum(rows for source in sources for owner, rows in source.kept_batches if owner == shard)
            tasks.append(Task(f"collect/part-{shard:05d}", [shard, decides, outputs], outputs, job, rows))
        return self._stage("collect", tasks, "document")

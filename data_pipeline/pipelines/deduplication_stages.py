"""Stages between filtering and collecting that find duplicates.

    signatures ─ url_duplicates ─ exact_duplicates ─ (segments ─ repeated_segments ─
    remove_segments) ─ cluster ─ near_duplicates ─ (embeddings … semantic_duplicates) ─
    (anchors … remove_substrings) ─ collect

Every comparison is a map over files, which writes keys, and a shuffle: one task per range of all
keys. Comparisons that are not configured add no stage. The result is the remaining documents and
the decisions that collecting still applies.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import (
    DedupIndexConfig,
    MinHashDedupConfig,
    NoDeduplication,
    UrlDedupConfig,
)
from llmsys.data_pipeline.core.journal import SequenceDigest, compute_sequence_digest
from llmsys.data_pipeline.core.task_record import (
    LIST_FOLDER,
    FileList,
    FollowingJob,
    ItemRange,
    StageArguments,
    StageJob,
    TaskRecord,
    write_file_list,
    write_rows,
)
from llmsys.data_pipeline.dedup.dedup_index import (
    INDEX,
    INDEX_FILE,
    DocumentFiles,
    load_earlier_dataset,
)
from llmsys.data_pipeline.dedup.duplicate_decisions import EXACT, NEAR, SEMANTIC, URL
from llmsys.data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA, compute_group_size
from llmsys.data_pipeline.executors.base import LazySequence
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.language.rules_by_language import get_character_dedup_flags
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState, SignedFiles
from llmsys.data_pipeline.pipelines.earlier_configs import add_earlier_signatures
from llmsys.data_pipeline.stages.compute_signatures import (
    DOCUMENT_SCHEMA,
    write_group_documents,
    write_signatures,
)
from llmsys.data_pipeline.stages.find_equal_keys import (
    KeyRange,
    write_equal_duplicates,
    write_group_decisions,
    write_group_keys,
)
from llmsys.data_pipeline.stages.join_near_duplicates import (
    write_link_forest,
    write_near_duplicates,
)

_RULES = {"url": URL, "exact": EXACT}


class DeduplicationStages:
    """Comparisons that a config asks for."""

    def __init__(self, data: CrawlConfig, runner: StageRunner, stage: Stage) -> None:
        self.data = data
        self.config = data.deduplicate
        self.name = data.name
        self.runner = runner
        self.folder = data.folder
        self._run_stage = stage
        digest = runner.journal.get_input_digest
        self.by_characters = (
            get_character_dedup_flags(data) if self.config.minhash.kind != "none" else {}
        )
        self.earlier = [
            load_earlier_dataset(one, self.config, self.by_characters, digest)
            for one in self.config.earlier_datasets
        ]
        self.cuts = not isinstance(self.config.repeated_segments, NoDeduplication)
        self.near = ["minhash"] if self.config.minhash.kind != "none" else []
        parts = (("url", self.config.url), ("exact", self.config.exact))
        self.exact = [relation for relation, part in parts if part.kind != "none"]

    def run_comparisons(self, filtered: Sequence[TaskRecord], names: Sequence[str]) -> DatasetState:
        """Run every configured comparison, in the order of the module docstring.

        Args:
            filtered: Records of the filtered files.
            names: Names of the files.

        Returns:
            The remaining documents and pending decisions.
        """
        state = DatasetState(names, filtered, [filtered])
        states = []
        signed = None  # documents of the present state
        if self._initial_relations:
            signed = self._run_signature_stage("signatures", state, self._initial_relations)
            for relation in self.exact:
                found = self._run_equal_key_stage(relation, _RULES[relation], state, signed)
                state = state.add_decisions(
                    _RULES[relation], self.group_decisions(_RULES[relation], state, found)
                )
            states = [(state, signed)]
        if self.cuts:
            from llmsys.data_pipeline.pipelines.repeat_removal_stages import (
                remove_repeated_segments,
            )

            state = remove_repeated_segments(self, state)
            signed = None
            if self.near:
                signed = self._run_signature_stage("signatures_after_cuts", state, self.near)
                states = [*states, (state, signed)]
        if self.near:
            assert signed is not None
            found = self._run_near_duplicate_stages(state, signed)
            state = state.add_decisions(NEAR, self.group_decisions("near_duplicates", state, found))
        if not isinstance(self.config.semantic, NoDeduplication):
            state = self._add_semantic_decisions(state, signed)
        if states and states[-1][1] is signed:
            # The index holds no near or semantic duplicate either.
            states[-1] = (state, states[-1][1])
        if isinstance(self.config.index, DedupIndexConfig):
            from llmsys.data_pipeline.pipelines.index_stages import run_index_stages

            run_index_stages(self, states)
        else:
            (self.folder / INDEX / INDEX_FILE).unlink(missing_ok=True)  # of an earlier config
        if isinstance(self.config.substring, NoDeduplication):
            return state
        from llmsys.data_pipeline.pipelines.repeat_removal_stages import remove_repeated_substrings

        return remove_repeated_substrings(self, state)

    def _add_semantic_decisions(
        self, state: DatasetState, signed: SignedFiles | None
    ) -> DatasetState:
        from llmsys.data_pipeline.pipelines.semantic_stages import find_semantic_duplicates

        if signed is None:  # of ids alone, which decisions name
            stage = "signatures_after_cuts" if self.cuts else "signatures"
            signed = self._run_signature_stage(stage, state, ())
        found = find_semantic_duplicates(self, self.runner, state, signed.documents)
        return state.add_decisions(SEMANTIC, self.group_decisions(SEMANTIC, state, found))

    def build_first_task_factory(self) -> Callable[[TaskRecord, str], Task] | None:
        """Return a function (record, name) → task of the first stage, or None if that stage
        needs all files first.
        """
        if not self._initial_relations:
            return None
        return partial(
            self._build_signature_task_factory("signatures", self._initial_relations), 0, ()
        )

    @property
    def _initial_relations(self) -> list[str]:
        """Relations on unchanged texts. Near duplicates are compared after the stages that
        change texts.
        """
        return self.exact if self.cuts else [*self.exact, *self.near]

    def run_stage(self, name: str, tasks: Sequence[Task], unit: str) -> Sequence[TaskRecord]:
        """Run the tasks of a stage."""
        return self._run_stage(name, tasks, unit)

    def get_output_path(self, record: TaskRecord, output: int = 0) -> Path:
        """Return the path of an output of a record."""
        return self.folder / record.outputs[output].name

    def get_output_paths(self, records: Sequence[TaskRecord], output: int = 0) -> list[Path]:
        """Return the path of an output of each record."""
        return [self.get_output_path(record, output) for record in records]

    def _run_signature_stage(
        self, stage: str, state: DatasetState, relations: Sequence[str]
    ) -> SignedFiles:
        build_signature_task = self._build_signature_task_factory(stage, relations)

        def build_task(number: int) -> Task:
            return build_signature_task(
                number, state.select_decisions(number), state.kept[number], state.names[number]
            )

        records = self.run_stage(stage, LazySequence(len(state.names), build_task), "document")
        num_keys = dict.fromkeys(relations, 0)
        digests = {relation: SequenceDigest() for relation in relations}

        def iter_rows() -> Iterator[dict[str, Any]]:
            # Once for all that is asked of the records: reading one costs more than the rest.
            for record in records:
                result = record.result
                names = [os.fsencode(output.name) for output in record.outputs[:]]
                yield {"rows": result["rows"], **dict(zip(columns, names, strict=True))}
                for relation, digest in zip(relations, record.digests[1:], strict=True):
                    num_keys[relation] += result["keys"][relation]
                    digests[relation].add([record.digests[0], digest])

        columns = ["documents", *relations]
        schema = pa.schema([("rows", pa.int64()), *((name, pa.binary()) for name in columns)])
        rows = write_rows(self.folder / LIST_FOLDER / f"{stage}.arrow", schema, iter_rows())
        documents, *keys = [
            self.group_files(
                FileList(self.folder, rows, name), state, records, output, _get_schema(name)
            )
            for output, name in enumerate(columns)
        ]
        return SignedFiles(
            records,
            relations,
            DocumentFiles(documents, rows),
            dict(zip(relations, keys, strict=True)),
            num_keys,
            {relation: digest.compute() for relation, digest in digests.items()},
        )

    def group_files(
        self,
        files: FileList,
        state: DatasetState,
        records: Sequence[TaskRecord],
        output: int,
        schema: pa.Schema,
    ) -> FileList:
        """Return files of documents or keys, which are an output of records. Gather thousands of
        them by groups.
        """
        name = files.name
        if not state.is_grouped:
            return files
        size = compute_group_size(len(files))
        gather = (
            write_group_documents
            if schema == DOCUMENT_SCHEMA
            else partial(write_group_keys, schema=schema)
        )

        digests = [
            compute_sequence_digest(
                record.digests[output] for record in records[first : first + size]
            )
            for first in range(0, len(files), size)
        ]

        def build_task(group: int) -> Task:
            first = group * size
            path = f"work/groups.{name}.packs/{group:05d}"
            sources = ItemRange(files, first, min(first + size, len(files)))
            job = partial(gather, sources=sources, first=first, output=self.folder / path)
            inputs = [digests[group], first]
            return Task(f"groups.{name}/{group:05d}", inputs, [path], job, len(sources))

        tasks = LazySequence(len(digests), build_task)
        grouped = self._run_stage(f"groups.{name}", tasks, "file")
        return write_file_list(
            self.folder, f"{name}.groups", (record.outputs[0].name for record in grouped)
        )

    def group_decisions(
        self, stage: str, state: DatasetState, records: Sequence[TaskRecord]
    ) -> Sequence[TaskRecord]:
        """Gather the decisions about each group of files, so that a file's task opens one file
        per rule.
        """
        if not state.is_grouped:
            return records
        size = compute_group_size(len(state.names))
        paths = write_file_list(self.folder, stage, (record.outputs[0].name for record in records))
        digest = compute_sequence_digest(record.digests[0] for record in records)

        def build_task(group: int) -> Task:
            first = group * size
            output = f"work/groups.{stage}.packs/{group:05d}"
            job = partial(
                write_group_decisions,
                decisions=paths,
                first=first,
                last=first + size,
                output=self.folder / output,
            )
            return Task(f"groups.{stage}/{group:05d}", [digest, first], [output], job, len(paths))

        tasks = LazySequence(-(-len(state.names) // size), build_task)
        return self._run_stage(f"groups.{stage}", tasks, "file")

    def _build_signature_task_factory(
        self, stage: str, relations: Sequence[str]
    ) -> Callable[[int, Sequence[TaskRecord], TaskRecord, str], Task]:
        """Return a function that builds the task of one file from its number, pending decisions,
        record and name.
        """
        config = self.config
        settings: dict[str, Any] = {"relations": list(relations)}
        settings |= {"url": config.url.model_dump(mode="json")} if "url" in relations else {}
        near = "minhash" in relations
        unspaced = [code for code, by_characters in self.by_characters.items() if by_characters]
        settings |= (
            {"minhash": config.minhash.model_dump(mode="json"), "unspaced": unspaced}
            if near
            else {}
        )

        def build_task(
            number: int, decisions: Sequence[TaskRecord], record: TaskRecord, name: str
        ) -> Task:
            dropped = self.get_output_paths(decisions)
            following = self._build_signature_job(stage, relations, number, dropped, name)
            if not decisions:
                following = add_earlier_signatures(self.runner, following, name, settings)
            rows = sum(rows for _, rows in record.result["kept_batches"])
            depends_on = [record.digests[0], [decision.digests for decision in decisions], settings]
            job = following.bind_source(record.outputs[0].name)
            return Task(f"{stage}/{name}", depends_on, following.outputs, job, rows)

        return build_task

    def build_first_job(self, name: str) -> FollowingJob:
        """Return the job of the first stage for a filtered file, by its name."""
        return self._build_signature_job("signatures", self._initial_relations, 0, (), name)

    def _build_signature_job(
        self,
        stage: str,
        relations: Sequence[str],
        number: int,
        dropped: Sequence[Path],
        name: str,
    ) -> FollowingJob:
        outputs = tuple(
            f"work/{stage}.{relation}.packs/{name}" for relation in ("documents", *relations)
        )
        paths: dict[str, str | dict[str, str]] = {
            "documents": outputs[0],
            "keys": dict(zip(relations, outputs[1:], strict=True)),
        }
        own = {"number": number, "dropped": dropped}
        job = StageJob(write_signatures, self._signature_arguments, own, self.folder, paths)
        return FollowingJob(stage, job, outputs)

    @cached_property
    def _signature_arguments(self) -> StageArguments:
        config = self.config
        return StageArguments(
            url=config.url if isinstance(config.url, UrlDedupConfig) else None,
            minhash=config.minhash if isinstance(config.minhash, MinHashDedupConfig) else None,
            unspaced=[code for code, by_characters in self.by_characters.items() if by_characters],
        )

    def compare_key_ranges(
        self,
        stage: str,
        keys: int,
        inputs: Sequence[Any],
        build_job: Callable[[int, int, Path], Callable[..., Any]],
    ) -> Sequence[TaskRecord]:
        """Run one task per range of keys. `build_job` gets number, ranges and output."""
        # The number of ranges follows from the data, never from the number of workers.
        ranges = max(1, math.ceil(keys / self.config.key_filter.keys_per_task))

        def build_task(number: int) -> Task:
            output = f"work/{stage}/{number:05d}-of-{ranges:05d}.arrow"
            job = build_job(number, ranges, self.folder / output)
            inputs_of_range = [*inputs, number, ranges]
            return Task(f"{stage}/{number:05d}-of-{ranges:05d}", inputs_of_range, [output], job, 1)

        return self.run_stage(stage, LazySequence(ranges, build_task), "range")

    def build_range_factory(
        self, keys: FileList, schema: pa.Schema, state: DatasetState
    ) -> Callable[..., KeyRange]:
        """Return a function that builds the ranges of keys, without the rows that pending
        decisions drop.
        """
        gone = [
            write_file_list(
                self.folder, f"{keys.name}.{rule}", (record.outputs[0].name for record in records)
            )
            for rule, records in zip(state.rules, state.decisions, strict=True)
        ]
        return partial(
            KeyRange, keys, len(state.names), schema, gone, config=self.config.key_filter
        )

    def _build_relation_range_factory(
        self, relation: str, state: DatasetState, signed: SignedFiles
    ) -> tuple[Callable[..., KeyRange], list[Any]]:
        """Return a factory of the key ranges of a relation, here and in earlier datasets, and the
        inputs they depend
        on.
        """
        build_range = self.build_range_factory(signed.keys[relation], _get_schema(relation), state)
        inputs: list[Any] = [signed.digests[relation]]
        inputs += [
            [
                compute_sequence_digest(record.digests for record in records)
                for records in state.decisions
            ]
        ]
        inputs += [[dataset.digest for dataset in self.earlier]]
        return partial(build_range, earlier=self.earlier, relation=relation), inputs

    def _run_equal_key_stage(
        self, relation: str, rule: str, state: DatasetState, signed: SignedFiles
    ) -> Sequence[TaskRecord]:
        build_range, inputs = self._build_relation_range_factory(relation, state, signed)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            key_range = build_range(number=number, ranges=ranges)
            return partial(
                write_equal_duplicates,
                rule=rule,
                key_range=key_range,
                documents=signed.documents,
                output=output,
            )

        return self.compare_key_ranges(rule, signed.num_keys[relation], [inputs, rule], build_job)

    def _run_near_duplicate_stages(
        self, state: DatasetState, signed: SignedFiles
    ) -> Sequence[TaskRecord]:
        build_range, inputs = self._build_relation_range_factory("minhash", state, signed)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            key_range = build_range(number=number, ranges=ranges)
            return partial(
                write_link_forest, key_range=key_range, documents=signed.documents, output=output
            )

        links = self.compare_key_ranges("cluster", signed.num_keys["minhash"], inputs, build_job)
        output = "work/near_duplicates/near_duplicates.arrow"
        job = partial(
            write_near_duplicates,
            links=write_file_list(
                self.folder, "cluster", (record.outputs[0].name for record in links)
            ),
            documents=signed.documents,
            earlier=self.earlier,
            output=self.folder / output,
        )
        depends_on = [compute_sequence_digest(record.digests for record in links), inputs]
        return self.run_stage(
            "near_duplicates",
            [Task("near_duplicates/all", depends_on, [output], job, len(links))],
            "range",
        )


def _get_schema(column: str) -> pa.Schema:
    """Return the columns of documents, or of the keys of a relation."""
    match column:
        case "documents":
            return DOCUMENT_SCHEMA
        case "minhash":
            return BUCKET_SCHEMA
        case _:
            return ITEM_SCHEMA

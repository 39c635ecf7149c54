"""Stages between filtering and collecting that find duplicates.

    sign ─ same_url ─ same_text ─ (units ─ same_units ─ take_out) ─ link ─ near ─ (anchors … take_out_strings) ─ collect

Every comparison is a map over files, which writes keys, and a shuffle: one task per range of all keys. Comparisons that
are not configured add no stage. The result is the remaining documents and the decisions that collecting still applies.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_pipeline.core.journal import TaskRecord
from data_pipeline.dedup.dedup_index import INDEX, INDEX_FILE, load_earlier_dataset
from data_pipeline.dedup.duplicate_decisions import EXACT, NEAR, URL
from data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA
from data_pipeline.graph.stage_runner import StageRunner
from data_pipeline.graph.tasks import Stage, Task
from data_pipeline.language.rules_by_language import get_character_dedup_flags
from data_pipeline.pipelines.dataset_state import DatasetState, SignedFiles
from data_pipeline.stages.cluster_near_duplicates import write_link_forest, write_near_duplicates
from data_pipeline.stages.compute_signatures import write_signatures
from data_pipeline.stages.find_equal_keys import KeyRange, write_equal_duplicates
from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import DedupIndexConfig, MinHashDedupConfig, NoDeduplication, UrlDedupConfig

_RULES = {"url": URL, "text": EXACT}


class DeduplicationStages:
    """Comparisons that a config asks for."""

    def __init__(self, data: CrawlConfig, runner: StageRunner, stage: Stage) -> None:
        self.data, self.config, self.name = data, data.deduplicate, data.name
        self.runner, self.folder, self._run_stage = runner, data.folder, stage
        digest = runner.journal.get_input_digest
        self.by_characters = get_character_dedup_flags(data) if self.config.minhash.kind != "none" else {}
        self.earlier = [
            load_earlier_dataset(one, self.config, self.by_characters, digest) for one in self.config.earlier_datasets
        ]
        self.cuts = not isinstance(self.config.repeated_segments, NoDeduplication)
        self.near = ["near"] if self.config.minhash.kind != "none" else []
        parts = (("url", self.config.url), ("text", self.config.exact))
        self.exact = [relation for relation, part in parts if part.kind != "none"]

    def run_comparisons(self, judged: Sequence[TaskRecord], names: Sequence[str]) -> DatasetState:
        """Run every configured comparison, in the order of the module docstring.

        Args:
            judged: Records of the filtered files.
            names: Names of the files.

        Returns:
            The remaining documents and pending decisions.
        """
        state = DatasetState(names, judged, [judged])
        states = []
        if self._initial_relations:
            signed = self._run_signature_stage("sign", state, self._initial_relations)
            for relation in self.exact:
                state = state.add_decisions(
                    _RULES[relation], self._run_equal_key_stage(relation, _RULES[relation], state, signed)
                )
            states = [(state, signed)]
        if self.cuts:
            from data_pipeline.pipelines.repeat_removal_stages import remove_repeated_segments

            state = remove_repeated_segments(self, state)
            states = (
                states
                if not self.near
                else [*states, (state, self._run_signature_stage("sign_left", state, self.near))]
            )
        if self.near:
            state = state.add_decisions(NEAR, self._run_near_duplicate_stages(state, states[-1][1]))
            states[-1] = (state, states[-1][1])
        if isinstance(self.config.index, DedupIndexConfig):
            from data_pipeline.pipelines.index_stages import run_index_stages

            run_index_stages(self, states)
        else:
            (self.folder / INDEX / INDEX_FILE).unlink(missing_ok=True)  # of an earlier config
        if isinstance(self.config.substring, NoDeduplication):
            return state
        from data_pipeline.pipelines.repeat_removal_stages import remove_repeated_substrings

        return remove_repeated_substrings(self, state)

    def build_first_task_factory(self) -> Callable[[TaskRecord, str], Task] | None:
        """Return a function (record, name) → task of the first stage, or None if that stage needs all files first."""
        if not self._initial_relations:
            return None
        return partial(self._build_signature_task_factory("sign", self._initial_relations), 0, ())

    @property
    def _initial_relations(self) -> list[str]:
        """Relations on unchanged texts. Near duplicates are compared after the stages that change texts."""
        return self.exact if self.cuts else [*self.exact, *self.near]

    def run_stage(self, name: str, tasks: list[Task], unit: str) -> list[TaskRecord]:
        """Run the tasks of a stage."""
        return self._run_stage(name, tasks, unit)

    def get_output_path(self, record: TaskRecord, output: int = 0) -> Path:
        """Return the path of an output of a record."""
        return self.folder / record.outputs[output].name

    def get_output_paths(self, records: Sequence[TaskRecord], output: int = 0) -> list[Path]:
        """Return the path of an output of each record."""
        return [self.get_output_path(record, output) for record in records]

    def _run_signature_stage(self, stage: str, state: DatasetState, relations: Sequence[str]) -> SignedFiles:
        signing = self._build_signature_task_factory(stage, relations)
        files = enumerate(zip(state.kept, state.names, strict=True))
        tasks = [signing(number, state.decisions, record, name) for number, (record, name) in files]
        return SignedFiles(self.run_stage(stage, tasks, "document"), relations)

    def _build_signature_task_factory(
        self, stage: str, relations: Sequence[str]
    ) -> Callable[[int, Sequence[TaskRecord], TaskRecord, str], Task]:
        """Return a function that builds the task of one file from its number, pending decisions, record and name."""
        config = self.config
        settings: dict[str, Any] = {"relations": list(relations)}
        settings |= {"url": config.url.model_dump(mode="json")} if "url" in relations else {}
        near = "near" in relations
        unspaced = [code for code, by_characters in self.by_characters.items() if by_characters]
        settings |= {"minhash": config.minhash.model_dump(mode="json"), "unspaced": unspaced} if near else {}

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
            depends_on = [record.digests[0], [decision.digests for decision in decisions], settings]
            return Task(f"{stage}/{name}", depends_on, outputs, job, rows)

        return build_task

    def compare_key_ranges(
        self, stage: str, keys: int, inputs: Sequence[Any], build_job: Callable[[int, int, Path], Callable[..., Any]]
    ) -> list[TaskRecord]:
        """Run one task per range of keys. `build_job` gets number, ranges and output."""
        # The number of ranges follows from the data, never from the number of workers.
        ranges = max(1, math.ceil(keys / self.config.key_filter.keys_per_task))
        tasks = []
        for number in range(ranges):
            output = f"work/{stage}/{number:05d}-of-{ranges:05d}.arrow"
            job = build_job(number, ranges, self.folder / output)
            tasks.append(Task(f"{stage}/{number:05d}-of-{ranges:05d}", [*inputs, number, ranges], [output], job, 1))
        return self.run_stage(stage, tasks, "range")

    def build_range_factory(
        self, records: Sequence[TaskRecord], output: int, schema: pa.Schema, dropped: Sequence[TaskRecord]
    ) -> Callable[..., KeyRange]:
        """Return a function that builds the ranges of the keys in an output of records."""
        sources, gone = self.get_output_paths(records, output), self.get_output_paths(dropped)
        return partial(KeyRange, sources, schema, gone, config=self.config.key_filter)

    def _build_relation_range_factory(
        self, relation: str, state: DatasetState, signed: SignedFiles
    ) -> tuple[Callable[..., KeyRange], list[Any]]:
        """Return a factory of the key ranges of a relation, here and in earlier datasets, and the inputs they depend
        on.
        """
        output = 1 + list(signed.relations).index(relation)
        schema = BUCKET_SCHEMA if relation == "near" else ITEM_SCHEMA
        build_range = self.build_range_factory(signed.records, output, schema, state.decisions)
        inputs: list[Any] = [[[record.digests[0], record.digests[output]] for record in signed.records]]
        inputs += [[record.digests for record in state.decisions], [dataset.digest for dataset in self.earlier]]
        return partial(build_range, earlier=self.earlier, relation=relation), inputs

    def _run_equal_key_stage(
        self, relation: str, rule: str, state: DatasetState, signed: SignedFiles
    ) -> list[TaskRecord]:
        build_range, inputs = self._build_relation_range_factory(relation, state, signed)
        documents = self.get_output_paths(signed.records)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            key_range = build_range(number=number, ranges=ranges)
            return partial(write_equal_duplicates, rule=rule, key_range=key_range, documents=documents, output=output)

        return self.compare_key_ranges(f"same_{relation}", signed.count_keys(relation), [inputs, rule], build_job)

    def _run_near_duplicate_stages(self, state: DatasetState, signed: SignedFiles) -> list[TaskRecord]:
        build_range, inputs = self._build_relation_range_factory("near", state, signed)
        documents = self.get_output_paths(signed.records)

        def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
            return partial(
                write_link_forest,
                key_range=build_range(number=number, ranges=ranges),
                documents=documents,
                output=output,
            )

        links = self.compare_key_ranges("link", signed.count_keys("near"), inputs, build_job)
        output = "work/near/near.arrow"
        join = partial(
            write_near_duplicates, links=self.get_output_paths(links), documents=documents, earlier=self.earlier
        )
        depends_on = [[record.digests for record in links], inputs]
        task = Task("near/all", depends_on, [output], partial(join, output=self.folder / output), len(links))
        return self.run_stage("near", [task], "range")

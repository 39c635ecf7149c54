"""Stages of a dataset of documents, in order. Each method builds the tasks of one stage.

Reads the `data` and `tokenizer` sections of a run.

Invariants:
    - The inputs of a task list everything that decides its outputs, besides the code version.
"""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from typing import Any, Literal

from llmsys.config.cleaning import PiiReplacementConfig, ReadConfig
from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.language import parse_language_rules
from llmsys.config.python_code import compute_code_digest
from llmsys.config.tokenizer import TokenizerConfig
from llmsys.data_pipeline.core.funnel import PII
from llmsys.data_pipeline.core.input_columns import ChosenColumns, choose_columns
from llmsys.data_pipeline.core.input_fields import FieldCounts
from llmsys.data_pipeline.core.journal import EncodedJson, compute_json_digest
from llmsys.data_pipeline.core.staging import SCORES, get_write_path
from llmsys.data_pipeline.core.task_record import (
    EXTRACTED,
    FollowingJob,
    StageArguments,
    StageJob,
    TaskRecord,
    write_file_list,
)
from llmsys.data_pipeline.executors.base import LazySequence, select_items
from llmsys.data_pipeline.graph.quarantine import (
    build_empty_extraction,
    build_empty_filtering,
    drop_quarantined,
)
from llmsys.data_pipeline.graph.resource_files import (
    compute_file_digests,
    list_extractor_versions,
    list_rule_files,
    list_rule_libraries,
    list_url_files,
    require_languages,
)
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import NextStage, Task
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.pipelines.build_manifest import StageRecords, list_funnel_stages
from llmsys.data_pipeline.pipelines.dataset_state import (
    DatasetState,
    get_collected_names,
    has_cleaning,
)
from llmsys.data_pipeline.pipelines.deduplication_stages import DeduplicationStages
from llmsys.data_pipeline.pipelines.earlier_configs import EarlierFilterings
from llmsys.data_pipeline.pipelines.output_stages import (
    run_encoding_stage,
    run_export_stage,
    run_index_stage,
    run_threshold_stage,
    run_token_stage,
    run_tokenizer_stage,
)
from llmsys.data_pipeline.pipelines.stage_code import DOCUMENT_STAGES, compute_code_version
from llmsys.data_pipeline.readers.input_files import (
    InputFiles,
    compute_file_stamp,
    compute_input_identity,
    get_input_name,
    get_input_size,
    list_late_formats,
    may_have_fields,
)
from llmsys.data_pipeline.stages.apply_rules import apply_rules_to_file
from llmsys.data_pipeline.stages.collect import collect_shard
from llmsys.data_pipeline.stages.extract_text import extract_file
from llmsys.data_pipeline.stages.split_inputs import (
    LEAST_PROBED,
    InputBlock,
    InputBlockList,
    list_input_blocks,
    split_input_file,
)
from llmsys.dataset.token_shards import read_schema
from llmsys.storage.paths import is_remote


def _format_identity(stamp: Sequence[int]) -> str:
    return "-".join(map(str, stamp))


Until = Literal["documents", "tokenizer", "tokens"]


class DocumentPipeline:
    """Stages of one dataset of documents."""

    def __init__(self, data: CrawlConfig, tokenizer: TokenizerConfig, runner: StageRunner) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.runner = runner
        self.folder = data.folder

    def run_stages(self, files: InputFiles, until: Until) -> StageRecords:
        """Run the stages up to `until` and return their records. Raise DataError if no document
        remains.
        """
        inputs = files.paths
        deduplication = DeduplicationStages(self.data, self.runner, self._run_stage)
        build_extract_task = self._build_extract_task_factory(files)
        # Each block can be extracted as soon as its file is split, then filtered and given its
        # signatures.
        signing = self._build_next_stage(
            "signatures",
            deduplication.build_first_task_factory(),
            deduplication.build_first_job,
        )
        filtering = self._build_next_stage(
            "filter", self._filter_task_factory, self._build_filter_job, signing
        )
        blocks = self._run_split_stage(files, build_extract_task, filtering)
        extract_tasks = LazySequence(len(blocks), lambda index: build_extract_task(blocks[index]))
        outcome = StageRecords(
            inputs=inputs, extracted=self._run_stage("extract", extract_tasks, "B", filtering)
        )
        self._list_extracted_files(outcome.extracted)
        names: Sequence[str] = LazySequence(len(blocks), lambda index: blocks[index].name)
        extracted, names, _ = drop_quarantined(outcome.extracted, names)
        outcome.filtered = self._run_filter_stage(extracted, names)
        filtered, names, remaining = drop_quarantined(outcome.filtered, names)
        state = deduplication.run_comparisons(filtered, names)
        outcome.rewritten = state.rewritten_records
        state = state.add_unread(select_items(extracted, remaining))
        outcome.columns = self._choose_columns(files, outcome.extracted, state)
        outcome.collected = self._run_collect_stage(state, outcome)
        if has_cleaning(self.data):
            from llmsys.data_pipeline.pipelines.cleaning_stages import run_cleaning_stages

            outcome.collected = run_cleaning_stages(
                self.data, self.runner, self._run_stage, outcome.collected
            )
        outcome.require_documents()
        if self.data.sampling:
            from llmsys.data_pipeline.pipelines.sampling_stages import check_sampling

            check_sampling(self.data, outcome.collected)
        # Tokens are counted where they are encoded.
        counts_tokens = until == "tokens" and self.data.documents.export_columns != "own"
        if not counts_tokens:
            outcome.exports = run_export_stage(self.data, self._run_stage, outcome.collected)
        outcome.thresholds = run_threshold_stage(
            self.data, self.rules, self._run_stage, outcome.collected, list_funnel_stages(self.data)
        )
        if until == "documents":
            return outcome
        collected = outcome.collected
        outcome.tokenizer = run_tokenizer_stage(
            self.data, self.tokenizer, self.runner, self._run_stage, collected, files.heldout
        )
        if until == "tokenizer":
            return outcome
        outcome.encoded = run_encoding_stage(
            self.data, self.runner, self._run_stage, collected, outcome.tokenizer, files.heldout
        )
        if counts_tokens:
            outcome.exports = run_export_stage(
                self.data, self._run_stage, outcome.collected, outcome.encoded
            )
        if self.data.sampling:
            from llmsys.data_pipeline.pipelines.sampling_stages import run_sampling_stages

            outcome.sampled = run_sampling_stages(
                self.data, self._run_stage, outcome.collected, outcome.encoded
            )
        stored_ids = outcome.tokenizer.result["vocab_size"]
        outcome.tokens = run_token_stage(
            self.data, self._run_stage, outcome.sampled or outcome.encoded, stored_ids
        )
        outcome.indexes = run_index_stage(self.data, self._run_stage, outcome.tokens)
        return outcome

    @cached_property
    def rules(self) -> str:
        """Words and rules of each language, see `serialize_rules_by_language`."""
        return serialize_rules_by_language(self.data)

    def _run_stage(
        self, name: str, tasks: Sequence[Task], unit: str, next_stage: NextStage | None = None
    ) -> Sequence[TaskRecord]:
        code = compute_code_version(DOCUMENT_STAGES[name.partition(".")[0]])
        return self.runner.run_stage(name, tasks, unit=unit, code=code, next_stage=next_stage)

    def _run_split_stage(
        self,
        files: InputFiles,
        build_extract_task: Callable[[InputBlock], Task],
        filtering: NextStage | None,
    ) -> Sequence[InputBlock]:
        """Split long files into blocks. A remote file is identified by its tag or time, a local one
        by size, time and inode, until it changes: then its bytes are compared with those before.
        """
        inputs = files.paths
        # The digest tells apart files of one name in different folders.
        named = [
            (path, f"{get_input_name(path)}-{compute_json_digest(path)[:8]}") for path in inputs
        ]
        whole = dict[int, list[Any]]()
        positions = array("q", [-1] * len(inputs))
        tasks = list[Task]()
        paths = dict[str, str]()
        with self.runner.journal.hold_changes():
            for number, (path, name) in enumerate(named):
                block = self._find_whole_block(files, path, name)
                if block is not None:
                    whole[number] = block
                    continue
                positions[number] = len(tasks)
                tasks.append(self._build_split_task(path, name))
                paths[name] = path

        def build_extract_tasks(name: str, record: TaskRecord) -> Iterator[Task]:
            result = self._keep_identities(paths[name], name, record.result)
            yield from map(build_extract_task, list_input_blocks(paths[name], name, result))

        code = compute_code_version(DOCUMENT_STAGES["extract"])
        extract = NextStage("extract", code, build_extract_tasks, filtering, is_counted=True)
        # Without tasks, too: the records of earlier runs go.
        records = self._run_stage("split_inputs", tasks, "B", extract)

        def find_result(index: int) -> dict[str, Any]:
            if index in whole:
                return {"blocks": [whole[index]]}
            result = records[positions[index]].result
            return self._keep_identities(*named[index], result)

        return InputBlockList(named, find_result)

    def _find_whole_block(self, files: InputFiles, path: str, name: str) -> list[Any] | None:
        """Return [start, stop, identity] of a file that is one block; None for one that must be
        split, or compared with what it was.
        """
        size = self.data.executor.block_bytes
        journal = self.runner.journal
        # Only the user's own reader knows where a record ends.
        has_reader = files.get_read_config(path, self.data.read).reader is not None
        if is_remote(path) or has_reader:
            length = get_input_size(path)
            is_whole = has_reader or length <= size
            return [0, length, compute_input_identity(journal, path)] if is_whole else None
        stamp = compute_file_stamp(path)
        if not stamp or stamp[0] > size or not os.path.isfile(path):
            return None
        identity = journal.find_input_identity(path, stamp)
        if identity is None:
            if journal.has_any_record("split_inputs", name) or journal.has_any_record(
                "extract", name
            ):
                return None
            identity = _format_identity(stamp)
            journal.save_input_digest(path, [*stamp, identity])
        return [0, stamp[0], identity]

    def _build_split_task(self, path: str, name: str) -> Task:
        size = self.data.executor.block_bytes
        journal = self.runner.journal
        stamp: str | list[int]
        if is_remote(path):
            identity = compute_input_identity(journal, path)
            stamp = identity
            least = None
        else:
            stamp = compute_file_stamp(path)
            is_new = bool(stamp) and not (
                journal.has_any_record("split_inputs", name)
                or journal.has_any_record("extract", name)
            )
            identity = _format_identity(stamp) if is_new else ""
            least = LEAST_PROBED
        job = partial(
            split_input_file, source=path, block_bytes=size, identity=identity, least_probed=least
        )
        return Task(f"split_inputs/{name}", [path, stamp, size], [], job, get_input_size(path))

    def _keep_identities(self, path: str, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """Return the result of splitting a changed file with the identity that each block with the
        same bytes had.
        """
        if not result.get("is_hashed"):
            return result
        blocks = []
        for block in list_input_blocks(path, name, result):
            known = self.runner.journal.find_result(f"extract/{block.name}") or {}
            is_same = known.get("digest") == block.digest
            identity = known["identity"] if is_same else block.digest
            blocks.append([block.start, block.start + block.size, identity])
        return result | {"blocks": blocks}

    def _build_extract_task_factory(self, files: InputFiles) -> Callable[[InputBlock], Task]:
        """Return a function (block) → task that extracts it."""
        config = self.data.extract
        lists = compute_file_digests(self.runner.journal, list_url_files(self.data))
        versions = list_extractor_versions(self.data)

        @cache
        def get_settings(read: ReadConfig, keeps: bool) -> tuple[StageArguments, EncodedJson]:
            read = read if keeps else read.model_copy(update={"keep_fields": "none"})
            data = self.data.model_copy(update={"read": read})
            dumped = data.model_dump(mode="json", include={"extract", "read", "url"})
            # Not in the key of a file without further fields.
            dumped["read"].pop("keep_fields", None)
            code = [] if read.reader is None else [compute_code_digest(read.reader)]
            code += [f"fields {read.keep_fields}"] if keeps else []
            shared = StageArguments(
                config=config, read=read, urls=self.data.url, lists=tuple(lists)
            )
            settings = [dumped["extract"], dumped["read"], dumped["url"], *versions, *code]
            return shared, EncodedJson.from_value(settings)

        def build_task(block: InputBlock) -> Task:
            read = files.get_read_config(block.source, self.data.read)
            # Not in the key of a file that has no rows of CSV.
            if read.column_types and not list_late_formats(block.source):
                read = read.model_copy(update={"column_types": {}})
            shared, settings = get_settings(read, may_have_fields(block.source, read))
            outputs = [f"work/extracted.packs/{block.name}", f"work/unread.packs/{block.name}"]
            own = {"source": block.source, "start": block.start, "stop": block.stop}
            if not is_remote(block.source):
                own["identity"] = block.digest
            paths: dict[str, str | dict[str, str]] = {"output": outputs[0], "unread": outputs[1]}
            job = StageJob(extract_file, shared, own, self.folder, paths)
            depends_on = [block.source, block.digest, block.start, settings, lists]
            depends_on += list_late_formats(block.source)
            build_fallback = partial(build_empty_extraction, block)
            return Task(
                f"extract/{block.name}", depends_on, outputs, job, block.size, build_fallback
            )

        return build_task

    def _build_next_stage(
        self,
        stage: str,
        task: Callable[[TaskRecord, str], Task] | None,
        build_following: Callable[[str], FollowingJob],
        then: NextStage | None = None,
    ) -> NextStage | None:
        if task is None:
            return None
        code = compute_code_version(DOCUMENT_STAGES[stage])
        return NextStage(
            stage,
            code,
            lambda name, record: [task(record, name)],
            then,
            build_following=build_following,
        )

    def _list_extracted_files(self, extracted: Sequence[TaskRecord]) -> None:
        """Write the list of the files of extracted texts, and the event that counts pages."""
        pages = dict.fromkeys(("pages", "compiled_pages", "left_pages"), 0)

        def iter_names() -> Iterator[str]:
            for record in extracted:
                if self.runner.num_run:
                    result = record.result
                    for name in pages:
                        pages[name] += result.get(name, 0)
                if record.outputs:
                    yield record.outputs[0].name

        write_file_list(self.folder, EXTRACTED, iter_names())
        self.runner.record_core_pages(pages)

    def _run_filter_stage(
        self, extracted: Sequence[TaskRecord], names: Sequence[str]
    ) -> Sequence[TaskRecord]:
        def build_task(index: int) -> Task:
            return self._filter_task_factory(extracted[index], names[index])

        return self._run_stage("filter", LazySequence(len(names), build_task), "page")

    def _build_filter_job(self, name: str) -> FollowingJob:
        """Return the job that filters a block by its name."""
        kept, dropped = f"work/filtered.packs/{name}", f"work/filtered.dropped.packs/{name}"
        paths: dict[str, str | dict[str, str]] = {"kept": kept, "dropped": dropped}
        if any(isinstance(rule, EncoderClassifierConfig) for rule in self.data.rules):
            paths["scores"] = f"work/{SCORES}"
        job = StageJob(apply_rules_to_file, self._filter_arguments, {}, self.folder, paths)
        return FollowingJob("filter", job, (kept, dropped))

    @cached_property
    def _rule_files(self) -> tuple[str, ...]:
        return (
            *compute_file_digests(self.runner.journal, list_rule_files(self.data)),
            *list_rule_libraries(self.data),
        )

    @cached_property
    def _filter_arguments(self) -> StageArguments:
        require_languages(self.data, parse_language_rules(self.rules))
        return StageArguments(config=self.data, rules=self.rules, files=self._rule_files)

    @cached_property
    def _filter_task_factory(self) -> Callable[[TaskRecord, str], Task]:
        """A function (extracted record, block name) → task that filters the block."""
        settings = self.data.model_dump(mode="json", include={"unicode", "language", "documents"})
        # Exported formats do not change the filtered documents.
        settings["documents"].pop("export_formats")
        settings["documents"].pop("export_columns", None)
        settings["rules"] = self.rules
        settings["files"] = self._rule_files
        encoded = EncodedJson.from_value(settings)
        earlier = EarlierFilterings(self.runner, encoded.text)

        def build_task(extracted: TaskRecord, name: str) -> Task:
            following = earlier.add_result(self._build_filter_job(name), extracted, name)
            counts = extracted.result
            pages = counts["pages"]
            html_bytes = counts["html_bytes"]
            # The second output, the unreadable places, decides nothing here.
            depends_on = [extracted.digests[:1], encoded]
            return Task(
                f"filter/{name}",
                depends_on,
                following.outputs,
                following.bind_source(extracted.outputs[0].name),
                pages,
                partial(build_empty_filtering, pages, html_bytes),
            )

        return build_task

    def _choose_columns(
        self, files: InputFiles, extracted: Sequence[TaskRecord], state: DatasetState
    ) -> ChosenColumns | None:
        """Return the columns that further fields become; None if no input may have any."""
        read = self.data.read
        if not any(
            may_have_fields(path, files.get_read_config(path, read)) for path in files.paths
        ):
            return None
        counts = FieldCounts()
        for record in extracted:
            if found := record.result.get("fields"):
                counts.merge_counts(found)
        # Of cleaning, which comes later, the names follow from the config.
        kinds = self.data.pii.kinds if isinstance(self.data.pii, PiiReplacementConfig) else ()
        present = read_schema(self.folder / state.kept[0].outputs[0].name).names
        wanted = None if isinstance(read.keep_fields, str) else read.keep_fields
        own = [*present, *(f"{PII}.{kind}" for kind in kinds)]
        return choose_columns(counts, own, wanted, read.column_types)

    def _run_collect_stage(
        self, state: DatasetState, outcome: StageRecords
    ) -> Sequence[TaskRecord]:
        digest = state.digest
        sources, rows = state.write_sources(self.folder, self.data.documents.num_shards)
        rules = state.rules
        decisions = [self.folder / record.outputs[0].name for record in state.select_decisions(0)]
        if state.is_grouped:
            # only for thousands of blocks
            from llmsys.data_pipeline.pipelines.gather_stage import run_gather_stage

            sources, gathered = run_gather_stage(
                self.data, self._run_stage, state, sources, outcome.columns is not None
            )
            # Gathering has applied them.
            decisions = []
            rules = ()
            outcome.rewritten = [*outcome.rewritten, gathered]

        columns = outcome.columns.columns if outcome.columns else None
        own = [asdict(columns)] if columns else []

        def build_task(shard: int) -> Task:
            outputs = get_collected_names(self.data, shard)
            job = partial(
                collect_shard,
                shard=shard,
                sources=sources,
                decisions=decisions,
                rules=rules,
                documents=get_write_path(self.folder, outputs[0]),
                dropped=get_write_path(self.folder, outputs[1]),
                batch_bytes=self.data.documents.batch_bytes,
                columns=columns,
            )
            depends_on = [digest, self.data.documents.batch_bytes, *own]
            return Task(
                f"collect/part-{shard:05d}", [shard, depends_on, outputs], outputs, job, rows[shard]
            )

        return self._run_stage(
            "collect", LazySequence(self.data.documents.num_shards, build_task), "document"
        )

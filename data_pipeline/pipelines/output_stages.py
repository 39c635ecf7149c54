"""Stages after final documents: export, near thresholds, tokenizer, token ids of each document,
token files.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmsys.config.data import ChatConfig, CrawlConfig, TokensConfig
from llmsys.config.tokenizer import (
    FileTokenizerConfig,
    NoTokenizer,
    PythonTokenizerConfig,
    TokenizerConfig,
)
from llmsys.data_pipeline.core.staging import find_output, get_write_path
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.pipelines.earlier_configs import find_earlier_tokens
from llmsys.data_pipeline.stages.near_thresholds import (
    LanguageThresholds,
    merge_threshold_reports,
    summarize_near_thresholds,
)
from llmsys.data_pipeline.tokenize.encode_documents import encode_file
from llmsys.data_pipeline.tokenize.shuffle_documents import (
    SPLITS,
    plan_files,
    write_index,
    write_token_file,
)
from llmsys.data_pipeline.tokenize.tokenizer_files import list_tokenizer_files
from llmsys.data_pipeline.tokenize.train_sentencepiece import train_document_tokenizer
from llmsys.dataset.manifest import Split, SplitName
from llmsys.dataset.manifest_section import ThresholdReport, TokenIndex
from llmsys.dataset.token_file import get_page_table_path


def run_tokenizer_stage(
    data: CrawlConfig,
    config: TokenizerConfig,
    runner: StageRunner,
    stage: Stage,
    collected: Sequence[TaskRecord],
    heldout_files: tuple[str, ...],
) -> TaskRecord:
    """Copy the tokenizer that the config names, or train one on the documents.

    Args:
        data: The section `data`.
        config: The section `tokenizer`.
        runner: Runs the task.
        stage: The stage in the log.
        collected: Records of the collected documents.
        heldout_files: Files whose documents are held out; a tokenizer is not trained on them.

    Returns:
        The record of the task.
    """
    if isinstance(config, FileTokenizerConfig | PythonTokenizerConfig):
        from llmsys.data_pipeline.pipelines.copy_tokenizer import build_copy_task

        return stage("tokenizer", [build_copy_task(runner, data.folder, config)], "file")[0]
    assert not isinstance(config, NoTokenizer)  # a config of texts has one
    outputs = [f"tokenizer/{name}" for name in list_tokenizer_files(config)]
    folder = get_write_path(data.folder, "tokenizer")
    settings = config.model_dump(mode="json")
    split = data.split
    sources = [find_output(data.folder, record.outputs[0].name) for record in collected]
    own = {"heldout_files": heldout_files} if heldout_files else {}
    job = partial(
        train_document_tokenizer,
        sources=sources,
        folder=folder,
        config=config,
        split=split,
        heldout_files=heldout_files,
    )
    depends_on = [
        settings,
        split.model_dump(mode="json") | own,
        [record.digests[0] for record in collected],
    ]
    rows = sum(record.result["documents_rows"] for record in collected)
    return stage(
        "tokenizer", [Task("tokenizer/model", depends_on, outputs, job, rows)], "document"
    )[0]


_ENCODED_BY: dict[str, Any] = {"split": True, "tokens": {"seed"}, "document_order": True}


def run_encoding_stage(
    data: CrawlConfig,
    runner: StageRunner,
    stage: Stage,
    collected: Sequence[TaskRecord],
    tokenizer: TaskRecord,
    heldout_files: tuple[str, ...],
) -> Sequence[TaskRecord]:
    """Encode every document.

    Args:
        data: The section `data`.
        runner: Knows what earlier configs encoded.
        stage: Runs the tasks.
        collected: Records of the collected documents.
        tokenizer: Record of the tokenizer.
        heldout_files: Files whose documents are held out.

    Returns:
        One record per document file.
    """
    # decides the token ids
    meaning = f"{tokenizer.result['fingerprint']} {tokenizer.result['eos_id']}"
    own = {"heldout_files": heldout_files} if heldout_files else {}
    settings = data.model_dump(mode="json", include=_ENCODED_BY) | own
    tasks = []
    for record in collected:
        source = find_output(data.folder, record.outputs[0].name)
        outputs = [f"work/encoded/{source.name}", f"work/encoded/{source.stem}.pieces.arrow"]
        job = partial(
            encode_file,
            source=source,
            output=data.folder / outputs[0],
            pieces=data.folder / outputs[1],
            model=find_output(data.folder, tokenizer.outputs[0].name),
            fingerprint=meaning,
            config=data,
            heldout_files=heldout_files,
            earlier=find_earlier_tokens(runner, data.folder, source.stem, [meaning, settings]),
        )
        depends_on = [record.digests[0], meaning, settings]
        tasks.append(
            Task(f"encode/{source.stem}", depends_on, outputs, job, record.result["text_bytes"])
        )
    return stage("encode", tasks, "B")


def run_token_stage(
    data: CrawlConfig | TokensConfig | ChatConfig,
    stage: Stage,
    encoded: Sequence[TaskRecord],
    vocab_size: int,
) -> Sequence[TaskRecord]:
    """Write the token files, in an order given by hashes.

    Args:
        data: The section `data`.
        stage: Runs the tasks.
        encoded: Records of the encoded documents.
        vocab_size: Number of ids; decides the dtype.

    Returns:
        One record per file.
    """
    sources = [data.folder / record.outputs[0].name for record in encoded]
    # The first output holds the ids; the usage counts decide no token file.
    digests = [record.digests[:1] for record in encoded]
    tasks = []
    for split in SPLITS:
        for plan in plan_files(sources, split, data.tokens.shard_tokens):
            output = f"tokens/{plan.name}"
            job = partial(
                write_token_file,
                plan=plan,
                sources=sources,
                output=get_write_path(data.folder, output),
                vocab_size=vocab_size,
                batch_tokens=data.tokens.batch_tokens,
            )
            depends_on = [digests, split, plan.first, plan.last, data.tokens.batch_tokens]
            outputs = [output, str(get_page_table_path(Path(output)))]
            tasks.append(Task(f"tokens/{plan.name}", depends_on, outputs, job, plan.tokens))
    return stage("tokens", tasks, "tok")


def run_index_stage(
    data: CrawlConfig | TokensConfig | ChatConfig, stage: Stage, tokens: Sequence[TaskRecord]
) -> Sequence[TaskRecord]:
    """Write the list of the token files of each split.

    Args:
        data: The section `data`.
        stage: Runs the tasks.
        tokens: Records of the token files.

    Returns:
        One record per split.
    """
    tasks = []
    for split in SPLITS:
        own = [record for record in tokens if record.result["name"].startswith(f"{split}-")]
        output = f"tokens/{split}.index"
        entries = [record.result for record in own]
        job = partial(write_index, output=get_write_path(data.folder, output), entries=entries)
        tasks.append(
            Task(
                f"token_index/{split}", [record.digests for record in own], [output], job, len(own)
            )
        )
    return stage("token_index", tasks, "file")


def build_splits(indexes: Sequence[TaskRecord]) -> dict[SplitName, Split]:
    """Return the splits of a manifest.

    Args:
        indexes: Records of `run_index_stage`; none before there are tokens.

    Returns:
        Splits by name.
    """
    splits: dict[SplitName, Split] = {}
    for name, record in zip(SPLITS, indexes, strict=True) if indexes else ():
        output = record.outputs[0]
        sums = dict(record.result)
        index = TokenIndex(
            name=Path(output.name).name, files=sums.pop("files"), digest=output.digest
        )
        splits[name] = Split(**sums, index=index)
    return splits


def run_export_stage(
    data: CrawlConfig,
    stage: Stage,
    documents: Sequence[TaskRecord],
    encoded: Sequence[TaskRecord] = (),
) -> Sequence[TaskRecord]:
    """Write final documents in the formats of `data.documents.export_formats`; no stage if there
    are none.

    Args:
        data: The crawl section of a run.
        stage: Runs the tasks of one stage.
        documents: Records of the final documents.
        encoded: Records of the encoded documents, which count tokens; none before there are any.

    Returns:
        One record per exported file, ordered by format.
    """
    if not data.documents.export_formats:
        return []
    from llmsys.data_pipeline.stages.export_documents import export_documents

    tasks = []
    columns = data.documents.export_columns
    for format in data.documents.export_formats:
        for number, record in enumerate(documents):
            source = find_output(data.folder, record.outputs[0].name)
            depends_on = [record.digests[0], format]
            tokens: Path | None = None
            if columns != "own":
                depends_on += [columns]
                if encoded:
                    depends_on += [encoded[number].digests[0]]
                    tokens = data.folder / encoded[number].outputs[0].name
            output = f"documents/{Path(source).stem}.{format}"
            path = get_write_path(data.folder, output)
            job = partial(
                export_documents,
                source=source,
                output=path,
                format=format,
                columns=columns,
                tokens=tokens,
            )
            name = f"export/{Path(output).name}"
            tasks.append(Task(name, depends_on, [output], job, record.result["documents_rows"]))
    return stage("export", tasks, "document")


def run_threshold_stage(
    data: CrawlConfig, rules: str, stage: Stage, final: Sequence[TaskRecord], stages: Sequence[str]
) -> tuple[ThresholdReport, ...]:
    """Find the documents nearest to each threshold, one file of documents per task.

    Args:
        data: The crawl section of a run.
        rules: Rules of each language, as `serialize_rules_by_language` writes them.
        stage: Runs the tasks of one stage.
        final: Records of the final documents.
        stages: Stages of the funnel, which order the reports.

    Returns:
        Reports for the manifest, so that `llmsys report` reads no document.
    """
    # Only these language settings are thresholds.
    language = data.language.model_dump(mode="json", include={"languages", "min_score"})
    depends_on = [language, rules]
    tasks = []
    for record in final:
        documents, dropped = (
            find_output(data.folder, output.name) for output in record.outputs[:2]
        )
        output = f"work/thresholds/{documents.stem}.json"
        job = partial(
            summarize_near_thresholds,
            documents=documents,
            dropped=dropped,
            output=data.folder / output,
            language=data.language,
            rules=rules,
        )
        rows = record.result["documents_rows"] + record.result["dropped_rows"]
        tasks.append(
            Task(
                f"thresholds/{documents.stem}",
                [record.digests[:2], depends_on],
                [output],
                job,
                rows,
            )
        )
    records = stage("thresholds", tasks, "document")
    return merge_threshold_reports(
        [data.folder / record.outputs[0].name for record in records],
        LanguageThresholds(data.language, rules),
        stages,
    )

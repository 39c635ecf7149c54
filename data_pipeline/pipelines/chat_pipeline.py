"""Stages from chats to token files, and the manifest.

Reads the `data` and `tokenizer` sections of a run, with data.kind=chat. Writes tokenizer/ with its
chat template, dropped/ and tokens/.

Invariants:
    - The bytes do not depend on the number of workers or on interruptions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.data import ChatConfig
from llmsys.config.tokenizer import FileTokenizerConfig
from llmsys.data_pipeline.chats.encode import STAGE, encode_chats
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.staging import find_output, get_write_path
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.pipelines.copy_tokenizer import build_copy_task
from llmsys.data_pipeline.pipelines.output_stages import (
    build_splits,
    run_index_stage,
    run_token_stage,
)
from llmsys.data_pipeline.pipelines.pair_manifest import build_file_entry
from llmsys.data_pipeline.pipelines.stage_code import (
    CHAT_STAGE,
    DOCUMENT_STAGES,
    compute_code_version,
)
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.data_pipeline.tokenize.shuffle_documents import SPLITS
from llmsys.dataset.manifest import (
    DocumentFiles,
    Histogram,
    Manifest,
    ReadSummary,
    compute_dataset_fingerprint,
)
from llmsys.dataset.token_shards import choose_token_dtype
from llmsys.errors import DataError
from llmsys.log import redact_values
from llmsys.storage.local_files import write_bytes_atomically
from llmsys.vocabulary.chat_template import TEMPLATE_NAME, ChatTemplate, load_chat_template
from llmsys.vocabulary.chat_tokens import count_stored_ids
from llmsys.vocabulary.tokenizer import find_model_file, load_tokenizer

TEMPLATE_STAGE = "chat_template"


def prepare_chats(
    data: ChatConfig, tokenizer: FileTokenizerConfig, runner: StageRunner
) -> Manifest:
    """Write the token files of a dataset of chats.

    Args:
        data: The data section of a run.
        tokenizer: The tokenizer of the model that is tuned.
        runner: Runs the tasks.

    Returns:
        The manifest, not yet published.

    Raises:
        DataError: If an input or the template is missing or cannot be used, or no chat is left.
    """
    files, template = _list_files(data), load_template(data, tokenizer)
    stage = _build_stage(runner)
    copied = stage("tokenizer", [build_copy_task(runner, data.folder, tokenizer)], "file")[0]
    stage(TEMPLATE_STAGE, [_build_template_task(data, template)], "file")
    model = find_output(data.folder, copied.outputs[0].name)
    meaning = [
        copied.result["fingerprint"],
        copied.result["eos_id"],
        template.source,
        dict(template.special_tokens),
    ]
    settings = data.model_dump(
        mode="json", exclude={"name", "folder", "inputs", "heldout_inputs", "executor"}
    )
    tasks = []
    for number, (path, held) in enumerate(files):
        outputs = [f"work/encoded/chats-{number:05d}.arrow", f"dropped/chats-{number:05d}.arrow"]
        job = partial(
            encode_chats,
            file=path,
            is_heldout_file=held,
            outputs=(data.folder / outputs[0], get_write_path(data.folder, outputs[1])),
            model=model,
            eos_token=tokenizer.eos_token,
            template=replace(template),
            data=data,
        )
        depends_on = [str(path), runner.journal.get_input_digest(path), held, meaning, settings]
        tasks.append(Task(f"{STAGE}/{number:05d}", depends_on, outputs, job, path.stat().st_size))
    encoded = stage(STAGE, tasks, "B")
    _require_chats(encoded)
    return _build_manifest(data, tokenizer, copied, encoded, stage, len(files))


def _build_manifest(
    data: ChatConfig,
    tokenizer: FileTokenizerConfig,
    copied: TaskRecord,
    encoded: Sequence[TaskRecord],
    stage: Stage,
    num_files: int,
) -> Manifest:
    """Write the token files from encoded chats, and return the manifest."""
    stored_ids = count_stored_ids(copied.result["vocab_size"])
    tokens = run_token_stage(data, stage, encoded, stored_ids)
    splits = build_splits(run_index_stage(data, stage, tokens))
    config: dict[str, Any] = {
        "data": data.model_dump(mode="json", exclude={"folder", "executor"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    return Manifest(
        name=data.name,
        fingerprint=compute_dataset_fingerprint(
            copied.result["fingerprint"], [record.digests[0] for record in tokens]
        ),
        config=redact_values(config),
        config_digest=compute_json_digest(config),
        vocab_size=copied.result["vocab_size"],
        token_dtype=choose_token_dtype(stored_ids),
        tokenizer_fingerprint=copied.result["fingerprint"],
        splits=splits,
        documents=DocumentFiles(),
        dropped=DocumentFiles(
            files=tuple(
                build_file_entry(record.outputs[1], _count_drops(record)) for record in encoded
            )
        ),
        funnel=_sum_counts(encoded).build_funnel([STAGE]),
        languages={},
        lengths=_sum_lengths(encoded),
        read=ReadSummary(
            files=num_files,
            records=_sum_counts(encoded).stages[STAGE]["documents_in"],
            html_bytes=0,
        ),
        answers={
            split: sum(record.result["answers"][split] for record in encoded) for split in SPLITS
        },
    )


def load_template(data: ChatConfig, tokenizer: FileTokenizerConfig) -> ChatTemplate:
    """Load and check the chat template of a dataset, before any chat is read.

    Args:
        data: The data section of a run.
        tokenizer: The tokenizer section.

    Returns:
        The template.

    Raises:
        DataError: It is missing, or no template.
    """
    file = find_model_file(tokenizer.path)
    template = load_chat_template(
        file.parent, load_tokenizer(file, tokenizer.eos_token), data.template
    )
    template.check()
    return template


def write_template(report: Report, *, output: Path, source: str) -> dict[str, Any]:
    """Write the template where transformers looks for it."""
    write_bytes_atomically(output, source.encode())
    report(1, 0)
    return {}


def _build_template_task(data: ChatConfig, template: ChatTemplate) -> Task:
    output = f"tokenizer/{TEMPLATE_NAME}"
    job = partial(
        write_template, output=get_write_path(data.folder, output), source=template.source
    )
    return Task(f"{TEMPLATE_STAGE}/file", [template.source], [output], job, 1)


def _build_stage(runner: StageRunner) -> Stage:
    def run_stage(name: str, tasks: Any, unit: str) -> Any:
        code = CHAT_STAGE if name in (STAGE, TEMPLATE_STAGE) else DOCUMENT_STAGES[name]
        return runner.run_stage(name, tasks, unit=unit, code=compute_code_version(code))

    return run_stage


def _list_files(data: ChatConfig) -> list[tuple[Path, bool | None]]:
    """List the files, and whether they are held out; None where the share of the config decides."""
    if not data.inputs:
        raise DataError(
            "data.inputs is empty. Name JSON lines of chats, such as data.inputs='[chats.jsonl]'."
        )
    if both := sorted(set(data.inputs) & set(data.heldout_inputs)):
        raise DataError(
            f"data.heldout_inputs: {both[0]} is also in data.inputs. Name it in one of them."
        )
    for path in (*data.inputs, *data.heldout_inputs):
        if not path.is_file():
            raise DataError(
                f"{path} does not exist. Correct data.inputs (relative paths start in the working "
                "directory)."
            )
    files: list[tuple[Path, bool | None]] = [(path, True) for path in data.heldout_inputs]
    files += [(path, False if data.heldout_inputs else None) for path in data.inputs]
    return sorted(files, key=lambda file: str(file[0]))


def _require_chats(encoded: Sequence[TaskRecord]) -> None:
    tally = _sum_counts(encoded)
    if any(amounts["documents_out"] for amounts in tally.stages.values()):
        return
    drops = sorted(tally.drops.values(), key=lambda drop: -drop["documents"])
    reasons = "; ".join(f"{drop['documents']} by {drop['test']} ({drop['examples'][0]['reason']}, "
                        f"{drop['examples'][0]['url']})" for drop in drops)  # fmt: skip
    raise DataError(
        f"no chat is left: {reasons or 'the files have no lines'}. Correct the files or "
        "data.template."
    )


def _sum_counts(encoded: Sequence[TaskRecord]) -> FunnelCounts:
    tally = FunnelCounts()
    for record in encoded:
        tally.merge_counts(FunnelCounts(record.result["tally"]))
    return tally


def _count_drops(record: TaskRecord) -> int:
    return sum(drop["documents"] for drop in record.result["tally"]["drops"])


def _sum_lengths(encoded: Sequence[TaskRecord]) -> Histogram:
    counts: Any = np.sum([record.result["lengths"] for record in encoded], axis=0, dtype=np.int64)
    return Histogram(edges=LENGTH_EDGES, counts=tuple(counts.tolist()))

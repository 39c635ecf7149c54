"""Stages from token ids that another program made to token files, and the manifest.

Reads the `data` and `tokenizer` sections of a run, with data.kind=tokens. Writes tokenizer/ and
tokens/.

Invariants:
    - The bytes do not depend on the number of workers or on interruptions.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmsys.config.data import TokensConfig
from llmsys.config.tokenizer import FileTokenizerConfig
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.staging import find_output
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.pipelines.copy_tokenizer import build_copy_task
from llmsys.data_pipeline.pipelines.output_stages import (
    build_splits,
    run_index_stage,
    run_token_stage,
)
from llmsys.data_pipeline.pipelines.stage_code import (
    DOCUMENT_STAGES,
    TOKENS_STAGE,
    compute_code_version,
)
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.data_pipeline.tokenize.megatron_files import TokenPart, list_parts, read_token_part
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

STAGE = "ids"


def prepare_tokens(
    data: TokensConfig, tokenizer: FileTokenizerConfig, runner: StageRunner
) -> Manifest:
    """Write the token files of a dataset of token ids.

    Args:
        data: The data section of a run.
        tokenizer: The tokenizer that made the ids.
        runner: Runs the tasks.

    Returns:
        The manifest, not yet published.

    Raises:
        DataError: If an input is missing or damaged, or an id is not of the tokenizer.
    """
    parts = _list_parts(data)
    stage = _build_stage(runner)
    copied = stage("tokenizer", [build_copy_task(runner, data.folder, tokenizer)], "file")[0]
    model = find_output(data.folder, copied.outputs[0].name)
    meaning = f"{copied.result['fingerprint']} {copied.result['eos_id']}"  # decides the token rows
    settings = data.model_dump(mode="json", include={"split": True, "tokens": {"seed"}})
    tasks = []
    for number, part in enumerate(parts):
        output = f"work/encoded/part-{number:05d}.arrow"
        job = partial(
            read_token_part, part=part, output=data.folder / output, model=model, data=data
        )
        digests = [
            runner.journal.get_input_digest(path)
            for path in (part.path, part.path.with_suffix(".bin"))
        ]
        # ids of documents are hashes of their file's path
        depends_on = [
            str(part.path),
            digests,
            part.first,
            part.last,
            part.is_heldout,
            meaning,
            settings,
        ]
        tasks.append(Task(f"{STAGE}/part-{number:05d}", depends_on, [output], job, part.tokens))
    read = stage(STAGE, tasks, "tok")
    tokens = run_token_stage(data, stage, read, copied.result["vocab_size"])
    splits = build_splits(run_index_stage(data, stage, tokens))
    fingerprint = compute_dataset_fingerprint(
        copied.result["fingerprint"], [record.digests[0] for record in tokens]
    )
    config: dict[str, Any] = {
        "data": data.model_dump(mode="json", exclude={"folder", "executor"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    return Manifest(
        name=data.name,
        fingerprint=fingerprint,
        config=redact_values(config),
        config_digest=compute_json_digest(config),
        vocab_size=copied.result["vocab_size"],
        token_dtype=choose_token_dtype(copied.result["vocab_size"]),
        tokenizer_fingerprint=copied.result["fingerprint"],
        splits=splits,
        documents=DocumentFiles(),
        dropped=DocumentFiles(),
        languages={},
        lengths=Histogram(edges=LENGTH_EDGES, counts=(0,) * (len(LENGTH_EDGES) - 1)),
        **_sum_counts(
            read, sum(split.bytes for split in splits.values()), len({part.path for part in parts})
        ),
    )


def _sum_counts(read: Sequence[TaskRecord], text_bytes: int, files: int) -> dict[str, Any]:
    """Return the funnel and the summary of reading."""
    tally = FunnelCounts()
    for record in read:
        found, empty = record.result["documents"], record.result["empty"]
        tally.add_amounts(STAGE, documents_in=found + empty, documents_out=found)
        if empty:
            tally.add_drop_count(STAGE, "no tokens", empty)
    tally.add_amounts(STAGE, bytes_in=text_bytes, bytes_out=text_bytes)
    records = tally.stages[STAGE]["documents_in"]
    return {
        "funnel": tally.build_funnel([STAGE]),
        "read": ReadSummary(files=files, records=records, html_bytes=0),
    }


def _build_stage(runner: StageRunner) -> Stage:
    def run_stage(name: str, tasks: Any, unit: str) -> Any:
        code = TOKENS_STAGE if name == STAGE else DOCUMENT_STAGES[name]
        return runner.run_stage(name, tasks, unit=unit, code=compute_code_version(code))

    return run_stage


def _list_parts(data: TokensConfig) -> list[TokenPart]:
    if not data.inputs:
        raise DataError(
            "data.inputs is empty. Name index files of Megatron-LM, such as "
            "data.inputs='[tokens_text_document.idx]'."
        )
    files: list[tuple[Path, bool | None]] = [(path, True) for path in data.heldout_inputs]
    if both := sorted(set(data.inputs) & set(data.heldout_inputs)):
        raise DataError(
            f"data.heldout_inputs: {both[0]} is also in data.inputs. Name it in one of them."
        )
    files += [(path, False if data.heldout_inputs else None) for path in data.inputs]
    return [
        part
        for path, held in sorted(files, key=lambda file: str(file[0]))
        for part in list_parts(path, held)
    ]

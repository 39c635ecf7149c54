"""The one stage from labelled images to pairs of token sequences, and the manifest.

Reads the `data` section of a run. Writes tokens/ (bytes of images, and labels) and dropped/ (images
that cannot be read, with their reasons).

Invariants:
    - The bytes do not depend on the number of workers or on interruptions.
"""

import importlib.metadata
from functools import partial
from typing import Any

from llmsys.config.images import ImagesConfig
from llmsys.config.patches import BYTE_VALUES
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.core.staging import get_write_path
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.images.encode import STAGE, encode_images
from llmsys.data_pipeline.images.read import ImagePart, list_parts
from llmsys.data_pipeline.pipelines.pair_manifest import build_file_entry, iter_pair_splits
from llmsys.data_pipeline.pipelines.stage_code import IMAGE_STAGE, compute_code_version
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
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

Parts = dict[str, list[ImagePart]]


def prepare_images(data: ImagesConfig, runner: StageRunner) -> Manifest:
    """Write the token files of a dataset of images.

    Args:
        data: The data section of a run.
        runner: Runs the tasks.

    Returns:
        The manifest, not yet published.

    Raises:
        DataError: If an input is missing or has another form than documented, or a split has no
            readable image.
    """
    parts = _list_parts(data)
    labels = _resolve_labels(data, parts)
    records = _run_encode_stage(data, parts, labels, runner)
    for split, found in records.items():
        if not sum(record.result["sources"]["rows"] for record in found):
            raise DataError(
                f"no image of data.{_get_key(split)} can be read; dropped/ has the reasons. Give "
                "others."
            )
    return _build_manifest(data, parts, labels, records)


def _get_key(split: str) -> str:
    return "inputs" if split == "train" else "heldout_inputs"


def _list_parts(data: ImagesConfig) -> Parts:
    parts = {}
    for split, inputs in (("train", data.inputs), ("heldout", data.heldout_inputs)):
        if not inputs:
            key = _get_key(split)
            raise DataError(
                f"data.{key} is empty. Name folders or files, such as "
                f"'data.{key}=[photos/{split}]'."
            )
        parts[split] = [part for path in inputs for part in list_parts(path, data.shard_images)]
    return parts


def _resolve_labels(data: ImagesConfig, parts: Parts) -> tuple[str, ...]:
    """Return the labels in the order of their numbers: numbers by value, before names."""
    found = {
        split: {label for part in entries for label in part.row_labels}
        for split, entries in parts.items()
    }
    by_value = sorted(
        found["train"],
        key=lambda label: (not label.isdecimal(), int(label) if label.isdecimal() else 0, label),
    )
    labels = data.labels or tuple(by_value)
    for split, names in found.items():
        if strange := sorted(names - set(labels)):
            raise DataError(
                f"data.{_get_key(split)} has the label {strange[0]!r}, but the labels are "
                f"{', '.join(labels)}. Correct the input, or list every label in data.labels."
            )
    return labels


def _run_encode_stage(
    data: ImagesConfig, parts: Parts, labels: tuple[str, ...], runner: StageRunner
) -> dict[str, list[TaskRecord]]:
    tasks = []
    for split, entries in parts.items():
        for number, part in enumerate(entries):
            name = f"{split}-{number:05d}"
            outputs = [
                f"tokens/{name}.arrow",
                f"tokens/{split}_source-{number:05d}.arrow",
                f"dropped/{name}.arrow",
            ]
            written = tuple(get_write_path(data.folder, output) for output in outputs)
            job = partial(encode_images, part=part, data=data, labels=labels, outputs=written)
            digests = [[str(path), runner.journal.get_input_digest(path)] for path in part.paths]
            reader = importlib.metadata.version("pillow") if part.files and _has_pillow() else None
            size = [data.image_size, data.num_channels, part.start, part.row_labels, labels]
            tasks.append(
                Task(f"images/{name}", [digests, size, reader], outputs, job, len(part.row_labels))
            )
    done = iter(
        runner.run_stage(STAGE, tasks, unit="image", code=compute_code_version(IMAGE_STAGE))
    )
    return {split: [next(done) for _ in entries] for split, entries in parts.items()}


def _has_pillow() -> bool:
    return bool(list(importlib.metadata.distributions(name="pillow")))


def _build_manifest(
    data: ImagesConfig, parts: Parts, labels: tuple[str, ...], records: dict[str, list[TaskRecord]]
) -> Manifest:
    config: dict[str, Any] = {"data": data.model_dump(mode="json", exclude={"folder", "executor"})}
    splits = dict(iter_pair_splits(records))
    tally = FunnelCounts()
    every = [record for found in records.values() for record in found]
    for record in every:
        tally.merge_counts(FunnelCounts(record.result["tally"]))
    files = {path for entries in parts.values() for part in entries for path in part.paths}
    dropped = [
        (record.outputs[2], sum(one["documents"] for one in record.result["tally"]["drops"]))
        for record in every
    ]
    return Manifest(
        name=data.name,
        fingerprint=compute_dataset_fingerprint(
            None, [file.digest for split in splits.values() for file in split.files]
        ),
        config=redact_values(config),
        config_digest=compute_json_digest(config),
        vocab_size=BYTE_VALUES,
        token_dtype=choose_token_dtype(BYTE_VALUES),
        tokenizer_fingerprint=None,
        splits=splits,
        documents=DocumentFiles(),
        dropped=DocumentFiles(files=tuple(build_file_entry(made, rows) for made, rows in dropped)),
        funnel=tally.build_funnel([STAGE]),
        languages={},
        lengths=Histogram(edges=LENGTH_EDGES, counts=(0,) * (len(LENGTH_EDGES) - 1)),
        read=ReadSummary(
            files=len(files), records=tally.stages[STAGE]["documents_in"], html_bytes=0
        ),
        labels=labels,
    )

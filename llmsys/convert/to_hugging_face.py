"""Export a run as a Hugging Face folder that transformers loads: config.json, shards, index, tokenizer.

Reads a run folder or one of its checkpoints. A run folder that was imported, and whose model section has not changed,
is exported with the same small files, names and shards. Any other gets a config.json of its family.

`hugging_face/record.json` has the names and shards of the folder that a run folder was made from. A run folder may come
from a stranger, so the record is checked before anything is written.

Invariants:
- Memory stays near the largest tensor: shards are written in place, tensor by tensor.
- `read_conversion_record` returns only names of safetensors files, and no tensor name twice.
- `list_small_files` returns only regular files of `hugging_face/` itself, never links.
"""

import json
import shutil
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.config.hugging_face.read_config_json import parse_json
from llmsys.config.hugging_face.write_config_json import build_config_json
from llmsys.config.load import load_run_config
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.convert.checkpoint_stream import AverageReader, CheckpointReader
from llmsys.convert.conversion_plan import ConversionPlan, Shape, TensorGroup, build_conversion_plan
from llmsys.convert.family_mappings import get_family_mapping
from llmsys.convert.folders import KEPT, RECORD, RUN_CONFIG, UNUSED, find_checkpoint, publish_folder
from llmsys.convert.image_files import write_image_files
from llmsys.convert.safetensors_folder import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    SafetensorsShardWriter,
    is_shard_name,
    parse_weight_map,
)
from llmsys.convert.tokenizer_files import read_special_token_ids, write_tokenizer
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.progress import Progress
from llmsys.train.checkpoint_average import list_checkpoints_to_average
from llmsys.train.run_data import get_tokenizer_path

NEXT = "Do not trust this run folder, or remove its hugging_face/ folder to convert the weights alone."


def read_conversion_record(run_folder: Path) -> dict[str, Any] | None:
    """Return the record of the Hugging Face folder that this run folder was made from; None without one.

    Raises:
        CheckpointError: The record is damaged, or names a file outside of its folder.
    """
    kept = run_folder / KEPT
    if kept.is_symlink():
        raise CheckpointError(f"{kept} is a link, and its target would be copied. {NEXT}")
    file = kept / RECORD
    if not file.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _check_record(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{file} cannot be used ({said}). {NEXT}") from None
    return record


def _check_record(record: dict[str, Any]) -> None:
    for key in ("names", "copies", "files"):
        for name, value in record[key].items():
            if not isinstance(value, str):
                raise TypeError(f"{key} of {name} is {value!r}, not a name")
    written = [*record["names"].values(), *record["copies"]]
    if len(set(written)) < len(written):
        raise ValueError("two tensors have the same name")
    for name, file in record["files"].items():
        if not is_shard_name(file):
            raise ValueError(f"{name} would be written to {file!r}, which is not a safetensors file of the destination")
    if record["index"] is not None and not set(parse_weight_map(record["index"]).values()) <= {
        *record["files"].values()
    }:
        raise ValueError("its index names files that it does not have")
    record["model"]


def list_small_files(run_folder: Path) -> list[Path]:
    """Return the configs, vocabularies and licences that are exported unchanged.

    Raises:
        CheckpointError: One of them is a link or no file, or would replace the weights.
    """
    found = [file for file in sorted((run_folder / KEPT).iterdir()) if file.name not in (RECORD, UNUSED)]
    for file in found:
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is not a regular file, and its target would be copied. {NEXT}")
        if file.name == INDEX or is_shard_name(file.name):
            raise CheckpointError(f"{file} would replace the weights that are written. {NEXT}")
    return found


# Largest file, as transformers has it; a single larger tensor gets a file of its own.
SHARD_BYTES = 5_000_000_000

log = get_logger(__name__)


class HuggingFaceExport:
    """A run that has been checked for export: the files to write, and the tensors and names in each."""

    def __init__(self, source: Path, shard_bytes: int | None) -> None:
        """Read the run's config and the checkpoint's index, and compare them.

        Raises ConfigError or CheckpointError naming every difference.
        """
        run_folder, checkpoint = find_checkpoint(source)
        self.run_folder = run_folder
        self.reader: CheckpointReader
        self.run: RunConfig = load_run_config(str(run_folder / RUN_CONFIG))
        if (last := self.run.checkpoint.average_last) > 1 and run_folder == source:
            # The model that the run evaluates and generates with, and nothing is written into the run.
            averaged = list_checkpoints_to_average(run_folder, last)
            checkpoint, self.reader = averaged[-1], AverageReader(averaged)
        else:
            self.reader = CheckpointReader(checkpoint)
        record = read_conversion_record(run_folder)
        same = record is not None and record["model"] == self.run.model.model_dump(mode="json")
        self.record: dict[str, Any] | None = record if same else None
        self.values = self._load_config_values()
        self.plan: ConversionPlan = build_conversion_plan(
            self.run.model, get_family_mapping(str(self.values["model_type"]), self.run.model)
        )
        _check_checkpoint(checkpoint, self.plan, self.reader)
        self.copies: dict[str, str] = self.record["copies"] if self.record else {}
        self.unused = self._open_unused()
        try:
            self.tensors = self._list_tensors()
            self.files = self._assign_files(shard_bytes)
        except KeyError as error:  # nothing but the record is looked up there by names that it may lack
            raise CheckpointError(f"{run_folder / KEPT / RECORD} does not name {error}. {NEXT}") from None
        self.small_files = list_small_files(run_folder) if self.record else []
        self.index: str | None = self.record.get("index") if self.record and shard_bytes is None else None

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.run.model

    def get_written_name(self, theirs: str) -> str:
        """Return the name to write. An imported folder may spell it in an old way."""
        return str(self.record["names"][theirs]) if self.record else theirs

    def read_group(self, group: TensorGroup) -> list[Tensor]:
        """Return their tensors of one group."""
        return group.form.to_hugging_face([self.reader.read(part) for part in group.ours], self.model)

    def _load_config_values(self) -> dict[str, Any]:
        if self.record is not None:
            file = self.run_folder / KEPT / "config.json"
            values: dict[str, Any] = parse_json(file.read_text("utf-8-sig"), str(file))
            return values
        return build_config_json(self.model)

    def _open_unused(self) -> SafetensorsFolder | None:
        kept = self.run_folder / KEPT
        return SafetensorsFolder(kept, UNUSED) if self.record and (kept / UNUSED).is_file() else None

    def _list_tensors(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return name → (dtype, shape) of every tensor to write, in reading order."""
        tensors = {
            self.get_written_name(theirs): (self.reader.dtypes[group.ours[0].name], shape)
            for group in self.plan.groups
            for theirs, shape in zip(group.theirs, group.their_shapes, strict=True)
        }
        tensors |= {copy: tensors[self.get_written_name(original)] for copy, original in self.copies.items()}
        if self.unused is not None:
            tensors |= {name: (stored.dtype, stored.shape) for name, stored in self.unused.tensors.items()}
        return tensors

    def _assign_files(self, shard_bytes: int | None) -> dict[str, str]:
        """Return tensor → file: as imported, or filled one after another."""
        if self.record is not None and shard_bytes is None:
            return {name: self.record["files"][name] for name in self.tensors}
        limit = shard_bytes or SHARD_BYTES
        shards: list[list[str]] = [[]]
        room = limit
        for name, (dtype, shape) in self.tensors.items():
            size = prod(shape) * dtype.itemsize
            if size > room and shards[-1]:
                shards.append([])
                room = limit
            shards[-1].append(name)
            room -= size
        if len(shards) == 1:
            return dict.fromkeys(self.tensors, SINGLE)
        return {
            name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number, names in enumerate(shards, 1)
            for name in names
        }


def convert_to_hugging_face(source: Path, destination: Path, shard_bytes: int | None = None) -> Path:
    """Convert a run to a Hugging Face folder.

    Args:
        source: Run folder or checkpoint.
        destination: Folder to create; must not exist.
        shard_bytes: Size limit of a file, in bytes. None: the imported files' sizes, or 5 GB.

    Returns:
        `destination`.

    Raises:
        ConfigError: The model is of no known family, or the destination exists. Nothing was written.
        CheckpointError: The checkpoint is damaged or of another model. Nothing was written.
    """
    writing = HuggingFaceExport(source, shard_bytes)
    with publish_folder(destination) as folder:
        _write_tensors(folder, writing)
        _write_index(folder, writing)
        _write_small_files(folder, writing)
    return destination


def _write_tensors(folder: Path, writing: HuggingFaceExport) -> None:
    total = sum(prod(shape) * dtype.itemsize for dtype, shape in writing.tensors.values())
    with ExitStack() as stack, Progress("convert", total=total, unit="B") as progress:
        writers = {}
        for file in sorted(set(writing.files.values())):
            inside = {name: one for name, one in writing.tensors.items() if writing.files[name] == file}
            writers[file] = stack.enter_context(SafetensorsShardWriter(folder / file, inside))

        def write_tensor(name: str, tensor: Tensor) -> None:
            writers[writing.files[name]].write(name, tensor)
            progress.advance(tensor.nbytes)

        for group in writing.plan.groups:
            for theirs, tensor in zip(group.theirs, writing.read_group(group), strict=True):
                write_tensor(writing.get_written_name(theirs), tensor)
                for copy in [one for one, original in writing.copies.items() if original == theirs]:
                    write_tensor(copy, tensor)
        if (unused := writing.unused) is not None:
            for name in unused.tensors:
                write_tensor(name, unused.read(name))


def _write_index(folder: Path, writing: HuggingFaceExport) -> None:
    if writing.index is not None:
        (folder / INDEX).write_bytes(writing.index.encode())
        return
    if set(writing.files.values()) == {SINGLE}:
        return
    total = sum(prod(shape) * dtype.itemsize for dtype, shape in writing.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(writing.files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_small_files(folder: Path, writing: HuggingFaceExport) -> None:
    if writing.record is not None:
        for file in writing.small_files:
            shutil.copyfile(file, folder / file.name, follow_symlinks=False)
        return
    if writing.model.patches is not None:
        write_image_files(folder, writing.model.patches, writing.values)
        return
    model_file = get_tokenizer_path(writing.run)
    found, eos_token = model_file.is_file(), getattr(writing.run.tokenizer, "eos_token", None)
    # Without a word about them, transformers takes ids of the family's own vocabulary.
    ids = read_special_token_ids(model_file if found else None, eos_token)
    values = writing.values | {key: token for key, token in ids.items() if writing.values.get(key) is None}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if found:
        write_tokenizer(folder, model_file, writing.model.max_position_embeddings, eos_token)
    else:
        log.warning("there is no tokenizer at %s: the folder is written without one", model_file)


def _check_checkpoint(checkpoint: Path, plan: ConversionPlan, reader: CheckpointReader) -> None:
    """Raise CheckpointError when a checkpoint is not of the run's model, naming the first tensor."""
    for group in plan.groups:
        for part in group.ours:
            found = reader.shapes.get(part.name)
            if found != part.shape:
                held = "is missing" if found is None else f"has shape {found}"
                raise CheckpointError(
                    f"{checkpoint}: {part.name} {held}, the model of {RUN_CONFIG} needs {part.shape}. Use the "
                    f"{RUN_CONFIG} of its run."
                )

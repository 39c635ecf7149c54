"""Export a run as a Hugging Face folder that transformers loads: config.json, shards, index,
tokenizer.

Reads a run folder or one of its checkpoints. A run folder that was imported or continues one that
was, and whose model section has not changed, is exported with the same small files, names, shards
and dtype. Any other gets a config.json of its family. A model that was trained gets a llmsys.json
with the run, step and parent that it comes from.

Invariants:
- Memory stays near the largest tensor: shards are written in place, tensor by tensor.
"""

import json
import shutil
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.config.export.exported_model import ExportChoice, choose_export
from llmsys.config.loading.load import load_run_config
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.config.train import GenerationConfig
from llmsys.convert.checkpoint_stream import AverageReader, CheckpointReader
from llmsys.convert.conversion_plan import ConversionPlan, Shape, TensorGroup, build_conversion_plan
from llmsys.convert.conversion_record import (
    NEXT,
    describe_origin,
    list_small_files,
    read_conversion_record,
)
from llmsys.convert.exported_weights import change_weight
from llmsys.convert.family_mappings import get_family_mapping
from llmsys.convert.folders import KEPT, RECORD, RUN_CONFIG, UNUSED, find_checkpoint, publish_folder
from llmsys.convert.image_files import write_image_files
from llmsys.convert.safetensors_folder import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    SafetensorsShardWriter,
)
from llmsys.convert.tokenizer_files import read_special_token_ids, write_tokenizer
from llmsys.convert.weight_dtype import DTYPES, cast_weight, choose_dtype
from llmsys.errors import CheckpointError, ConfigError, format_choices
from llmsys.hugging_face.read_config_json import parse_json
from llmsys.log import get_logger
from llmsys.progress import Progress
from llmsys.train.chat_data import get_template_folder
from llmsys.train.checkpoint_average import list_checkpoints_to_average
from llmsys.train.run_data import get_tokenizer_path
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from llmsys.vocabulary.special_tokens import CONFIG_NAME, read_json_object

# Largest file, as transformers has it; a single larger tensor gets a separate file.
SHARD_BYTES = 5_000_000_000

GENERATION, ORIGIN = "generation_config.json", "llmsys.json"
SOURCE_DTYPE = "source"

log = get_logger(__name__)


class HuggingFaceExport:
    """A run that has been checked for export: the files to write, and the tensors and names in
    each.
    """

    def __init__(self, source: Path, shard_bytes: int | None, dtype: str | None = None) -> None:
        """Read the run's config and the checkpoint's index, and compare them. No tensor is read
        yet.

        Args:
            source: Folder of a run, of which the newest complete checkpoint is taken, or of a
                checkpoint. A run with `checkpoint.average_last` is exported as the average with
                which it evaluates.
            shard_bytes: Bytes of tensors in a file, at most; a larger tensor gets its own file.
                None: the files of the imported folder, else 5 GB.
            dtype: Name of the dtype of all tensors. "source": that of each tensor in the imported
                folder. Default: None, the same where there is one, else that of the checkpoint.

        Raises:
            ConfigError: The model has no config.json, or "source" has no imported folder.
            CheckpointError: Config and checkpoint differ; every difference is named.
        """
        run_folder, checkpoint = find_checkpoint(source)
        self.run_folder = run_folder
        self.reader: CheckpointReader
        self.run: RunConfig = load_run_config(str(run_folder / RUN_CONFIG))
        if (last := self.run.checkpoint.average_last) > 1 and run_folder == source:
            # The model that the run evaluates and generates with, and nothing is written into the
            # run.
            averaged = list_checkpoints_to_average(run_folder, last)
            checkpoint, self.reader = averaged[-1], AverageReader(averaged)
        else:
            self.reader = CheckpointReader(checkpoint)
        record = read_conversion_record(run_folder)
        same = record is not None and record["model"] == self.run.model.model_dump(mode="json")
        self.record: dict[str, Any] | None = record if same else None
        self.choice: ExportChoice = choose_export(self.run.model, self._load_kept_values())
        if left_out := ", ".join(f"{one.key}={one.value}" for one in self.choice.left_out):
            log.info(
                "config.json of %s has no field for %s; only training uses it",
                self.choice.model_type,
                left_out,
            )
        self.values = self.choice.values
        self.origin = describe_origin(self.run.run.name, checkpoint)
        self.source_dtype = self._find_source_dtype()
        # None: each tensor as in the imported folder, or else as in the checkpoint
        self.dtype_name = None if dtype == SOURCE_DTYPE else dtype
        self.dtype = None if self.dtype_name is None else DTYPES[self.dtype_name]
        self.source_dtypes = self._find_source_dtypes()
        if dtype == SOURCE_DTYPE and not self.source_dtypes:
            raise ConfigError(
                f"--dtype source: {self.run_folder} neither was imported nor continues a Hugging "
                f"Face folder. Name one: --dtype {format_choices(list(DTYPES))}."
            )
        self.plan: ConversionPlan = build_conversion_plan(
            self.model, get_family_mapping(str(self.values["model_type"]), self.model)
        )
        _check_checkpoint(checkpoint, self.plan, self.reader)
        self.copies: dict[str, str] = self.record["copies"] if self.record else {}
        self.unused = self._open_unused()
        try:
            self.tensors = self._list_tensors()
            self.files = self._assign_files(shard_bytes)
        # nothing but the record is looked up there by names that it may lack
        except KeyError as error:
            raise CheckpointError(
                f"{run_folder / KEPT / RECORD} does not name {error}. {NEXT}"
            ) from None
        self.small_files = list_small_files(run_folder) if self.record else []
        self.index: str | None = (
            self.record.get("index") if self.record and shard_bytes is None else None
        )
        if self.index is not None and not self._has_indexed_size(self.index):
            self.index = None

    @property
    def model(self) -> ModelConfig:
        """The architecture that is written. What differs from the run's is in the weights."""
        return self.choice.model

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors to write."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())

    def get_written_name(self, theirs: str) -> str:
        """Return the name to write. An imported folder may spell it in an old way."""
        return str(self.record["names"][theirs]) if self.record else theirs

    def read_group(self, group: TensorGroup) -> list[Tensor]:
        """Return their tensors of one group."""
        ours = [
            change_weight(self.run.model, self.model, part.name, self.reader.read(part))
            for part in group.ours
        ]
        dtype = self._get_dtype(group)
        named = zip(group.ours, ours, strict=True)
        ours = [cast_weight(part.name, tensor, dtype) for part, tensor in named]
        return group.form.to_hugging_face(ours, self.model)

    def list_written_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each of our tensors is written, by its name."""
        return {
            part.name: self._get_dtype(group) for group in self.plan.groups for part in group.ours
        }

    def _load_kept_values(self) -> dict[str, Any] | None:
        if self.record is None:
            return None
        file = self.run_folder / KEPT / "config.json"
        return parse_json(file.read_text("utf-8-sig"), str(file))

    def _find_source_dtype(self) -> str | None:
        """Return the dtype that config.json of the imported folder names, if there is one."""
        if self.record is None:
            return None
        named = self.values.get("dtype") or self.values.get("torch_dtype")
        name = str(named).removeprefix("torch.")
        return name if name in DTYPES else None

    def _find_source_dtypes(self) -> dict[str, torch.dtype]:
        """Return name → dtype of the tensors of the imported folder: some folders mix dtypes, and
        some name none in config.json. Empty where nothing was imported.
        """
        if self.record is None:
            return {}
        stored: dict[str, str] = self.record.get("dtypes") or {}
        if not stored and self.source_dtype is not None:  # an import of 0.2's first weeks
            stored = dict.fromkeys(self.record["files"], self.source_dtype)
        return {name: getattr(torch, dtype) for name, dtype in stored.items()}

    def _has_indexed_size(self, index: str) -> bool:
        """Return whether the tensors have as many bytes as an imported index says."""
        found = json.loads(index).get("metadata", {}).get("total_size", self.total_bytes)
        return bool(found == self.total_bytes)

    def _get_dtype(self, group: TensorGroup) -> torch.dtype:
        name = group.ours[0].name
        if self.dtype is not None:
            return choose_dtype(name, self.dtype)
        stored = self.source_dtypes.get(self.get_written_name(group.theirs[0]))
        return self.reader.dtypes[name] if stored is None else stored

    def _open_unused(self) -> SafetensorsFolder | None:
        kept = self.run_folder / KEPT
        return (
            SafetensorsFolder(kept, UNUSED) if self.record and (kept / UNUSED).is_file() else None
        )

    def _list_tensors(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return name → (dtype, shape) of every tensor to write, in reading order."""
        tensors = {
            self.get_written_name(theirs): (self._get_dtype(group), shape)
            for group in self.plan.groups
            for theirs, shape in zip(group.theirs, group.their_shapes, strict=True)
        }
        tensors |= {
            copy: tensors[self.get_written_name(original)] for copy, original in self.copies.items()
        }
        if self.unused is not None:
            tensors |= {
                name: (stored.dtype, stored.shape) for name, stored in self.unused.tensors.items()
            }
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


def convert_to_hugging_face(
    source: Path, destination: Path, shard_bytes: int | None = None, dtype: str | None = None
) -> Path:
    """Convert a run to a Hugging Face folder.

    Args:
        source: Run folder or checkpoint.
        destination: Folder to create; must not exist.
        shard_bytes: Size limit of a file, in bytes. None: the imported files' sizes, or 5 GB.
        dtype: Dtype of the weights: one of `DTYPES`, or `source` for those of the imported folder.
            None: as `source`, or those of the checkpoint where nothing was imported.

    Returns:
        `destination`.

    Raises:
        ConfigError: The model is of no known family, or the destination exists. Nothing was
            written.
        CheckpointError: The checkpoint is damaged or of another model. Nothing was written.
    """
    writing = HuggingFaceExport(source, shard_bytes, dtype)
    with publish_folder(destination) as folder:
        _write_tensors(folder, writing)
        _write_index(folder, writing)
        _write_small_files(folder, writing)
        if writing.origin:
            _write_json(folder / ORIGIN, writing.origin)
    return destination


def _write_tensors(folder: Path, writing: HuggingFaceExport) -> None:
    total = writing.total_bytes
    with ExitStack() as stack, Progress("convert", total=total, unit="B") as progress:
        writers = {}
        for file in sorted(set(writing.files.values())):
            inside = {
                name: one for name, one in writing.tensors.items() if writing.files[name] == file
            }
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
    metadata = {"total_size": writing.total_bytes}
    index = {"metadata": metadata, "weight_map": dict(sorted(writing.files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_small_files(folder: Path, writing: HuggingFaceExport) -> None:
    stated = {} if writing.dtype_name is None else {"torch_dtype": writing.dtype_name}
    if writing.record is not None:
        for file in writing.small_files:
            shutil.copyfile(file, folder / file.name, follow_symlinks=False)
        _write_trained_template(folder, writing)
        if stated and writing.dtype_name != writing.source_dtype:
            values = {key: value for key, value in writing.values.items() if key != "dtype"}
            _write_json(folder / "config.json", values | stated)
        return
    if writing.model.patches is not None:
        write_image_files(folder, writing.model.patches, writing.values | stated)
        return
    model_file = get_tokenizer_path(writing.run)
    own = writing.run.tokenizer.kind == "python"
    found, eos_token = (
        model_file.is_file() and not own,
        getattr(writing.run.tokenizer, "eos_token", None),
    )
    # Without a word about them, transformers takes ids of the family's own vocabulary.
    ids = read_special_token_ids(model_file if found else None, eos_token)
    values = (
        writing.values
        | {key: token for key, token in ids.items() if writing.values.get(key) is None}
        | stated
    )
    _write_json(folder / "config.json", values)
    if writing.model.head.kind == "lm":
        _write_json(folder / GENERATION, build_generation_config(writing.run.generation, values))
    if found:
        template = get_template_folder(writing.run) / TEMPLATE_NAME
        write_tokenizer(
            folder, model_file, writing.model.max_position_embeddings, eos_token, template
        )
    else:
        reason = (
            f"{writing.run.tokenizer.kind} has no form that transformers reads"
            if own
            else f"no file {model_file}"
        )
        log.warning("the folder is written without a tokenizer: %s", reason)


def _write_trained_template(folder: Path, writing: HuggingFaceExport) -> None:
    """Write the chat template of the run where it trained with another one than the original."""
    template = get_template_folder(writing.run) / TEMPLATE_NAME
    if not writing.origin or not template.is_file():
        return
    config = folder / CONFIG_NAME
    values = read_json_object(config)
    ours = template.read_text(encoding="utf-8")
    theirs = values.get("chat_template")
    if (folder / TEMPLATE_NAME).is_file():
        theirs = (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
    if ours == theirs:
        return
    (folder / TEMPLATE_NAME).write_text(ours, encoding="utf-8")
    if values.pop("chat_template", None) is not None:
        _write_json(config, values)


def build_generation_config(settings: GenerationConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: how the run samples, and the special ids of config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {name: values[name] for name in names if values.get(name) is not None}
    does_sample = settings.temperature > 0 and settings.num_beams == 1
    found: dict[str, Any] = ids | {
        "do_sample": does_sample,
        "max_new_tokens": settings.max_new_tokens,
    }
    if does_sample:
        found |= {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
        }
        found |= {"min_p": settings.min_p} if settings.min_p else {}
    if settings.num_beams > 1:
        found["num_beams"] = settings.num_beams
    if settings.repetition_penalty != 1:
        found["repetition_penalty"] = settings.repetition_penalty
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check_checkpoint(checkpoint: Path, plan: ConversionPlan, reader: CheckpointReader) -> None:
    """Raise CheckpointError when a checkpoint is not of the run's model, naming the first
    tensor.
    """
    for group in plan.groups:
        for part in group.ours:
            found = reader.shapes.get(part.name)
            if found != part.shape:
                held = "is missing" if found is None else f"has shape {found}"
                raise CheckpointError(
                    f"{checkpoint}: {part.name} {held}, the model of {RUN_CONFIG} needs "
                    f"{part.shape}. Use the {RUN_CONFIG} of its run."
                )

"""Import a Hugging Face folder as a run folder, for generation, evaluation, and as a start of
training.

Reads config.json, the safetensors files and the small files next to them. Writes config.yaml, a
weights-only checkpoint of step 0, the tokenizer, and `hugging_face/` with the originals.

Invariants:
- Every name and shape is checked before anything is written.
- Memory stays near the largest file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.config.head import MultiTokenPredictionConfig
from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.loading.load import build_model_config
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.convert.checkpoint_stream import FILE_BYTES, TensorToWrite, write_tensors
from llmsys.convert.conversion_plan import (
    ConversionPlan,
    TensorGroup,
    TensorMatch,
    TensorPart,
    build_conversion_plan,
    match_tensors,
)
from llmsys.convert.family_mappings import get_family_mapping
from llmsys.convert.folders import CHECKPOINTS, KEPT, RECORD, RUN_CONFIG, UNUSED, publish_folder
from llmsys.convert.image_files import read_image_settings
from llmsys.convert.quantized_folder import QuantizedFolder
from llmsys.convert.safetensors_folder import INDEX, SafetensorsShardWriter
from llmsys.convert.tokenizer_files import ImportedTokenizer, import_tokenizer
from llmsys.convert.weight_dtype import WIDE, cast_weight, choose_dtype
from llmsys.errors import CheckpointError, format_choices
from llmsys.hugging_face.read_config_json import parse_json
from llmsys.log import get_logger
from llmsys.progress import Progress
from llmsys.storage.stored_formats import IMPORT_RECORD, VERSION_KEY
from llmsys.train.checkpoint_write import publish_weights

log = get_logger(__name__)

# Files next to the weights that are kept: configs, vocabularies, licences.
SMALL_FILE_BYTES = 1 << 26
# Longest window that the written config evaluates with; any other is one word on the command line.
LENGTH = 1024
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


class HuggingFaceImport:
    """A Hugging Face folder that has been checked: its model, its plan, and our tensors on
    demand.
    """

    def __init__(self, source: Path, dtype: torch.dtype | None = None) -> None:
        """Read config.json and the headers of all files, and compare them. No tensor is read yet.

        Args:
            source: The folder.
            dtype: Dtype of our weights. Default: None, each tensor as it is stored.

        Raises:
            ConfigError: The model is not supported.
            CheckpointError: Files are missing, damaged, or do not fit the model.
        """
        values = _read_config_values(source)
        self.files = QuantizedFolder(source, values)
        self.dtype = dtype
        found = {name: stored.shape for name, stored in self.files.tensors.items()}
        read = build_model_config(values, str(source / "config.json"))
        self.model = _add_found_heads(read, found)
        self.plan: ConversionPlan = build_conversion_plan(
            self.model, get_family_mapping(str(values["model_type"]), self.model)
        )
        self.match: TensorMatch = match_tensors(self.plan, found, source)
        self._require_wide_dtypes()
        self._group_of = {part: group for group in self.plan.groups for part in group.ours}
        self._last: tuple[TensorGroup, list[Tensor]] | None = None

    def list_tensors(self) -> list[TensorToWrite]:
        """Return the tensors of our checkpoint, with the dtypes of the files.

        Raises CheckpointError when the experts of one stacked tensor differ in dtype.
        """
        pieces = [
            TensorToWrite(part, self._get_group_dtype(group))
            for group in self.plan.groups
            for part in group.ours
        ]
        dtypes: dict[str, torch.dtype] = {}
        for part, dtype in pieces:
            if dtypes.setdefault(part.name, dtype) != dtype:
                raise CheckpointError(
                    f"the experts of {part.name} are {dtypes[part.name]} and {dtype} in "
                    f"{self.files.folder}, but llmsys stores them in one tensor. Save them in one "
                    "dtype."
                )
        return pieces + [TensorToWrite(part, torch.float32) for part in self.plan.unknown_there]

    def read_tensor(self, part: TensorPart) -> Tensor:
        """Return one tensor of ours. Buffers that the folder does not have are initialized as in
        a new model.
        """
        group = self._group_of.get(part)
        if group is None:
            # of the step before: shares that sum to one
            even = part.name.endswith("expert_share_E")
            return torch.full(part.shape, 1 / part.shape[0] if even else 0.0)
        if self._last is None or self._last[0] is not group:
            self._last = None
            theirs = [self.files.read(self.match.names[name]) for name in group.theirs]
            self._last = (group, group.form.from_hugging_face(theirs, self.model))
        tensor = self._last[1][group.ours.index(part)]
        if self.dtype is None:
            return tensor
        return cast_weight(part.name, tensor, choose_dtype(part.name, self.dtype))

    def check_copies(self) -> None:
        """Raise CheckpointError when the file holds two different values of a tied tensor."""
        for copy, original in self.match.copies.items():
            if not torch.equal(self.files.read(copy), self.files.read(self.match.names[original])):
                raise CheckpointError(
                    f"{copy} in {self.files.folder} differs from {original}, but the config ties "
                    "them. Set tie_word_embeddings to false in config.json if both are meant."
                )

    def _require_wide_dtypes(self) -> None:
        for name in self.match.names.values():
            if (dtype := self.files.tensors[name].dtype) not in WIDE:
                raise CheckpointError(
                    f"{name} in {self.files.folder} is stored as "
                    f"{str(dtype).removeprefix('torch.')}, without scales that are read (FP8 with "
                    "_scale_inv, MXFP4). Use weights in "
                    f"{format_choices([str(one).removeprefix('torch.') for one in WIDE])}."
                )

    def _get_group_dtype(self, group: TensorGroup) -> torch.dtype:
        stored = self.files.tensors[self.match.names[group.theirs[0]]].dtype
        return stored if self.dtype is None else choose_dtype(group.ours[0].name, self.dtype)


def convert_from_hugging_face(
    source: Path, destination: Path, dtype: torch.dtype | None = None
) -> Path:
    """Convert a Hugging Face folder to a run folder.

    Args:
        source: Hugging Face folder with safetensors files.
        destination: Run folder to create; must not exist.
        dtype: Dtype of the weights that are written. None: that of the source.

    Returns:
        `destination`.

    Raises:
        ConfigError: The architecture is not supported, or the destination exists. Nothing was
            written.
        CheckpointError: Tensors are missing, extra or of another shape. Nothing was written.
    """
    reading = HuggingFaceImport(source, dtype)
    pieces = reading.list_tensors()
    reading.check_copies()
    with publish_folder(destination) as folder:
        tokenizer = import_tokenizer(source, folder)
        # Whoever begins a run with these weights must cut text as they were trained.
        known = {} if tokenizer is None else {"tokenizer_fingerprint": tokenizer.fingerprint}
        _write_checkpoint(folder, reading, pieces, known)
        _keep_originals(folder / KEPT, source, reading)
        run = _build_run_config(reading.model, destination, tokenizer)
        (folder / RUN_CONFIG).write_text(format_recorded_config(run), encoding="utf-8")
    return destination


def _read_config_values(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    values = parse_json(file.read_text(encoding="utf-8-sig"), str(file))
    if not any(source.glob("*.safetensors")):
        others = sorted(path.name for path in source.iterdir() if path.suffix in WEIGHTS)
        held = f"holds {', '.join(others[:3])} and " if others else "holds "
        raise CheckpointError(
            f"{source} {held}no *.safetensors. Download the weights as safetensors; with "
            "transformers: AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    return values | (read_image_settings(source) if values.get("model_type") == "vit" else {})


def _add_found_heads(model: ModelConfig, found: dict[str, Any]) -> ModelConfig:
    """Return the model with heads that the files hold and config.json omits: pooler, classifier,
    prediction modules.
    """
    names = found.keys()
    if model.head.kind == "mlm" and any(name.endswith("pooler.dense.weight") for name in names):
        sentences = "cls.seq_relationship.weight" in names
        head = model.head.model_copy(update={"pooler": True, "next_sentence": sentences})
        return model.model_copy(update={"head": head})
    depth = sum(
        name.startswith("model.layers.") and name.endswith(".enorm.weight") for name in names
    )
    if depth and model.multi_token_prediction is None:
        return model.model_copy(
            update={"multi_token_prediction": MultiTokenPredictionConfig(depth=depth)}
        )
    return model


def _write_checkpoint(
    folder: Path, reading: HuggingFaceImport, pieces: list[TensorToWrite], run_state: dict[str, Any]
) -> None:
    sizes = {piece.part: piece.nbytes for piece in pieces}
    with Progress("convert", total=sum(sizes.values()), unit="B") as progress:

        def read_value(part: TensorPart) -> Tensor:
            progress.advance(sizes[part])
            return reading.read_tensor(part)

        file_bytes = min(FILE_BYTES, reading.files.get_largest_file_bytes())

        def write_weights(inside: Path) -> None:
            write_tensors(inside, pieces, read_value, file_bytes)

        publish_weights(folder / CHECKPOINTS, write_weights, run_state=run_state)


def _keep_originals(kept: Path, source: Path, reading: HuggingFaceImport) -> None:
    kept.mkdir()
    for file in sorted(source.iterdir()):
        small = file.is_file() and file.stat().st_size <= SMALL_FILE_BYTES
        if (
            small
            and file.suffix not in WEIGHTS
            and file.name not in (INDEX, RECORD)
            and not _is_outside(file, source)
        ):
            shutil.copyfile(file, kept / file.name)
    stored = reading.files.tensors
    record = {
        VERSION_KEY: IMPORT_RECORD.version,
        "model": reading.model.model_dump(mode="json"),
        "names": reading.match.names,
        "copies": reading.match.copies,
        "files": {name: one.file for name, one in stored.items()},
        # Buffers that no model of ours has, such as masks, may be of other types.
        "dtypes": {
            name: str(one.dtype).removeprefix("torch.")
            for name, one in stored.items()
            if one.dtype in WIDE
        },
        "index": (source / INDEX).read_bytes().decode() if (source / INDEX).is_file() else None,
    }
    if reading.files.is_quantized:
        # an export is not quantized: other tensors, and no scales
        record["index"] = None
        values = parse_json((kept / "config.json").read_text(encoding="utf-8-sig"), "config.json")
        values.pop("quantization_config", None)
        (kept / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (kept / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    if unused := reading.match.unused:
        with SafetensorsShardWriter(
            kept / UNUSED, {name: (stored[name].dtype, stored[name].shape) for name in unused}
        ) as writer:
            for name in unused:
                writer.write(name, reading.files.read(name))


def _is_outside(file: Path, source: Path) -> bool:
    """Return whether a file is a link out of its folder. A folder from a stranger must not copy
    files of this machine.

    In a cache of the hub, `snapshots/REVISION/NAME` are links to `blobs/HASH` next to `snapshots`;
    these are allowed.
    """
    folder, target = source.resolve(), file.resolve()
    inside = [
        folder,
        *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []),
    ]
    if any(target.is_relative_to(one) for one in inside):
        return False
    log.warning(
        "%s is left out: it is a link to %s. Copy the file into the folder to keep it.",
        file,
        target,
    )
    return True


def _build_run_config(
    model: ModelConfig, destination: Path, tokenizer: ImportedTokenizer | None
) -> dict[str, Any]:
    """Return the sections that follow from the source. Every other field keeps its default."""
    values: dict[str, Any] = {"run": {"name": destination.name, "folder": str(destination)}}
    if tokenizer is not None:
        values["tokenizer"] = {"kind": "file", "path": str(destination / tokenizer.file)}
        if model.family == "decoder":
            values["generation"] = {"prefix_pieces": list(tokenizer.prefix_pieces)}
        if model.head.kind == "mlm" and tokenizer.mask_token is not None:
            values["objective"] = {"kind": "masked", "mask_token": tokenizer.mask_token}
    values["model"] = model.model_dump(mode="json")
    values["batch"] = {"sequence_length": min(model.max_position_embeddings, LENGTH)}
    # a folder whose config does not load must not be published
    RunConfig.model_validate(values)
    return values

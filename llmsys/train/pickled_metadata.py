"""Convert checkpoints of format 1, whose metadata are a pickle, to the current format in place.

Reads `state.json` and `.metadata`; writes `metadata.json` and `state.json`; removes `.metadata`.
The tensors stay as they are, so a run resumes with equal numbers.

Invariants:
- The only code that unpickles. It runs for `llmsys convert --trust-pickle` alone.
- Only the classes of torch's metadata are looked up; any other raises CheckpointError.
- An interrupted conversion leaves a checkpoint that the same command converts.
"""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from llmsys.errors import CheckpointError, ConfigError
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.train.checkpoint_metadata import DTYPES, METADATA, format_metadata, parse_metadata
from llmsys.train.checkpoint_record import (
    PICKLED,
    PICKLED_FORMAT,
    RECORD,
    compute_digest,
    describe_pickle,
    find_checkpoint_error,
    find_damaged_file,
    read_record,
    write_record,
)

FOLDERS = ("checkpoints", "averaged")
# Classes of a `.metadata` of torch 2, by module.
CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *DTYPES),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
    "collections": ("OrderedDict",),
}


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler of the classes in `CLASSES` and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of `CLASSES`.

        Raises:
            UnpicklingError: the pickle asks for any other.
        """
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it needs {module}.{name}")
        return super().find_class(module, name)


def list_checkpoints(source: Path) -> list[Path]:
    """List the checkpoint that `source` is, or those of the run folder that it is.

    Args:
        source: a checkpoint or a run folder.

    Returns:
        Checkpoint folders, oldest first.

    Raises:
        ConfigError: it is neither.
    """
    if (source / RECORD).is_file():
        return [source]
    found = [path for folder in FOLDERS for path in sorted((source / folder).glob("step-*"))]
    if not found:
        raise ConfigError(
            f"{source} is neither a checkpoint nor a run folder with checkpoints. Name one of "
            "these."
        )
    return found


def convert_pickled_metadata(checkpoint: Path) -> bool:
    """Replace the pickled metadata of a checkpoint.

    Args:
        checkpoint: folder of the checkpoint.

    Returns:
        Whether the metadata were a pickle.

    Raises:
        CheckpointError: the checkpoint is damaged, or its pickle asks for other classes.
    """
    problem = find_checkpoint_error(checkpoint)
    if problem is None:
        (checkpoint / PICKLED).unlink(missing_ok=True)  # left by an interrupted conversion
        return False
    if problem != describe_pickle(checkpoint):
        raise CheckpointError(
            f"{checkpoint} cannot be rewritten: {problem}. Remove it, or use another."
        )
    record = read_record(checkpoint, PICKLED_FORMAT)
    files: dict[str, str] = dict(record["files"])
    if (damage := find_damaged_file(checkpoint, files)) is not None:
        raise CheckpointError(
            f"{checkpoint} cannot be rewritten: {damage}. Remove it, or use another."
        )
    content = format_metadata(_load_pickled_metadata(checkpoint))
    parse_metadata(content, checkpoint)  # reject what a reader would reject
    # The metadata, then the record, then the pickle: after an interruption the command can be
    # repeated.
    write_bytes_atomically(checkpoint / METADATA, content)
    files.pop(PICKLED, None)
    files[METADATA] = compute_digest(checkpoint / METADATA)
    record.pop("format")
    write_record(checkpoint, {**record, "files": files})
    (checkpoint / PICKLED).unlink(missing_ok=True)
    return True


def _load_pickled_metadata(checkpoint: Path) -> Metadata:
    try:
        with (checkpoint / PICKLED).open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{checkpoint / PICKLED} is not the metadata of a checkpoint ({error}) and was not "
            "loaded. Do not use this checkpoint: its author replaced the file by something else."
        ) from None
    return metadata

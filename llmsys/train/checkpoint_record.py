"""`state.json`: the record that makes a folder of tensor files a checkpoint, with a checksum of
every file.

Holds the format version, the numbers of data steps and optimizer updates, the identity of the run,
its further state and the checksum of each file. The last key is the checksum of the record itself.

Invariants:
- Each rank computes and verifies the checksums of its share of the files.
- A read error other than `DAMAGE_ERRORS` is never taken for damage.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import is_plain_file_name
from llmsys.storage.stored_formats import CHECKPOINT, VERSION_KEY, build_checkpoint_format_error

RECORD = "state.json"
CHECKPOINT_NAME = re.compile(r"step-(\d+)")

# Errors that tell the state of the disk. Any other (EIO, ESTALE, EACCES, a timeout) may be gone
# later.
DAMAGE_ERRORS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP))


def build_missing_error(folder: Path) -> CheckpointError:
    """Build the error about a run without a checkpoint.

    Args:
        folder: The folder `checkpoints` of the run.

    Returns:
        The error, to be raised.
    """
    return CheckpointError(
        f"{folder} has no complete checkpoint. Run `llmsys train` with this config first."
    )


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return published checkpoints by step, oldest first.

    Args:
        folder: The folder `checkpoints` of a run.

    Returns:
        Their folders; empty without such a folder.

    Raises:
        UnreadableCheckpointError: the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)  # glob returns nothing for a folder without permission
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(folder, error) from error
        names = []
    steps = sorted(
        (int(match[1]), name) for name in names if (match := CHECKPOINT_NAME.fullmatch(name))
    )
    return {step: folder / name for step, name in steps}


def build_unreadable_error(path: Path, error: OSError) -> UnreadableCheckpointError:
    """Return the error for a file that the system cannot read now and that may be complete."""
    return UnreadableCheckpointError(
        f"{path} could not be read: {error.strerror or error}. The checkpoint is not treated as "
        "corrupt: nothing was skipped or deleted. Repair the disk, the mount or the permissions, "
        "then run the same command again."
    )


def is_present(path: Path) -> bool:
    """Return whether something exists at a path.

    Raises:
        UnreadableCheckpointError: the system cannot tell.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(path, error) from error
        return False
    return True


def compute_digest(file: Path) -> str:
    """Compute the checksum of a file.

    Args:
        file: The file.

    Returns:
        xxh3_128 in hex.
    """
    with file.open("rb") as opened:
        # xxh3_128 is ten times as fast as blake2b, and enough against damage.
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def compute_digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the checksum of each file by its name.

    Args:
        files: paths, whose last parts are different.
    """
    return {file.name: compute_digest(file) for file in files}


def list_rank_files(folder: Path, rank: int) -> list[Path]:
    """List the files of a checkpoint that a rank wrote.

    Args:
        folder: The checkpoint.
        rank: The rank.

    Returns:
        Its tensors and index, and on rank 0 also every file without a rank in its name.
    """
    files = sorted(file for file in folder.iterdir() if file.name != RECORD)
    own = [file for file in files if file.name.startswith(f"__{rank}_")]
    # torch names a tensor file after the rank that wrote it: __0_0.distcp.
    return own + [file for file in files if rank == 0 and not file.name.startswith("__")]


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `state.json` durably, with its own checksum as the last key.

    Args:
        folder: The checkpoint.
        record: Its content without version and checksum.

    Raises:
        DataError: The file cannot be written.
    """
    record = {VERSION_KEY: CHECKPOINT.version, **record}
    write_bytes_atomically(
        folder / RECORD,
        json.dumps(record | {"digest": _compute_record_digest(record)}, indent=2).encode(),
    )


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Read the record of a checkpoint.

    Args:
        checkpoint: folder of the checkpoint.

    Returns:
        The record without its own checksum. Keys: format_version, steps, updates, run, files, and
        further state of the run.

    Raises:
        CheckpointError: it is missing or damaged.
        CheckpointFormatError: it has another format version.
        UnreadableCheckpointError: the system cannot read it now.
    """
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
            raise ValueError("not a record of files")
        # Format versions up to 3 were stored as `format`.
        if (version := record.get(VERSION_KEY, record.get("format"))) != CHECKPOINT.version:
            raise build_checkpoint_format_error(version, checkpoint)
        for name in record["files"]:
            if not is_plain_file_name(name):
                raise ValueError(f"{name!r} is not the name of a file in its folder")
        if record.pop("digest") != _compute_record_digest(record):
            raise ValueError("corrupt: its own digest differs")
        # A missing key raises here, where it counts as damage.
        int(record["steps"]), record["run"]
    except RecursionError:
        raise CheckpointError(f"{RECORD} cannot be read (nested too deeply)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(checkpoint / RECORD, error) from error
        raise CheckpointError(f"{RECORD} cannot be read ({error})") from None
    return record


def _compute_record_digest(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def find_checkpoint_error(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return the reason why a checkpoint cannot be used, or None.

    Args:
        checkpoint: folder of the checkpoint.
        share: index of this reader; it verifies files `share`, `share + shares`, …
        shares: number of readers.

    Returns:
        A message, or None for a complete checkpoint.

    Raises:
        UnreadableCheckpointError: the system cannot read a file now, or it has another format
            version. Neither is damage.
    """
    try:
        return find_damaged_file(checkpoint, read_record(checkpoint)["files"], share, shares)
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return str(error)


def find_damaged_file(
    checkpoint: Path, digests: dict[str, str], share: int = 0, shares: int = 1
) -> str | None:
    """Find the first file that is missing or differs from its checksum.

    Args:
        checkpoint: The checkpoint.
        digests: The recorded checksum of each file.
        share: Number of this reader among `shares`, which divide the files.
        shares: Number of readers.

    Returns:
        A message that names the file, or None.

    Raises:
        UnreadableCheckpointError: The system cannot read a file now, which is no damage.
    """
    # Strided, so that readers share the large files of all ranks; the small ones come last.
    names = sorted(digests, key=lambda name: (name.endswith(".index"), name))[share::shares]
    # First, because it costs nothing: checksums read every byte.
    for name in names:
        if not is_present(checkpoint / name):
            return f"{name} is missing"
    for name in names:
        try:
            if compute_digest(checkpoint / name) != digests[name]:
                return f"{name} is damaged (its digest differs from the recorded one)"
        except OSError as error:
            if error.errno not in DAMAGE_ERRORS:
                raise build_unreadable_error(checkpoint / name, error) from error
            return f"{name} cannot be read ({error.strerror})"
    return None

"""`state.json`: what makes a folder of tensor files a checkpoint, and how a reader knows that every byte is there.

Holds the format, the number of data steps and of optimizer updates, the run's identity, what else goes on with the run,
and the digest of each file; the last key is the digest of the record itself. Each rank digests and verifies its share
of the files, so that no rank reads them all.
"""

import errno
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from llmsys.atomic_write import write_bytes_atomically
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.file_name import is_plain_file_name

FORMAT = 2
"""2: the places of the tensors are in `metadata.json`, which was a pickle in 1."""
RECORD = "state.json"
PICKLED, PICKLED_FORMAT = ".metadata", 1
"""What format 1 had for `metadata.json`: a pickle, which can run code when it is read."""
BLAKE2B_DIGITS = 128
CHECKPOINT_NAME = re.compile(r"step-(\d+)")

DAMAGE_ERRORS = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP))
"""Errors that say something about what is on disk. Any other (EIO, ESTALE, EACCES, a timeout) may be gone later."""


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """List published checkpoints by step, oldest first. UnreadableCheckpointError when the folder cannot be listed."""
    try:
        names = os.listdir(folder)  # glob would take a forbidden folder for an empty one
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(folder, error) from error
        names = []
    steps = sorted((int(match[1]), name) for name in names if (match := CHECKPOINT_NAME.fullmatch(name)))
    return {step: folder / name for step, name in steps}


def build_unreadable_error(path: Path, error: OSError) -> UnreadableCheckpointError:
    """Return the error for a file that the system cannot read now, and that may be whole."""
    return UnreadableCheckpointError(
        f"{path} could not be read: {error.strerror or error}. This is not taken for damage: nothing was skipped or "
        f"deleted. Mend the disk, the mount or the permissions, then run the same command again."
    )


def is_present(path: Path) -> bool:
    """Return whether there is something at a path. UnreadableCheckpointError when the system cannot tell."""
    try:
        path.stat()
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(path, error) from error
        return False
    return True


def compute_digest(file: Path, like: str = "") -> str:
    """The xxh3_128 of a file's bytes, in hex: ten times as fast as blake2b, and enough against damage.

    The blake2b, which checkpoints had before, where `like` is one.
    """
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b" if len(like) == BLAKE2B_DIGITS else xxhash.xxh3_128).hexdigest()


def compute_digests(files: Iterable[Path]) -> dict[str, str]:
    """The digest of each file by its name."""
    return {file.name: compute_digest(file) for file in files}


def list_rank_files(folder: Path, rank: int) -> list[Path]:
    """The files that a rank wrote: its tensors, and on rank 0 everything that no rank's number is in."""
    files = sorted(file for file in folder.iterdir() if file.name != RECORD)
    own = [file for file in files if file.name.startswith(f"__{rank}_")]
    return own + [file for file in files if rank == 0 and not file.name.startswith("__")]


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record durably, with its own digest as the last key."""
    record = {"format": FORMAT, **record}
    write_bytes_atomically(
        folder / RECORD, json.dumps(record | {"digest": _compute_record_digest(record)}, indent=2).encode()
    )


def read_record(checkpoint: Path, expected: int = FORMAT) -> dict[str, Any]:
    """The record of a checkpoint. CheckpointError with the reason when it is missing, damaged or of another format.

    UnreadableCheckpointError when the system cannot read it now.
    """
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
            raise ValueError("not a record of files")
        if record["format"] != expected:
            raise CheckpointError(_describe_format(record["format"], checkpoint))
        for name in record["files"]:
            if not is_plain_file_name(name):
                raise ValueError(f"{name!r} is not the name of a file in its folder")
        digest = record.pop("digest", None)
        if digest not in (None, _compute_record_digest(record)):
            raise ValueError("damaged: its own digest differs")
        int(record["steps"]), record["run"]
    except RecursionError:
        raise CheckpointError(f"{RECORD} cannot be read (nested too deeply)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(checkpoint / RECORD, error) from error
        raise CheckpointError(f"{RECORD} cannot be read ({error})") from None
    return record


def describe_pickle(checkpoint: Path) -> str:
    """Return why a checkpoint with pickled metadata is refused, and the command that rewrites a trusted one."""
    return (
        f"its metadata are a pickle ({PICKLED}, as llmsys wrote it in format 1), and reading a pickle can run code. "
        f"If you trust whoever wrote it, rewrite it with `llmsys convert {shlex.quote(str(checkpoint))} --trust-pickle`"
    )


def _describe_format(found: Any, checkpoint: Path) -> str:
    if found == PICKLED_FORMAT:
        return describe_pickle(checkpoint)
    newer = ", which a newer llmsys wrote" if isinstance(found, int) and found > FORMAT else ""
    return f"format {found}{newer}; this version reads {FORMAT}"


def _compute_record_digest(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def find_checkpoint_error(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """Why a checkpoint cannot be used, or None. Of `shares` readers, reader `share` verifies every so-manieth file.

    UnreadableCheckpointError when the system cannot read a file now: that is no damage.
    """
    try:
        return find_damaged_file(checkpoint, read_record(checkpoint)["files"], share, shares)
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return str(error)


def find_damaged_file(checkpoint: Path, digests: dict[str, str], share: int = 0, shares: int = 1) -> str | None:
    """Return the first file that is missing or differs from its digest, as a message; None where all are whole.

    Raises:
        UnreadableCheckpointError: the system cannot read a file now, which is no damage.
    """
    for name in sorted(digests):
        if not is_present(checkpoint / name):
            return f"{name} is missing"
    for name in sorted(digests)[share::shares]:
        try:
            if compute_digest(checkpoint / name, digests[name]) != digests[name]:
                return f"{name} is damaged (its digest differs from the recorded one)"
        except OSError as error:
            if error.errno not in DAMAGE_ERRORS:
                raise build_unreadable_error(checkpoint / name, error) from error
            return f"{name} cannot be read ({error.strerror})"
    return None

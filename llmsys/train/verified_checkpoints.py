"""Cache of verified checkpoints, so that a save does not read all of them again.

A verdict holds while the files keep their sizes and times. UnreadableCheckpointError is raised: it is no verdict.
"""

import contextlib
import os
from pathlib import Path

from llmsys.errors import UnreadableCheckpointError
from llmsys.log import get_logger
from llmsys.train.checkpoint_record import DAMAGE_ERRORS, build_unreadable_error, find_checkpoint_error

Signature = tuple[tuple[str, int, int, int], ...]

log = get_logger(__name__)


class VerifiedCheckpoints:
    """Verdicts by checkpoint, of one process."""

    def __init__(self) -> None:
        self._verdicts: dict[Path, tuple[Signature, str | None]] = {}

    def mark_verified(self, checkpoint: Path) -> None:
        """Record that a checkpoint is complete, because it was verified elsewhere or written just now."""
        with contextlib.suppress(UnreadableCheckpointError):  # it is verified when it is needed
            self._verdicts[checkpoint] = _read_signature(checkpoint), None

    def is_complete(self, checkpoint: Path) -> bool:
        """Return whether every byte of a checkpoint is as it was written; read it unless the verdict is known."""
        signature = _read_signature(checkpoint)
        if checkpoint not in self._verdicts or self._verdicts[checkpoint][0] != signature:
            problem = find_checkpoint_error(checkpoint)
            if problem is not None:
                log.warning("checkpoint %s does not count for retention: %s", checkpoint, problem)
            self._verdicts[checkpoint] = signature, problem
        return self._verdicts[checkpoint][1] is None


def _read_signature(checkpoint: Path) -> Signature:
    """Return name, size, inode and modification time of every file; empty without a folder."""
    try:
        with os.scandir(checkpoint) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError as error:
        if error.errno not in DAMAGE_ERRORS:
            raise build_unreadable_error(checkpoint, error) from error
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in stats))

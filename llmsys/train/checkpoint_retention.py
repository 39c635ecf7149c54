"""Select and remove old checkpoints: keep the newest, one every N steps for ever, and the best by
evaluation.

`select_kept_steps` is a pure function of steps and scores. A checkpoint's score is the evaluation
of its own step, which its record holds.

`VerifiedCheckpoints` is a cache, so that a save does not read all of them again. A verdict holds
while the files keep their sizes and times. UnreadableCheckpointError is raised: it is no verdict.

Invariants:
- A damaged checkpoint does not count: as many complete ones stay as the rules ask for.
- Nothing newer than the oldest of the last complete ones is removed.
- Nothing is removed while a checkpoint cannot be read.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from llmsys.config.checkpoint import LOWER_IS_BETTER, CheckpointConfig
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.log import get_logger
from llmsys.train.checkpoint_record import (
    DAMAGE_ERRORS,
    build_unreadable_error,
    find_checkpoint_error,
    list_checkpoints,
    read_record,
)
from llmsys.train.checkpoint_write import remove_checkpoint

Signature = tuple[tuple[str, int, int, int], ...]

log = get_logger(__name__)


class VerifiedCheckpoints:
    """Verdicts by checkpoint, of one process."""

    def __init__(self) -> None:
        self._verdicts: dict[Path, tuple[Signature, str | None]] = {}

    def mark_verified(self, checkpoint: Path) -> None:
        """Record that a checkpoint is complete, because it was verified elsewhere or written
        just now.
        """
        with contextlib.suppress(UnreadableCheckpointError):  # it is verified when it is needed
            self._verdicts[checkpoint] = _read_signature(checkpoint), None

    def is_complete(self, checkpoint: Path) -> bool:
        """Return whether every byte of a checkpoint is as it was written; read it unless the
        verdict is known.
        """
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
    return tuple(
        sorted((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)
    )


def is_every_step_complete(step: int) -> bool:
    """Return True: the default for callers that do not verify."""
    return True


def select_kept_steps(
    steps: Sequence[int],
    scores: Mapping[int, float],
    rule: CheckpointConfig,
    is_complete: Callable[[int], bool] = is_every_step_complete,
) -> set[int]:
    """Return the steps whose checkpoints are kept.

    Args:
        steps: steps of the checkpoints, in any order.
        scores: value of `best_metric` for the steps that were evaluated. Of equal scores the newer
            step ranks higher.
        rule: limits of each kind.
        is_complete: asked in the order of rank, until a rule has as many as it keeps.
    """
    ordered = sorted(steps)
    sign = 1 if rule.best_metric in LOWER_IS_BETTER else -1
    # The newer one of equal scores.
    ranked = sorted(
        (step for step in ordered if step in scores), key=lambda step: (sign * scores[step], -step)
    )
    forever = {
        step for step in ordered if rule.keep_every_steps and step % rule.keep_every_steps == 0
    }
    last = list(islice(filter(is_complete, reversed(ordered)), rule.keep_last))
    # with fewer complete ones nothing is removed
    oldest = last[-1] if len(last) == rule.keep_last else 0
    best = islice(filter(is_complete, ranked), rule.keep_best)
    return {*(step for step in ordered if step >= oldest), *best, *forever}


def remove_old_checkpoints(
    folder: Path, rule: CheckpointConfig, verified: VerifiedCheckpoints | None = None
) -> None:
    """Remove the checkpoints that no rule keeps. A folder that cannot be removed is tried again
    after the next save.

    Args:
        folder: `checkpoints/` of a run.
        rule: limits of each kind.
        verified: verdicts known so far. Complete checkpoints outrank damaged ones, so candidates
            are verified.
    """
    verified = VerifiedCheckpoints() if verified is None else verified
    try:
        found = list_checkpoints(folder)
        going = _select_removable(found, rule, verified)
    except UnreadableCheckpointError as error:
        log.warning("no checkpoint was removed; retrying after the next save: %s", error)
        return
    for step in going:
        try:
            remove_checkpoint(found[step])
        except OSError as error:
            log.warning("checkpoint %s could not be removed: %s", found[step], error.strerror)


def _select_removable(
    found: Mapping[int, Path], rule: CheckpointConfig, verified: VerifiedCheckpoints
) -> list[int]:
    scores = _read_scores(found, rule) if rule.keep_best else {}
    if found.keys() <= select_kept_steps(list(found), scores, rule):
        return []  # nothing to remove, so nothing is verified
    return sorted(
        found.keys()
        - select_kept_steps(
            list(found), scores, rule, lambda step: verified.is_complete(found[step])
        )
    )


def _read_scores(found: Mapping[int, Path], rule: CheckpointConfig) -> dict[int, float]:
    scores = {}
    for step, path in found.items():
        try:
            value = (read_record(path).get("evaluation") or {}).get(rule.best_metric)
        except UnreadableCheckpointError:
            raise
        except CheckpointError:
            continue  # a damaged one has no score
        if value is not None:
            scores[step] = float(value)
    return scores

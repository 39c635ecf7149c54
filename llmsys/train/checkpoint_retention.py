"""Select and remove old checkpoints: keep the newest, one every N steps for ever, and the best by evaluation.

`select_kept_steps` is a pure function of steps and scores. A checkpoint's score is the evaluation of its own step,
which its record holds.

Invariants:
- A damaged checkpoint does not count: as many complete ones stay as the rules ask for.
- Nothing newer than the oldest of the last complete ones is removed.
- Nothing is removed while a checkpoint cannot be read.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from llmsys.config.checkpoint import LOWER_IS_BETTER, CheckpointConfig
from llmsys.errors import CheckpointError, UnreadableCheckpointError
from llmsys.log import get_logger
from llmsys.train.checkpoint_record import list_checkpoints, read_record
from llmsys.train.checkpoint_write import remove_checkpoint
from llmsys.train.verified_checkpoints import VerifiedCheckpoints

log = get_logger(__name__)


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
        scores: value of `best_metric` for the steps that were evaluated. Of equal scores the newer step ranks higher.
        rule: limits of each kind.
        is_complete: asked in the order of rank, until a rule has as many as it keeps.
    """
    ordered = sorted(steps)
    sign = 1 if rule.best_metric in LOWER_IS_BETTER else -1
    ranked = sorted((step for step in ordered if step in scores), key=lambda step: (sign * scores[step], -step))
    forever = {step for step in ordered if rule.keep_every_steps and step % rule.keep_every_steps == 0}
    last = list(islice(filter(is_complete, reversed(ordered)), rule.keep_last))
    oldest = last[-1] if len(last) == rule.keep_last else 0  # with fewer complete ones nothing is removed
    best = islice(filter(is_complete, ranked), rule.keep_best)
    return {*(step for step in ordered if step >= oldest), *best, *forever}


def remove_old_checkpoints(folder: Path, rule: CheckpointConfig, verified: VerifiedCheckpoints | None = None) -> None:
    """Remove the checkpoints that no rule keeps. A folder that cannot be removed is tried again after the next save.

    Args:
        folder: `checkpoints/` of a run.
        rule: limits of each kind.
        verified: verdicts known so far. Complete checkpoints outrank damaged ones, so candidates are verified.
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


def _select_removable(found: Mapping[int, Path], rule: CheckpointConfig, verified: VerifiedCheckpoints) -> list[int]:
    scores = _read_scores(found, rule) if rule.keep_best else {}
    if found.keys() <= select_kept_steps(list(found), scores, rule):
        return []  # nothing to remove, so nothing is verified
    return sorted(
        found.keys() - select_kept_steps(list(found), scores, rule, lambda step: verified.is_complete(found[step]))
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

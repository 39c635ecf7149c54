"""Which checkpoints are kept: the newest, every so many steps for ever, and the best by evaluation.

`kept` is a pure function of steps and scores; `retire` removes the others from a folder. A checkpoint's score is the
evaluation of its own step, which its record holds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmsys.config.checkpoint import LOWER_IS_BETTER, CheckpointConfig
from llmsys.errors import CheckpointError
from llmsys.log import logger
from llmsys.train.checkpoint_record import read_record
from llmsys.train.checkpoint_write import set_aside

log = logger(__name__)


def kept(steps: Sequence[int], scores: Mapping[int, float], rule: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay. `scores` has those that were evaluated; of equal ones the newer is better."""
    ordered = sorted(steps)
    sign = 1 if rule.best_by in LOWER_IS_BETTER else -1
    ranked = sorted((step for step in ordered if step in scores), key=lambda step: (sign * scores[step], -step))
    forever = {step for step in ordered if rule.keep_every_steps and step % rule.keep_every_steps == 0}
    return {*ordered[-rule.keep_last :], *ranked[: rule.keep_best], *forever}


def retire(folder: Path, rule: CheckpointConfig) -> None:
    """Remove what no rule keeps. A folder that cannot be removed is said, and tried again after the next save."""
    found = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}
    stay = kept(list(found), _scores(found, rule) if rule.keep_best else {}, rule)
    for step in sorted(found.keys() - stay):
        try:
            set_aside(found[step])
        except OSError as error:
            log.warning("checkpoint %s could not be removed: %s", found[step], error.strerror)


def _scores(found: Mapping[int, Path], rule: CheckpointConfig) -> dict[int, float]:
    scores = {}
    for step, path in found.items():
        try:
            value = (read_record(path).get("evaluation") or {}).get(rule.best_by)
        except CheckpointError:
            continue  # damaged: it is not among the best
        if value is not None:
            scores[step] = float(value)
    return scores

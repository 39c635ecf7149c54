"""Rebuild one step of a run from the nearest checkpoint before it, and hold it to what the run recorded.

Reads the run folder and changes nothing in it. The tokens of each step on the way must have the recorded digest; loss
and gradient norm must agree to a tolerance, since the original may have had other ranks; and in bitwise mode the state
after the step must have the recorded hash, bit for bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.engine import Torch
from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.data.digest import as_text, digest_of
from llmsys.engine.engine import Engine
from llmsys.engine.state_hash import state_hash
from llmsys.errors import CheckpointError, DataError
from llmsys.events import latest_events
from llmsys.log import logger
from llmsys.optim.schedule import balance_factor, learning_rate
from llmsys.parallel.group import device_of_this_rank, joined
from llmsys.parallel.mesh import make_meshes
from llmsys.train import checkpoint
from llmsys.train.balance import set_balance, settle_experts
from llmsys.train.build import check, use_threads
from llmsys.train.build_engine import build_engine
from llmsys.train.checkpoint_record import problem_of, read_record
from llmsys.train.objective import steps_of
from llmsys.train.precision import resolve_precision
from llmsys.train.trainer import seed_dropout

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Relative, of loss and gradient norm: sums in another order, in the type that products are in."""

log = logger(__name__)


@dataclass(frozen=True)
class Check:
    """One thing that was recorded and was made again."""

    step: int
    what: str
    recorded: Any
    replayed: Any
    agrees: bool


def replay(config: RunConfig, step: int) -> list[Check]:
    """Everything that could be checked about step `step`, counted from 1, and the steps that lead to it.

    Raises DataError when the run has not got there, CheckpointError when no checkpoint before it is whole and the run
    did not begin from its seed.
    """
    recorded = _recorded(config.run.folder, step)
    alone = _alone(resolve_precision(config))
    with joined():
        check(alone, 1)
        use_threads(alone)
        device = device_of_this_rank()
        steps = steps_of(alone, 1, 0)
        engine = build_engine(alone, make_meshes(alone.fitted_layout(1), device), device)
        first, left_out = _start(engine, config, step)
        checks: list[Check] = []
        for number in range(first + 1, step + 1):
            if number not in left_out:
                checks += _one(engine, alone, steps.step(number - 1), number, recorded.get(number, {}))
        return checks + _state(engine, config, step)


def _alone(config: RunConfig) -> RunConfig:
    """The run in one process: engine and layout never change what a step is."""
    changes: dict[str, Any] = {"layout": Layout(), "engine": Torch()}
    return config.model_copy(update=changes)


def _recorded(run_folder: Path, step: int) -> dict[int, dict[str, Any]]:
    path = run_folder / "events.jsonl"
    if not path.exists():
        raise DataError(f"{run_folder} has no events.jsonl: nothing was trained there. Run llmsys train first.")
    events = {int(e["step"]): e for e in latest_events(path) if e["event"] == "step"}
    if not events or step > max(events) or step < 1:
        raise DataError(f"step={step} was not trained: {run_folder} has steps 1 to {max(events, default=0)}.")
    return events


def _start(engine: Engine, config: RunConfig, step: int) -> tuple[int, set[int]]:
    """Load the newest whole checkpoint before `step`; (its step, steps that were left out)."""
    folder = config.run.folder / "checkpoints"
    for name in reversed(checkpoint.whole_names(folder)):
        if int(name.name.removeprefix("step-")) >= step:
            continue
        if (problem := problem_of(name)) is not None:
            log.warning("skipping checkpoint %s: %s", name, problem)
            continue
        checkpoint.load(engine, name)
        record = read_record(name)
        log.info("replaying from %s", name)
        return int(record["steps"]), set(record.get("judge", {}).get("left_out", ()))
    if config.train.start_from is not None:
        raise CheckpointError(
            f"no checkpoint in {folder} is older than step {step}, and the run began from {config.train.start_from}. "
            f"Replay a step after the oldest checkpoint, or keep more with checkpoint.keep_every_steps."
        )
    log.info("replaying from the seed: no checkpoint is older than step %d", step)
    return 0, set()


def _one(engine: Engine, config: RunConfig, batches: list[Any], number: int, recorded: dict[str, Any]) -> list[Check]:
    seed_dropout(config.run.seed, number - 1)
    set_balance(engine.module, balance_factor(config, number))
    result = engine.train_step(batches, learning_rate(config, number))
    settle_experts(engine.module, result.applied)
    checks = []
    if "batch_digest" in recorded:
        made = as_text(digest_of(batches))
        checks.append(Check(number, "tokens", recorded["batch_digest"], made, made == recorded["batch_digest"]))
    for name, value in (("loss", result.loss), ("gradient_norm", result.gradient_norm)):
        if recorded.get(name) is not None:
            near = abs(value - recorded[name]) <= TOLERANCE[config.train.resolved_precision] * abs(recorded[name])
            checks.append(Check(number, name, recorded[name], value, near))
    return checks


def _state(engine: Engine, config: RunConfig, step: int) -> list[Check]:
    """The hash of the state after the step, where a checkpoint of it recorded one."""
    path = config.run.folder / "events.jsonl"
    events = [e for e in latest_events(path) if e["event"] == "state_hash" and e["step"] == step]
    if not events:
        return []
    made = state_hash(engine.state())
    return [Check(step, "state", events[-1]["state_hash"], made, made == events[-1]["state_hash"])]

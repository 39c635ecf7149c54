"""Replay one step of a run from the nearest checkpoint before it, and compare it with the recorded
values.

Reads the run folder; writes nothing. The tokens of each step on the way must have the recorded
digest. Loss and gradient norm must agree within a tolerance, since the original may have had other
ranks. In bitwise mode the state after the step must have the recorded hash.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.data.batch import compute_batch_digest, format_digest
from llmsys.engine.engine import Engine
from llmsys.engine.state_hash import hash_state
from llmsys.errors import CheckpointError, DataError
from llmsys.events import read_latest_events, require_events
from llmsys.log import get_logger
from llmsys.optim.lr_schedule import compute_balance_factor, compute_learning_rate
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import get_local_device, init_process_group
from llmsys.train import checkpoint_load
from llmsys.train.build_engine import build_engine
from llmsys.train.build_objective import build_step_batches
from llmsys.train.build_trainer import check_config, set_num_threads
from llmsys.train.checkpoint_record import find_checkpoint_error, read_record
from llmsys.train.dropout_seed import seed_dropout
from llmsys.train.expert_load import set_balance_factor, update_expert_balance
from llmsys.train.precision import resolve_precision
from llmsys.train.recorded_changes import load_recorded_changes

# Relative tolerance of loss and gradient norm: sums in another order, in the dtype of the matmuls.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}

log = get_logger(__name__)


@dataclass(frozen=True)
class ReplayCheck:
    """One recorded value and the replayed one."""

    step: int
    what: str
    recorded: Any
    replayed: Any
    agrees: bool


def replay_step(config: RunConfig, step: int) -> list[ReplayCheck]:
    """Replay a step and the steps between the nearest checkpoint and it.

    Args:
        config: the config of the run.
        step: counted from 1.

    Returns:
        A check for every recorded value.

    Raises:
        DataError: the run has not trained the step.
        CheckpointError: no checkpoint before it is complete, and the run did not start from its
            seed.
    """
    recorded = _read_step_events(config.run.folder, step)
    alone = _build_single_process_config(load_recorded_changes(resolve_precision(config)))
    with init_process_group():
        check_config(alone, 1)
        set_num_threads(alone)
        device = get_local_device()
        steps = build_step_batches(alone, 1, 0)
        engine = build_engine(alone, build_device_meshes(alone.resolve_layout(1), device), device)
        first, left_out = _load_checkpoint_before(engine, config, step)
        checks: list[ReplayCheck] = []
        for number in range(first + 1, step + 1):
            if number not in left_out:
                checks += _replay_single_step(
                    engine,
                    alone,
                    steps.get_micro_batches(number - 1),
                    number,
                    recorded.get(number, {}),
                )
        return checks + _compare_state_hash(engine, config, step)


def _build_single_process_config(config: RunConfig) -> RunConfig:
    """Return the config for one process: engine and layout never change the content of a step."""
    changes: dict[str, Any] = {
        "layout": ParallelLayout(),
        "engine": TorchEngineConfig(data_parallel="fsdp"),
    }
    return config.model_copy(update=changes)


def _read_step_events(run_folder: Path, step: int) -> dict[int, dict[str, Any]]:
    events = {
        int(e["step"]): e
        for e in read_latest_events(require_events(run_folder))
        if e["event"] == "step"
    }
    if not events or step > max(events) or step < 1:
        raise DataError(
            f"step={step} was not trained: {run_folder} has steps 1 to {max(events, default=0)}."
        )
    return events


def _load_checkpoint_before(engine: Engine, config: RunConfig, step: int) -> tuple[int, set[int]]:
    """Load the newest complete checkpoint before `step`; return its step and the skipped steps."""
    folder = config.run.folder / "checkpoints"
    for name in reversed(checkpoint_load.list_complete_checkpoints(folder)):
        if int(name.name.removeprefix("step-")) >= step:
            continue
        if (problem := find_checkpoint_error(name)) is not None:
            log.warning("skipping checkpoint %s: %s", name, problem)
            continue
        checkpoint_load.load_checkpoint(engine, name)
        record = read_record(name)
        log.info("replaying from %s", name)
        return int(record["steps"]), set(record.get("step_guard", {}).get("skipped_steps", ()))
    if (source := config.train.init_from or config.train.branch_from) is not None:
        raise CheckpointError(
            f"no checkpoint in {folder} is older than step {step}, and the run started from "
            f"{source}. Replay a step after the oldest checkpoint, or keep more with "
            "checkpoint.keep_every_steps."
        )
    log.info("replaying from the seed: no checkpoint is older than step %d", step)
    return 0, set()


def _replay_single_step(
    engine: Engine, config: RunConfig, batches: list[Any], number: int, recorded: dict[str, Any]
) -> list[ReplayCheck]:
    seed_dropout(config.run.seed, number - 1)
    # The order of Trainer._train_step.
    set_balance_factor(engine.module, compute_balance_factor(config, number))
    result = engine.train_step(batches, compute_learning_rate(config, number))
    update_expert_balance(engine.module, result.is_applied)
    checks = []
    if "batch_digest" in recorded:
        digest, expected = format_digest(compute_batch_digest(batches)), recorded["batch_digest"]
        checks.append(ReplayCheck(number, "tokens", expected, digest, digest == expected))
    for name, value in (("loss", result.loss), ("gradient_norm", result.gradient_norm)):
        if recorded.get(name) is not None:
            # Not equal: the original may have summed over other ranks.
            near = abs(value - recorded[name]) <= TOLERANCE[config.train.resolved_precision] * abs(
                recorded[name]
            )
            checks.append(ReplayCheck(number, name, recorded[name], value, near))
    return checks


def _compare_state_hash(engine: Engine, config: RunConfig, step: int) -> list[ReplayCheck]:
    """Compare the hash of the state after the step, where a checkpoint of it recorded one."""
    path = config.run.folder / "events.jsonl"
    events = [
        e for e in read_latest_events(path) if e["event"] == "state_hash" and e["step"] == step
    ]
    if not events:
        return []
    replayed, expected = hash_state(engine.get_state()), events[-1]["state_hash"]
    return [ReplayCheck(step, "state", expected, replayed, replayed == expected)]

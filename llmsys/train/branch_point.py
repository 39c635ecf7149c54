"""Continue a run in a new folder from one of its steps, with other settings: `train.branch_from:
RUN@STEP`.

Or begin a run at token 0 with the weights of another one: `train.init_from`. Reads a checkpoint of
the other run. The new run knows its parent: its checkpoints have the key `parent`, its events the
event `branch`.

Invariants:
- The token count continues. Step n of the new run is the step of its own batch size that begins at
  that token.
- With the same data, seed, sequence length and packing the data continue where the parent stopped;
  pairs with the same batch too. A branch with no change follows its parent bit for bit.
- Every setting that differs from the parent's is logged and recorded; nothing is taken over
  silently.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.batch import BatchConfig
from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.train.checkpoint_load import read_resumable_record
from llmsys.train.checkpoint_record import read_record
from llmsys.train.recorded_changes import set_recorded_changes
from llmsys.train.run_settings import format_changes
from llmsys.train.source_checkpoint import (
    TakenTensors,
    find_source_checkpoint,
    load_taken_tensors,
    select_tensors,
)
from llmsys.train.step_guard import StepGuard

SOURCES = re.compile(r"train\.(branch_from|init_from|grow_model) ")
DATA_KEYS = ("data_fingerprint", "seed", "mixture")

log = get_logger(__name__)


@dataclass(frozen=True)
class BranchPoint:
    """The step of a parent at which a new run begins.

    Attributes:
        checkpoint: Folder of the parent's checkpoint.
        record: Its record.
        steps: Steps of the new run that are done.
        tokens: Training tokens that are done.
        changes: Differences from the parent's settings.
        is_data_continued: False where the data have another order than the parent's.
        has_same_batch: Whether the new run has the parent's batch, and so continues its growth.
    """

    checkpoint: Path
    record: dict[str, Any]
    steps: int
    tokens: int
    changes: tuple[str, ...]
    is_data_continued: bool
    has_same_batch: bool = False

    @property
    def growth_record(self) -> dict[str, Any]:
        """The record whose doublings of the batch continue; empty for another batch."""
        return self.record if self.has_same_batch else {}


def find_branch_point(config: RunConfig, identity: dict[str, Any]) -> BranchPoint:
    """Find and check the step of the parent, before a model is built. Collective.

    Args:
        config: the config of the new run, with `train.branch_from`.
        identity: its settings and fingerprints.

    Returns:
        The branch point; its checkpoint is complete.

    Raises:
        CheckpointError: the step is missing, damaged or of another tokenizer, has weights alone,
            lies between two steps of the new run, or the new run has no step after it.
    """
    assert config.train.branch_from is not None
    fingerprint = identity["tokenizer_fingerprint"]
    checkpoint = find_source_checkpoint(config.train.branch_from, "train.branch_from", fingerprint)
    record = read_resumable_record(checkpoint)
    saved = record["run"]
    now = identity
    tokens = _count_parent_tokens(checkpoint, saved, record)
    has_same_batch = saved["batch"] == now["batch"]
    config = set_recorded_changes(config, record) if has_same_batch else config
    steps = _find_first_step(config, checkpoint, tokens, int(record["steps"]))
    changes = _list_changes(saved, now)
    # Windows are cut by these settings; steps of pairs are grouped by the whole batch.
    keys = ("sequence_length", "packing", "fill_in_middle", "window_order")
    # Rows that continue in the next step are the batch's.
    if not config.objective.uses_windows or now["batch"]["window_order"] != "shuffled":
        keys = tuple(now["batch"].keys() | set(keys))
    is_same_cut = all(saved["batch"].get(key) == now["batch"].get(key) for key in keys)
    has_same_data = all(saved.get(key) == now.get(key) for key in DATA_KEYS)
    is_continued = is_same_cut and (has_same_data or _is_parent_first_source(saved, now, tokens))
    return BranchPoint(checkpoint, record, steps, tokens, changes, is_continued, has_same_batch)


def _count_parent_tokens(checkpoint: Path, saved: dict[str, Any], record: dict[str, Any]) -> int:
    try:
        batch = {key: saved["batch"].get(key) for key in ("sequence_length", "tokens", "ramp")}
        if growth := record.get("batch_growth"):
            kept = {key: value for key, value in batch["ramp"].items() if key != "every_steps"}
            batch["ramp"] = kept | {"doubled_after_steps": growth["doubled_after_steps"]}
        return BatchConfig.model_validate(batch).count_tokens_before(int(record["steps"]))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(
            f"{checkpoint} does not record the batch that it was trained with, so its token count "
            f"is unknown. Start from its weights with train.init_from={checkpoint}."
        ) from None


def _find_first_step(config: RunConfig, checkpoint: Path, tokens: int, parent_steps: int) -> int:
    """Return the steps of the new run that have `tokens` tokens."""
    batch = config.batch
    size = config.batch.tokens_per_step
    steps = batch.count_steps_for(tokens)
    if batch.count_tokens_before(steps) != tokens:
        raise CheckpointError(
            f"{checkpoint} has {tokens} tokens after {parent_steps} steps, and no step of the new "
            f"run begins there: its steps have {size} tokens. Branch at a step whose tokens are a "
            f"multiple of {size}, or change batch."
        )
    if config.num_steps <= steps:
        raise CheckpointError(
            f"{checkpoint} has {tokens} tokens, and train.tokens={config.train.tokens} leaves no "
            f"step after it. Set train.tokens to the total of parent and branch, {tokens + size} "
            "or more."
        )
    return steps


def _is_parent_first_source(saved: dict[str, Any], now: dict[str, Any], tokens: int) -> bool:
    """Return whether the new run is a mixture that reads the parent's dataset alone until the
    branch.
    """
    stages = now.get("mixture")
    sources = now["data"]
    if not stages or "0" not in sources or saved["seed"] != now["seed"]:
        return False
    begins = sorted((int(start), weights) for start, weights in stages.items())
    before = [weights for start, weights in begins if start < tokens]
    is_alone = all(weights[0] and not any(weights[1:]) for weights in before)
    return is_alone and saved["data"].get("fingerprint") == sources["0"]["fingerprint"]


def load_branch(
    engine: Engine, point: BranchPoint, config: RunConfig, step_guard: StepGuard
) -> dict[str, Any]:
    """Fill an engine from the branch point. Collective.

    Args:
        engine: filled with weights, moments and buffers.
        point: from `find_branch_point`.
        config: the config of the new run.
        step_guard: filled with the skipped steps and accepted losses of the parent where steps have
            the same numbers.

    Returns:
        The parent, the changes and what was taken, for events and checkpoints.

    Raises:
        CheckpointError: a shape of the model differs and cannot grow.
    """
    taken = select_tensors(engine, point.checkpoint, config)
    reason = _find_reason_for_new_moments(point, config, complete=taken.has_all_parameters)
    updates = 0 if reason else int(point.record["updates"])
    load_taken_tensors(engine, point.checkpoint, taken, config, updates=updates)
    if point.steps == int(point.record["steps"]):
        step_guard.load_state_dict(point.record.get("step_guard", {}))
    order = (
        "continued" if point.is_data_continued else "in another order, from the same token count"
    )
    parent = _describe_parent(
        point, taken, moments=f"new: {reason}" if reason else "taken", order=order
    )
    log.info("branched from %s: %d tokens done, moments %s, data %s", *_get_shown(parent))
    for change in point.changes or ("nothing",):
        log.info("changed: %s", change)
    return parent


def load_initial_weights(
    engine: Engine, config: RunConfig, identity: dict[str, Any]
) -> dict[str, Any]:
    """Fill parameters and buffers by name from `train.init_from`, for a run from token 0.
    Collective.

    Args:
        engine: filled with the tensors that both models have.
        config: the config of the run.
        identity: its settings and fingerprints.

    Returns:
        The parent, as of a branch.

    Raises:
        CheckpointError: there is no complete checkpoint, no tensor in common, a shape differs, or
            the tokenizer does.
    """
    assert config.train.init_from is not None
    fingerprint = identity["tokenizer_fingerprint"]
    checkpoint = find_source_checkpoint(config.train.init_from, "train.init_from", fingerprint)
    taken = select_tensors(engine, checkpoint, config)
    # Moments belong to the old run: fine-tuning starts the optimizer anew.
    load_taken_tensors(engine, checkpoint, taken, config, updates=0)
    record = read_record(checkpoint)
    saved = record["run"]
    # A model that was imported has no settings of a training.
    changes = _list_changes(saved, identity) if "train" in saved else ()
    point = BranchPoint(checkpoint, record, 0, 0, changes, is_data_continued=False)
    return _describe_parent(
        point, taken, moments="new: train.init_from takes weights alone", order="from token 0"
    )


def _list_changes(saved: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    return tuple(change for change in format_changes(saved, now) if not SOURCES.match(change))


def _describe_parent(
    point: BranchPoint, taken: TakenTensors, *, moments: str, order: str
) -> dict[str, Any]:
    return {
        "run": str(point.checkpoint.parent.parent),
        "checkpoint": str(point.checkpoint),
        "parent_steps": int(point.record["steps"]),
        "tokens": point.tokens,
        "moments": moments,
        "data_order": order,
        "changes": list(point.changes),
        **taken.to_dict(),
    }


def _get_shown(parent: dict[str, Any]) -> tuple[Any, ...]:
    return parent["checkpoint"], parent["tokens"], parent["moments"], parent["data_order"]


def _find_reason_for_new_moments(point: BranchPoint, config: RunConfig, *, complete: bool) -> str:
    """Return why the optimizer starts anew; empty where the parent's moments fit."""
    theirs = point.record["run"]["optimizer"]
    ours = config.optimizer
    if theirs["kind"] != ours.kind:
        return f"optimizer.kind was {theirs['kind']}, now {ours.kind}"
    if (before := theirs.get("moments", "fp32")) != (now := getattr(ours, "moments", "fp32")):
        return f"optimizer.moments was {before}, now {now}"
    return "" if complete else "the model has other tensors"

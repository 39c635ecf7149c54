"""The composition root: from a RunConfig and joined ranks to a trainer, and from a checkpoint to a plain model.

The only place that knows every part. Each rank calls `run`; afterwards the run folder holds the trained model.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.loader import StepLoader
from llmsys.engine.engine import Engine
from llmsys.errors import CheckpointError, ConfigError
from llmsys.estimate.parameters import count_parameters
from llmsys.lock import folder_lock
from llmsys.log import EventWriter, logger
from llmsys.model.transformer import Transformer
from llmsys.parallel.apply import compile_blocks
from llmsys.parallel.group import device_of_this_rank, joined, on_rank_zero, rank, world_size
from llmsys.parallel.mesh import Meshes, make_meshes
from llmsys.shards import TokenShards
from llmsys.tokenizer import Tokenizer
from llmsys.train import checkpoint, folder
from llmsys.train.average import average_last
from llmsys.train.head_loss import training_loss
from llmsys.train.measure import Result
from llmsys.train.objective import evaluator_of, open_data, steps_of
from llmsys.train.start import take_weights
from llmsys.train.tracking import Trackers
from llmsys.train.trainer import Record, Trainer

log = logger(__name__)

LOCK_SECONDS = 30
"""How long a start waits for the run folder: ranks of a killed run need a moment to notice."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


Continue = Callable[[Transformer, Tokenizer, RunConfig], list[dict[str, str]]]
"""Continues the config's prompts with a model: what the room of generation offers, handed in from outside."""


def run(config: RunConfig, continue_prompts: Continue) -> Result:
    """Train to the end of the budget from wherever the run folder stands. Called by every rank of the launcher."""
    with joined(), contextlib.ExitStack() as stack:
        on_rank_zero(lambda: check(config, world_size()))
        on_rank_zero(lambda: str(stack.enter_context(folder_lock(config.run.folder, LOCK_SECONDS))))
        use_threads(config)
        trainer = build_trainer(config, stack, continue_prompts)
        result = trainer.train()
        if (count := config.checkpoint.average_last) > 1:
            on_rank_zero(lambda: str(average_last(config.run.folder, count)))
        return result


def check(config: RunConfig, ranks: int) -> str:
    """Refuse what cannot work before anything is built, on one rank, so that it is said once."""
    layout = config.layout.fit(ranks, config.model)
    steps_of(config, layout.data_ranks, 0)
    evaluator_of(config)
    return "checked"


def use_threads(config: RunConfig) -> None:
    """Share this machine's cores out over its processes, unless the config says a number."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.train.threads_per_process or max(1, (os.cpu_count() or 1) // local_processes))


def build_trainer(config: RunConfig, stack: contextlib.ExitStack, continue_prompts: Continue) -> Trainer:
    """Everything a trainer needs, resumed from the newest whole checkpoint. `stack` closes what was opened."""
    device = device_of_this_rank()
    train_shards, tokenizer = open_data(config, "train")
    layout = config.layout.fit(world_size(), config.model)
    steps = steps_of(config, layout.data_ranks, layout.data_rank(rank()))
    meshes = make_meshes(layout, device)
    engine = build_engine(config, meshes, steps.micro_batches, device)
    loader = StepLoader(steps)
    evaluator = evaluator_of(config)
    identity = run_identity(config, train_shards, tokenizer)
    resumed = _resume(engine, config, identity)
    if resumed is None and config.train.start_from is not None:
        take_weights(engine, config.train.start_from, identity)
    record = _start_record(config, stack, train_shards, device, resumed)

    def sample() -> list[dict[str, str]]:
        """All ranks continue the prompts in step, since they share the weights. Only a decoder continues."""
        return continue_prompts(engine.module, tokenizer, config) if config.model.family == "decoder" else []

    return Trainer(config, engine, loader, evaluator, record, identity, sample, steps_done=resumed or 0)


def build_model(config: RunConfig) -> Transformer:
    """The model without storage, its size checked against the estimate to the last parameter."""
    with torch.device("meta"):
        model = Transformer(config.model)
    built = sum(parameter.numel() for parameter in model.parameters())
    estimated = count_parameters(config.model).total
    if built != estimated:
        raise ConfigError(f"The model has {built} parameters, the estimate says {estimated}. This is a bug: report it.")
    return model


def build_engine(config: RunConfig, meshes: Meshes, micro_batches: int, device: torch.device) -> Engine:
    """The engine that the config names, with starting values, for steps of `micro_batches` on each rank."""
    common: dict[str, Any] = {
        "meshes": meshes,
        "optimizer": config.optimizer,
        "loss": training_loss(config.loss),
        "compute_dtype": DTYPES[config.train.precision],
        "seed": config.run.seed,
        "device": device,
    }
    model = build_model(config)
    if config.train.compile == "block":
        compile_blocks(model)
    if config.engine.kind == "deepspeed":
        from llmsys.engine.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, zero_stage=config.engine.zero_stage, micro_batches=micro_batches, **common)
    from llmsys.engine.torch_engine import TorchEngine

    return TorchEngine(model, **common)


def run_identity(config: RunConfig, shards: TokenShards, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a trajectory depends on; saved with each checkpoint and compared on resume."""
    fingerprints = {"data_fingerprint": shards.fingerprint, "tokenizer_fingerprint": tokenizer.fingerprint}
    return config.trajectory | fingerprints


def _resume(engine: Engine, config: RunConfig, identity: dict[str, Any]) -> int | None:
    """Load the newest whole checkpoint, if there is one, and return its step."""
    newest = checkpoint.newest_whole(config.run.folder / "checkpoints")
    if newest is None:
        return None
    saved = checkpoint.load(engine, newest)
    changes = differences(saved, identity)
    if changes:
        raise CheckpointError(
            f"{newest} was trained with other settings: {'; '.join(changes)}. A run follows one trajectory. "
            f"Put the settings back, or set run.folder to a new folder."
        )
    steps = engine.state().steps
    log.info("resuming from %s: %d of %d steps are done", newest, steps, config.steps)
    return steps


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Readable differences between two nested settings: `optimizer.learning_rate was 0.001, now 0.002`."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [line for key in keys for line in differences(saved.get(key), now.get(key), f"{path}.{key}".strip("."))]
    return [] if saved == now else [f"{path} was {saved}, now {now}"]


def _start_record(
    config: RunConfig, stack: contextlib.ExitStack, shards: TokenShards, device: torch.device, resumed: int | None
) -> Record:
    if rank() != 0:
        return Record(None, None)
    folder.record(config, shards.fingerprint, world_size())
    events = stack.enter_context(EventWriter(config.run.folder / "events.jsonl"))
    trackers = Trackers(config)
    stack.callback(trackers.finish)
    counts = count_parameters(config.model)
    events.write(
        "start",
        engine=config.engine.kind,
        world_size=world_size(),
        parameters=counts.total,
        parameters_active=counts.active.all,
        device=str(device),
        tokens_per_step=config.batch.tokens_per_step,
        steps=config.steps,
        resumed_from=resumed,
    )
    return Record(events, trackers)

"""The composition root: from a RunConfig and joined ranks to a trainer, and from a checkpoint to a plain model.

The only place that knows every part. Each rank calls `run`; afterwards the run folder holds the trained model.
"""

import contextlib
import os
from collections.abc import Callable
from functools import partial

import torch

from llmsys.config.run import RunConfig
from llmsys.data.loader import StepLoader
from llmsys.data.steps import Steps
from llmsys.estimate.parameters import count_parameters
from llmsys.events import EventWriter
from llmsys.lock import folder_lock
from llmsys.log import logger
from llmsys.model.transformer import Transformer
from llmsys.parallel.fp8 import require_fp8
from llmsys.parallel.group import TIMEOUT_SECONDS, device_of_this_rank, joined, on_rank_zero, rank, world_size
from llmsys.parallel.mesh import make_meshes
from llmsys.tokenizer import Tokenizer
from llmsys.train import folder
from llmsys.train.agree import agree
from llmsys.train.average import average_last
from llmsys.train.bitwise import announcement
from llmsys.train.blame import contents
from llmsys.train.build_engine import build_engine
from llmsys.train.dataset import Dataset, open_dataset
from llmsys.train.faults import StepJudge
from llmsys.train.forecast import write_forecast
from llmsys.train.measure import Result
from llmsys.train.metrics import meter_of, profile_of
from llmsys.train.micro import settle_micro
from llmsys.train.noise import noise_meter
from llmsys.train.objective import evaluator_of, steps_of
from llmsys.train.precision import resolve_precision
from llmsys.train.record import Record
from llmsys.train.resume import resume
from llmsys.train.saver import Saver
from llmsys.train.signals import StopWish
from llmsys.train.start import take_weights
from llmsys.train.tracking import Trackers
from llmsys.train.trainer import Trainer
from llmsys.train.watchdog import Watchdog

log = logger(__name__)

LOCK_SECONDS = 30
"""How long a start waits for the run folder: ranks of a killed run need a moment to notice."""

Continue = Callable[[Transformer, Tokenizer, RunConfig], list[dict[str, str]]]
"""Continues the config's prompts with a model: what the room of generation offers, handed in from outside."""


def run(config: RunConfig, continue_prompts: Continue) -> Result:
    """Train to the end of the budget from wherever the run folder stands. Called by every rank of the launcher."""
    with joined(collective_timeout(config)), contextlib.ExitStack() as stack:
        agree(config)
        on_rank_zero(lambda: check(config, world_size()))
        folder = config.run.folder
        on_rank_zero(lambda: str(stack.enter_context(folder_lock(folder, LOCK_SECONDS))))
        config = settle_micro(resolve_precision(config), device_of_this_rank())
        use_threads(config)
        trainer = build_trainer(config, stack, continue_prompts)
        result = trainer.train()
        if (count := config.checkpoint.average_last) > 1:
            on_rank_zero(lambda: str(average_last(config.run.folder, count)))
        return result


def collective_timeout(config: RunConfig) -> int:
    """How long a rank waits in one collective, in seconds: so long that the watchdog has named who is missing."""
    return max(TIMEOUT_SECONDS, round(2 * config.train.hang_timeout_seconds))


def check(config: RunConfig, ranks: int) -> str:
    """Refuse what cannot work before anything is built, on one rank, so that it is said once."""
    layout = config.fitted_layout(ranks)
    if config.train.products == "fp8":
        require_fp8(device_of_this_rank())
    steps_of(config, layout.data_ranks, 0)
    evaluator_of(config)
    profile_of(config, device_of_this_rank())
    return "checked"


def use_threads(config: RunConfig) -> None:
    """Share this machine's cores out over its processes, unless the config says a number."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.train.threads_per_process or max(1, (os.cpu_count() or 1) // local_processes))


def build_trainer(config: RunConfig, stack: contextlib.ExitStack, continue_prompts: Continue) -> Trainer:
    """Everything a trainer needs, resumed from the newest whole checkpoint. `stack` closes what was opened."""
    wish = StopWish(config.train.time_limit_minutes)
    stack.enter_context(wish.listening())
    watchdog = Watchdog(config.run.folder, config.train.hang_timeout_seconds)
    stack.callback(watchdog.close)
    device = device_of_this_rank()
    watchdog.beat(0, "opening the data")
    dataset = open_dataset(config, "train")
    layout = config.fitted_layout(world_size())
    steps = steps_of(config, layout.data_ranks, layout.data_rank(rank()))
    profile = profile_of(config, device)
    meter = meter_of(config, device, profile)
    meshes = make_meshes(layout, device)
    noise = noise_meter(config, steps, layout)
    watchdog.beat(0, "building the model")
    engine = build_engine(config, meshes, device, noise)
    watchdog.beat(0, "looking for a checkpoint")
    loader = StepLoader(steps, pinned=device.type == "cuda")
    evaluator = evaluator_of(config, layout.sequence_ranks)
    identity = config.trajectory | dataset.identity()
    judge = StepJudge(config.train)
    resumed = resume(engine, config, identity, judge)
    if resumed is None and config.train.start_from is not None:
        take_weights(engine, config.train.start_from, identity)
    watchdog.beat(resumed or 0, "preparing the first step")
    record = _start_record(config, stack, dataset, steps, device, resumed)
    write_forecast(record, resumed or 0, config, device, profile)

    def sample() -> list[dict[str, str]]:
        """All ranks continue the prompts in step, since they share the weights. Only a decoder continues."""
        return continue_prompts(engine.module, dataset.tokenizer, config) if config.model.family == "decoder" else []

    saver = Saver(config.run.folder / "checkpoints", config.checkpoint)
    stack.callback(saver.close)
    if resumed is not None:
        saver.trust(resumed)
    if config.checkpoint.mode == "async":
        saver.prepare(engine.state())
    inside = partial(contents, steps, dataset.sources)
    parts = (engine, loader, evaluator, record, identity, sample, saver, judge, wish, watchdog, inside, meter)
    return Trainer(config, *parts, noise=noise, steps_done=resumed or 0)


def _start_record(
    config: RunConfig,
    stack: contextlib.ExitStack,
    dataset: Dataset,
    steps: Steps,
    device: torch.device,
    resumed: int | None,
) -> Record:
    if rank() != 0:
        return Record(None, None)
    folder.record(config, dataset.fingerprint, world_size())
    events = stack.enter_context(EventWriter(config.run.folder / "events.jsonl"))
    if config.train.reproducibility == "bitwise":
        log.info(announcement(config, steps.micro_batches(0) * world_size(), device.type))
    trackers = Trackers(config)
    stack.callback(trackers.finish)
    counts = count_parameters(config.model)
    events.write(
        "start",
        engine=config.engine.kind,
        reproducibility=config.train.reproducibility,
        precision=config.train.resolved_precision,
        world_size=world_size(),
        parameters=counts.total,
        parameters_active=counts.active.all,
        device=str(device),
        tokens_per_step=config.batch.tokens_per_step,
        steps=config.steps,
        resumed_from=resumed,
        data=dataset.identity()["data"],
        packing=steps.packing(),
    )
    return Record(events, trackers)

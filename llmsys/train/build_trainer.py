"""Build a trainer from a config on joined ranks, and run it. The composition root of training.

Reads the datasets and the run folder; writes checkpoints, events and the run record into the run
folder.

Invariants:
- Every rank calls `train_run`; one process at a time holds the lock of the run folder.
- A config that cannot work is rejected before a model is built.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmsys.config.export.exported_model import build_export_promise
from llmsys.config.run import RunConfig
from llmsys.data.dataloader import StepLoader
from llmsys.data.step_batches import StepBatches
from llmsys.dataset.loss_parts import truncate_loss_parts
from llmsys.engine.engine import Engine
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.pipeline_stages import cut_layers
from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.model import initialization
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import DeviceMeshes, build_device_meshes
from llmsys.parallel.device_setup import (
    bind_to_near_processors,
    trim_allocator,
    warn_about_unused_gpus,
)
from llmsys.parallel.fp8 import require_fp8
from llmsys.parallel.process_group import (
    TIMEOUT_SECONDS,
    get_local_device,
    get_rank,
    get_world_size,
    init_process_group,
    run_on_rank_zero,
)
from llmsys.train import run_folder
from llmsys.train.auto_data_parallel import resolve_data_parallel
from llmsys.train.auto_micro_batch import resolve_micro_sequences
from llmsys.train.batch_growth import BatchGrowth
from llmsys.train.branch_point import (
    BranchPoint,
    find_branch_point,
    load_branch,
    load_initial_weights,
)
from llmsys.train.budget_fit import BudgetFit
from llmsys.train.build_engine import build_engine
from llmsys.train.build_objective import build_evaluator, build_step_batches
from llmsys.train.checkpoint_average import average_checkpoints, require_enough_saves
from llmsys.train.checkpoint_record import read_record
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.consistency_check import ConsistencyCheck
from llmsys.train.corruption_check import build_corruption_check, require_comparable_gradients
from llmsys.train.evaluator import EvaluationResult, RowRanks
from llmsys.train.gradient_noise_scale import build_noise_scale_meter
from llmsys.train.initial_state import find_resume_point, resume_from_checkpoint
from llmsys.train.loss_recorder import DocumentLossRecorder
from llmsys.train.metric_logger import MetricLogger, Trackers
from llmsys.train.norm_meter import NormMeter
from llmsys.train.precision import resolve_compile, resolve_precision, set_matmul_numerics
from llmsys.train.recorded_changes import read_changes_record, set_recorded_changes
from llmsys.train.remote_run import lock_run
from llmsys.train.run_checks import format_bitwise_notice, require_rank_agreement
from llmsys.train.run_data import RunData, count_evaluated_tokens, open_run_data
from llmsys.train.run_prediction import write_prediction
from llmsys.train.save_timer import SaveTimer
from llmsys.train.shared_dataset import share_dataset_files
from llmsys.train.step_guard import StepGuard, describe_step_contents
from llmsys.train.step_metrics import (
    build_step_meter,
    find_device_profile,
    reset_peak_memory,
)
from llmsys.train.step_profiler import StepProfiler
from llmsys.train.stop_request import StopRequest
from llmsys.train.trainer import Trainer
from llmsys.train.trainer_components import (
    Checkpointing,
    Evaluation,
    Observability,
    RunControl,
    TrainingData,
)
from llmsys.train.watchdog import Watchdog
from llmsys.vocabulary.tokenizer import Tokenizer

log = get_logger(__name__)

# Seconds to wait for the lock of the run folder: ranks of a killed run need a moment to exit.
LOCK_SECONDS = 30

# Completes the prompts of a config with a model. Passed in, because `generate` is a layer above
# `train`.
PromptCompleter = Callable[[Transformer, Tokenizer, RunConfig], list[dict[str, str]]]


def train_run(config: RunConfig, complete_prompts: PromptCompleter) -> EvaluationResult:
    """Train until the end of the budget, from the newest checkpoint of the run folder. Collective.

    Args:
        config: the config of the run.
        complete_prompts: returns {prompt, text} for each of `generation.prompts`.

    Returns:
        The final evaluation.

    Raises:
        StopRequested: the run was asked to stop; its state is saved.
        LlmsysError: the config, the data or a checkpoint cannot be used, or training cannot
            continue.
    """
    bind_to_near_processors(get_local_device())
    with init_process_group(compute_collective_timeout(config)), contextlib.ExitStack() as stack:
        if get_rank() == 0:
            warn_about_unused_gpus(get_local_device())
        require_rank_agreement(config)
        run_on_rank_zero(lambda: check_config(config, get_world_size()))
        folder = config.run.folder
        run_on_rank_zero(lambda: str(stack.enter_context(lock_run(folder, LOCK_SECONDS))))
        # Precision first: the memory of a micro-batch depends on it.
        config = resolve_compile(resolve_precision(config))
        config = resolve_data_parallel(config, get_local_device())
        config = resolve_micro_sequences(config, get_local_device())
        set_num_threads(config)
        set_matmul_numerics()
        with share_dataset_files(config):
            trainer = build_trainer(config, stack, complete_prompts)
        result = trainer.train()
        if (count := config.checkpoint.average_last) > 1:
            run_on_rank_zero(lambda: str(average_checkpoints(config.run.folder, count)))
        return result


def compute_collective_timeout(config: RunConfig) -> int:
    """Return the timeout of one collective in seconds, so long that the watchdog names the
    missing rank first.
    """
    return max(TIMEOUT_SECONDS, round(2 * config.train.hang_timeout_seconds))


def check_config(config: RunConfig, ranks: int) -> str:
    """Check that a config works on this machine, before a model is built. For one rank.

    Args:
        config: the config of the run.
        ranks: number of ranks.

    Returns:
        A fixed string, for `run_on_rank_zero`.

    Raises:
        LlmsysError: the layout, the data, the device or a task of evaluation does not fit.
    """
    layout = config.resolve_layout(ranks)
    for key in ("matmul_dtype", "expert_matmul_dtype"):
        if (recipe := getattr(config.train, key)) != "compute":
            require_fp8(get_local_device(), recipe, f"train.{key}")
    require_enough_saves(config)
    if config.train.corruption_check_every_steps:
        require_comparable_gradients(config, get_local_device())
    build_step_batches(config, layout.data_parallel_size, 0)
    build_evaluator(config)
    find_device_profile(config, get_local_device())
    return "checked"


def set_num_threads(config: RunConfig) -> None:
    """Divide the cores of this machine among its ranks.

    Args:
        config: `train.threads_per_process` overrides the number of threads.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(
        config.train.threads_per_process or max(1, (os.cpu_count() or 1) // processes)
    )


def build_trainer(
    config: RunConfig, stack: contextlib.ExitStack, complete_prompts: PromptCompleter
) -> Trainer:
    """Build a trainer, resumed from the newest complete checkpoint of the run folder. Collective.

    Args:
        config: the config with precision and micro-batch size resolved.
        stack: closes the files, threads and signal handlers that are opened here.
        complete_prompts: see `train_run`.

    Returns:
        The trainer, at the step that the checkpoint was saved at; at step 0 without one.
    """
    control = _build_control(config, stack)
    report_phase = control.watchdog.report_phase
    report_phase(0, "opening the data")
    device = get_local_device()
    layout = config.resolve_layout(get_world_size())
    dataset = open_run_data(config, "train")
    profile = find_device_profile(config, device)
    step_meter = build_step_meter(config, device, profile)
    meshes = build_device_meshes(layout, device)
    report_phase(0, "looking for a checkpoint")
    newest = find_resume_point(config)
    identity = config.trajectory_settings | dataset.to_identity()
    branch = (
        find_branch_point(config, identity) if newest is None and config.train.branch_from else None
    )
    config = set_recorded_changes(
        config, record := read_changes_record(newest, branch.growth_record if branch else None)
    )
    control.budget_fit = BudgetFit(config.train.fit_minutes, count_evaluated_tokens(config), record)
    place = layout.data_parallel_size, layout.get_data_rank(get_rank())
    steps = build_step_batches(config, *place)
    growth = control.batch_growth = BatchGrowth(
        build_noise_scale_meter(config, steps, layout), record
    )
    report_phase(0, "building the model")
    options: dict[str, Any] = {
        "initialize": newest is None,
        "report_pass": control.watchdog.report_work,
    }
    engine = build_engine(config, meshes, device, growth.meter, **options)
    report_phase(0, "loading the checkpoint")
    evaluator = build_evaluator(config, RowRanks(layout.sequence_parallel_size, layout.pipeline))
    start = _load_state(engine, newest, branch, config, identity, control.step_guard)
    report_phase(start.steps, "preparing the first step")
    metric_logger = _build_metric_logger(config, stack, dataset, steps, device, start.resumed)
    if start.resumed is None and start.parent is not None:
        metric_logger.log_event("branch", start.steps, **start.parent)
    trim_allocator(device)  # of initial values and of what a checkpoint was read into
    write_prediction(metric_logger, start.steps, config, device, profile)
    reset_peak_memory(device)  # what was predicted, and is compared with the peak, are steps
    profiler = StepProfiler(config.train.profile, config.run.folder, get_rank(), device)
    stack.enter_context(profiler.handle_signal())
    check = build_corruption_check(config, engine, layout)
    norm_meter = NormMeter(every, engine) if (every := config.train.norms_every_steps) else None
    consistency = _build_consistency_check(config, engine, meshes)
    recorder = _build_loss_recorder(config, dataset, start.steps)
    loader = StepLoader(steps, pinned=device.type == "cuda")

    def sample_prompts() -> list[dict[str, str]]:
        # Collective: sharded weights are gathered in every forward pass. Only a decoder continues
        # text.
        return (
            complete_prompts(engine.module, dataset.tokenizer, config)
            if config.model.family == "decoder"
            else []
        )

    return Trainer(
        config=config,
        engine=engine,
        data=TrainingData(
            loader=loader,
            describe_step=lambda step: describe_step_contents(loader.source, dataset.sources, step),
            build_steps=lambda changed: build_step_batches(changed, *place),
            has_own_rows=layout.has_own_rows(get_rank()),
        ),
        evaluation=Evaluation(evaluator, sample_prompts),
        checkpointing=_build_checkpointing(config, stack, engine, start, identity),
        control=control,
        observability=Observability(
            metric_logger,
            step_meter,
            growth.meter,
            profiler,
            norm_meter,
            check,
            consistency,
            recorder,
        ),
        steps_done=start.steps,
        is_resumed=start.resumed is not None,
    )


class StartState(NamedTuple):
    """The steps done, the step of the checkpoint that was resumed, and the run whose weights
    were taken.
    """

    steps: int
    resumed: int | None = None
    parent: dict[str, Any] | None = None


def _load_state(
    engine: Engine,
    newest: Path | None,
    branch: BranchPoint | None,
    config: RunConfig,
    identity: dict[str, Any],
    step_guard: StepGuard,
) -> StartState:
    """Fill the engine from the run's checkpoint, else from the run that it starts from.
    Collective.
    """
    if newest is not None:
        steps = resume_from_checkpoint(engine, newest, config, identity, step_guard)
        return StartState(steps, resumed=steps, parent=read_record(newest).get("parent"))
    if branch is not None:
        return StartState(branch.steps, parent=load_branch(engine, branch, config, step_guard))
    if config.train.init_from is not None:
        return StartState(0, parent=load_initial_weights(engine, config, identity))
    return StartState(0)


def _build_consistency_check(
    config: RunConfig, engine: Engine, meshes: DeviceMeshes
) -> ConsistencyCheck | None:
    """Return the checks of `train.consistency_check_every_steps`, or None where it is 0.
    Collective.
    """
    if not config.train.consistency_check_every_steps:
        return None
    layout = meshes.layout
    cut = (
        cut_layers(config.model, layout, config.batch.sequence_length)
        if layout.pipeline > 1
        else None
    )
    return ConsistencyCheck(
        config.train.consistency_check_every_steps,
        engine.module,
        layout=layout,
        device=engine.device,
        cut=cut,
        expert_rank=0 if meshes.expert is None else meshes.expert.get_local_rank(),
    )


def _build_loss_recorder(
    config: RunConfig, dataset: RunData, steps: int
) -> DocumentLossRecorder | None:
    """Return the recorder of losses by document, or None where they are not recorded."""
    place = get_rank(), get_world_size()
    # Also without a recorder: the steps that follow are not those of an earlier attempt.
    truncate_loss_parts(config.run.folder, steps, *place)
    if not config.train.record_document_losses:
        return None
    fingerprints = [source.fingerprint for source in dataset.sources]
    return DocumentLossRecorder(config.run.folder, *place, fingerprints)


def _build_control(config: RunConfig, stack: contextlib.ExitStack) -> RunControl:
    stop_request = StopRequest(config.train.time_limit_minutes)
    stack.enter_context(stop_request.handle_signals())
    watchdog = Watchdog(config.run.folder, config.train.hang_timeout_seconds)
    stack.callback(watchdog.close)
    return RunControl(StepGuard(config.train), stop_request, watchdog)


def _build_checkpointing(
    config: RunConfig,
    stack: contextlib.ExitStack,
    engine: Engine,
    start: StartState,
    identity: dict[str, Any],
) -> Checkpointing:
    saver = CheckpointSaver(config.run.folder / "checkpoints", config.checkpoint)
    stack.callback(saver.close_quietly)
    if start.resumed is not None:
        saver.mark_verified(start.resumed)  # find_resume_point has read every byte
    if config.checkpoint.mode == "async":
        saver.allocate_buffers(engine.get_state())
    return Checkpointing(saver, identity, start.parent, SaveTimer(config.checkpoint.every_minutes))


def _build_metric_logger(
    config: RunConfig,
    stack: contextlib.ExitStack,
    dataset: RunData,
    steps: StepBatches,
    device: torch.device,
    resumed: int | None,
) -> MetricLogger:
    if get_rank() != 0:
        return MetricLogger(None, None)
    run_folder.write_run_record(config, dataset.fingerprint, get_world_size())
    events = stack.enter_context(EventWriter(config.run.folder / "events.jsonl"))
    if config.train.reproducibility == "bitwise":
        micro_batches = (
            steps.count_micro_batches(0)
            * config.resolve_layout(get_world_size()).data_parallel_size
        )
        log.info(format_bitwise_notice(config, micro_batches, device.type))
    log.info(build_export_promise(config).line)
    if config.batch.packing != "concatenate":
        log.info("packing per epoch: %s", steps.get_packing_stats())
    trackers = Trackers(config)
    stack.callback(trackers.finish)
    counts = count_parameters(config.model)
    events.write(
        "start",
        engine=config.engine.kind,
        reproducibility=config.train.reproducibility,
        precision=config.train.resolved_precision,
        world_size=get_world_size(),
        parameters=counts.total,
        parameters_active=counts.active.all,
        device=str(device),
        tokens_per_step=config.batch.tokens_per_step,
        steps=config.num_steps,
        resumed_from=resumed,
        init=initialization.VERSION,
        data=dataset.to_identity()["data"],
        packing=steps.get_packing_stats(),
    )
    return MetricLogger(events, trackers)

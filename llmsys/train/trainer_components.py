"""Groups of objects that a `Trainer` uses: data, evaluation, checkpointing, control and
observability.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch, compute_batch_digest, format_digest
from llmsys.data.dataloader import StepLoader
from llmsys.data.step_batches import StepBatches
from llmsys.engine.engine import Engine, EngineState, StepResult
from llmsys.errors import CheckpointError
from llmsys.parallel.process_group import all_reduce_sum
from llmsys.train import checkpoint_load
from llmsys.train.batch_growth import BatchGrowth
from llmsys.train.budget_fit import BudgetFit
from llmsys.train.checkpoint_record import read_record
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.consistency_check import ConsistencyCheck
from llmsys.train.corruption_check import CorruptionCheck
from llmsys.train.evaluator import Evaluator
from llmsys.train.expert_load import ExpertLoad
from llmsys.train.gradient_noise_scale import NoiseScaleMeter
from llmsys.train.loss_recorder import DocumentLossRecorder
from llmsys.train.metric_logger import MetricLogger
from llmsys.train.norm_meter import NormMeter
from llmsys.train.save_timer import SaveTimer
from llmsys.train.step_guard import StepGuard
from llmsys.train.step_metrics import StepMeter
from llmsys.train.step_profiler import StepProfiler
from llmsys.train.stop_request import StopRequest
from llmsys.train.watchdog import Watchdog


@dataclass
class TrainingData:
    """The micro-batches of this rank, and the contents of each step.

    Attributes:
        loader: yields (step, micro-batches), steps counted from 0.
        describe_step: returns the sequences and documents of a step over all ranks, for the record
            of a skipped step.
        build_steps: builds the micro-batches of this rank for a config with other steps.
        has_own_rows: whether this rank counts for those that hold the same rows.
    """

    loader: StepLoader
    describe_step: Callable[[int], dict[str, Any]]
    build_steps: Callable[[RunConfig], StepBatches]
    has_own_rows: bool = True

    def hash_batches(self, batches: list[Batch], device: torch.device) -> str:
        """Hash the tokens and targets of a step over all ranks. Collective.

        Args:
            batches: Micro-batches of this rank.
            device: Device of this rank.

        Returns:
            The digest, the same for every assignment of rows to ranks; `llmsys replay` compares
            it.
        """
        # Ranks that hold the same rows count once.
        own = compute_batch_digest(batches) if self.has_own_rows else 0
        total = all_reduce_sum(torch.tensor(own, dtype=torch.int64, device=device))  # modulo 2^64
        return format_digest(int(total))


@dataclass
class Evaluation:
    """The evaluator of held-out data, and the prompts that are completed at the end of a run.

    Attributes:
        evaluator: evaluates the engine every `evaluation.every_steps` and at the end.
        sample_prompts: returns {prompt, text} for each of `generation.prompts`. Collective.
    """

    evaluator: Evaluator
    sample_prompts: Callable[[], list[dict[str, str]]]


@dataclass
class Checkpointing:
    """The saver of checkpoints, and the identity of the run that every checkpoint records.

    Attributes:
        saver: writes checkpoints at once or in the background.
        run_state: settings and fingerprints that a resumed run must share.
        parent: the step of another run that this one branched from, see branch_point.py; None for a
            run of its own.
        timer: says when a checkpoint is due by the clock.
    """

    saver: CheckpointSaver
    run_state: dict[str, Any]
    parent: dict[str, Any] | None = None
    timer: SaveTimer = field(default_factory=SaveTimer)

    def save_state(self, state: EngineState, steps_done: int, **record: Any) -> None:
        """Save the training state. Collective.

        Args:
            state: weights and moments of the engine.
            steps_done: steps of the run so far.
            record: further values of `state.json`.
        """
        parent = {} if self.parent is None else {"parent": self.parent}
        self.saver.save_state(state, steps_done, self.run_state, **parent, **record)
        self.timer.restart()  # after it: a slow write must not make the next one due

    def rewind(self, engine: Engine, step_guard: StepGuard, step: int) -> dict[str, Any]:
        """Load the newest complete checkpoint after a step was skipped. Collective.

        Steps that were skipped since it was saved stay skipped.

        Args:
            engine: The engine.
            step_guard: Knows the skipped steps.
            step: The step that was skipped.

        Returns:
            The record of the checkpoint.

        Raises:
            CheckpointError: No checkpoint is complete.
        """
        self.saver.wait_for_save()
        newest = checkpoint_load.find_newest_checkpoint(self.saver.folder)
        if newest is None:
            raise CheckpointError(
                f"step {step} was bad, and there is no complete checkpoint to rewind to."
            )
        checkpoint_load.load_checkpoint(engine, newest)
        record = read_record(newest)
        step_guard.load_state_dict(record.get("step_guard", {}), known=step_guard.skipped_steps)
        return record


@dataclass
class RunControl:
    """Objects that change the course of a run: step guard, stop request, watchdog, the growth of
    its batch and the fit of its budget.
    """

    step_guard: StepGuard
    stop_request: StopRequest
    watchdog: Watchdog
    batch_growth: BatchGrowth = field(default_factory=BatchGrowth)
    budget_fit: BudgetFit = field(default_factory=BudgetFit)


@dataclass
class Observability:
    """The event log and trackers, the meter of step time and memory, and those of what was asked
    for.
    """

    metric_logger: MetricLogger
    step_meter: StepMeter
    noise_scale_meter: NoiseScaleMeter | None = None
    profiler: StepProfiler | None = None
    norm_meter: NormMeter | None = None
    corruption_check: CorruptionCheck | None = None
    consistency_check: ConsistencyCheck | None = None
    loss_recorder: DocumentLossRecorder | None = None

    def record_profile(self, number: int) -> AbstractContextManager[None]:
        """Return a context that records step `number`, counted from 1, where it was chosen."""
        return nullcontext() if self.profiler is None else self.profiler.record_step(number)

    def begin_step(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of step `step`, counted from 0, in the order in which they
        are trained on.
        """
        if self.corruption_check is not None:
            self.corruption_check.begin_step(step)
        if self.norm_meter is not None:
            self.norm_meter.begin_step(step + 1)
        if self.loss_recorder is not None:
            self.loss_recorder.begin_step(step, batches)
        return (
            batches
            if self.noise_scale_meter is None
            else self.noise_scale_meter.begin_step(step, batches)
        )

    def end_step(self, result: StepResult) -> None:
        """Update the gradient noise scale with the result of a step, and record its losses by
        document.
        """
        if self.loss_recorder is not None:
            self.loss_recorder.end_step(result)
        if self.noise_scale_meter is not None:
            self.noise_scale_meter.end_step(result)

    def flush_records(self) -> None:
        """Write what is recorded of each step, before a checkpoint is saved."""
        if self.loss_recorder is not None:
            self.loss_recorder.flush()

    def rewind_records(self, steps: int) -> None:
        """Drop what is recorded of the steps after a checkpoint that the run has returned to."""
        if self.loss_recorder is not None:
            self.loss_recorder.rewind(steps)

    def compare_gradients(self, number: int) -> None:
        """Compare the gradients of step `number`, counted from 1, with those of their repetition,
        if it is checked.

        Raises:
            LlmsysError: they differ; no weight has changed.
        """
        if (
            self.corruption_check is not None
            and (found := self.corruption_check.end_step()) is not None
        ):
            self.metric_logger.log_event("corruption_check", number, **found)

    def check_consistency(
        self, number: int, absent: tuple[str, ...], experts: ExpertLoad, *, is_logged: bool
    ) -> None:
        """Check that parameters had gradients, on logged steps, and that replicas are equal.
        Collective.

        Args:
            number: The step, counted from 1.
            absent: `StepResult.absent` of the step.
            experts: Its load of the experts.
            is_logged: Whether the step is logged.

        Raises:
            LlmsysError: See `ConsistencyCheck`.
        """
        if self.consistency_check is None:
            return
        if is_logged and (idle := self.consistency_check.check_gradients(number, absent, experts)):
            self.metric_logger.log_event("idle_parameters", number, names=idle)
        self.consistency_check.check_replicas(number)

    def log_measurements(self, number: int, tokens_done: int) -> None:
        """Log what step `number` was measured for: a `profile` event, and a `norms` event.
        Collective.
        """
        if self.profiler is not None and (summary := self.profiler.pop_summary()) is not None:
            self.metric_logger.log_event("profile", number, **summary)
        if self.norm_meter is not None and (norms := self.norm_meter.end_step()) is not None:
            self.metric_logger.log_event("norms", number, tokens=tokens_done, **norms)

    def format_progress(self, batch_tokens: int) -> dict[str, str]:
        """Return what the progress line shows besides speed and loss: utilisation, memory and
        the noise scale.
        """
        meter = self.noise_scale_meter
        return self.step_meter.details | (
            {} if meter is None else meter.format_noise_scale(batch_tokens)
        )

    def log_step(
        self,
        number: int,
        result: StepResult,
        *,
        learning_rate: float,
        tokens_done: int,
        batch_tokens: int,
        seconds: float,
        wait_seconds: float,
        **fields: Any,
    ) -> None:
        """Log a `step` event. Collective.

        Args:
            number: the step, counted from 1.
            result: its loss and gradient norm over all ranks.
            learning_rate: the rate it was trained with.
            tokens_done: tokens of the run up to and including this step.
            batch_tokens: tokens of this step.
            seconds: seconds of the step on this rank, without the wait for data.
            wait_seconds: seconds this rank waited for the data.
            fields: further fields of the event.
        """
        noise = {} if self.noise_scale_meter is None else self.noise_scale_meter.scale.to_dict()
        self.metric_logger.log_event(
            "step",
            number,
            tokens=tokens_done,
            loss=result.loss,
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            batch_tokens=batch_tokens,
            **self.step_meter.compute_step_metrics(
                batch_tokens, seconds + wait_seconds, wait_seconds
            ),
            **fields,
            **noise,
        )

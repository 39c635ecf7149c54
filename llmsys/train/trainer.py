"""The training loop: read the micro-batches of a step, train, log, evaluate, save.

Every object it uses is built by `build_trainer.py`. Nothing here depends on an engine, a mesh or a
file format.

Invariants:
- Steps are counted from 1 in events and checkpoints; step `n` reads the data of index `n - 1`.
- All ranks take the same decision after each step: skip, save, stop or rewind.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine, StepResult
from llmsys.errors import StopRequested
from llmsys.log import get_logger
from llmsys.optim.lr_schedule import compute_balance_factor, compute_learning_rate
from llmsys.parallel.device_setup import trim_allocator
from llmsys.parallel.process_group import all_gather_object
from llmsys.progress import Progress
from llmsys.train.dropout_seed import seed_dropout
from llmsys.train.evaluator import EvaluationResult
from llmsys.train.expert_load import (
    ExpertLoad,
    measure_heldout_next_sentence,
    measure_indexer_loss,
    measure_mean_depth,
    measure_next_sentence,
    set_balance_factor,
    update_expert_balance,
)
from llmsys.train.recorded_changes import set_recorded_changes
from llmsys.train.run_checks import hash_state_if_bitwise
from llmsys.train.trainer_components import (
    Checkpointing,
    Evaluation,
    Observability,
    RunControl,
    TrainingData,
)

log = get_logger(__name__)


@dataclass(kw_only=True)
class Trainer:
    """A run from the step after `steps_done` to the end of its budget.

    Attributes:
        config: the resolved config of the run.
        engine: owner of the model, the optimizer and their state.
        data: micro-batches of this rank.
        evaluation: evaluator of held-out data.
        checkpointing: saver of checkpoints.
        control: step guard, stop request and watchdog.
        observability: events, trackers and meters.
        steps_done: steps before the first one to train; the step of the checkpoint that was resumed
            or branched from.
        is_resumed: whether the run folder has the checkpoint of that step.
        has_trained: whether this process has taken a step.
    """

    config: RunConfig
    engine: Engine
    data: TrainingData
    evaluation: Evaluation
    checkpointing: Checkpointing
    control: RunControl
    observability: Observability
    steps_done: int = 0
    is_resumed: bool = False
    has_trained: bool = False

    def train(self) -> EvaluationResult:
        """Train to the end of the budget and return the final evaluation. Collective.

        Raises:
            StopRequested: a rank was asked to stop; the state is saved.
            LlmsysError: steps were skipped that `train.on_bad_step` does not allow to skip.
        """
        began = time.perf_counter()
        if self.config.train.on_bad_step == "rewind" and not self.is_resumed:
            self._save_checkpoint()  # a rewind from the first step needs a checkpoint to return to
        self.control.budget_fit.begin(self.config, self.steps_done)
        with Progress("train", self._total_tokens, "tok", done=self.tokens_done) as progress:
            while self.steps_done < self.config.num_steps:
                self._train_until_restart(progress)
        self._finish_saves()
        self._log_measurements()
        final = self._evaluate()
        self.control.watchdog.close()  # ranks no longer advance in step from here on
        samples = self.evaluation.sample_prompts()
        self._log_event("samples", samples=samples)
        self._log_event("finish", tokens=self.tokens_done, seconds=time.perf_counter() - began)
        return final

    @property
    def tokens_done(self) -> int:
        """Tokens trained on so far."""
        return self.config.batch.count_tokens_before(self.steps_done)

    @property
    def _total_tokens(self) -> int:
        """Tokens of the whole run, in whole steps."""
        return self.config.batch.count_tokens_before(self.config.num_steps)

    def _train_until_restart(self, progress: Progress) -> None:
        """Train until the last step, or until the loader must start again: after a rewind, for a
        larger batch, or for another budget.
        """
        for step, batches in self.data.loader.iter_steps(self.steps_done, self.config.num_steps):
            is_stop_requested = False
            if step + 1 in self.control.step_guard.skipped_steps:
                self.steps_done = step + 1
            else:
                is_stop_requested = self._train_step(step, batches, progress)
            # After a rewind the loader begins again, at an earlier step.
            if self.steps_done != step + 1:
                return
            changes = self._grow_batch(), self._fit_budget()
            self._handle_step_end(is_stop_requested)
            if any(changes):
                progress.change_total(self._total_tokens)
                return

    def _grow_batch(self) -> bool:
        """Double the batch from the next step on where the noise scale asks for it. Collective."""
        if (
            grown := self.control.batch_growth.find_growth(self.config, self.steps_done)
        ) is not None:
            self._set_config(grown)
            self._log_event(
                "batch_growth", **self.control.batch_growth.describe(grown, self.steps_done)
            )
        return grown is not None

    def _fit_budget(self) -> bool:
        """Plan the tokens anew where `train.fit_minutes` asks for it. Collective."""
        fit, saves = self.control.budget_fit, self.control.stop_request.longest_save_seconds
        if (fitted := fit.find_budget(self.config, self.steps_done, saves)) is not None:
            self._set_config(fitted)
            self._log_event("budget", **fit.describe(fitted, self.steps_done))
        return fitted is not None

    def _set_config(self, config: RunConfig) -> None:
        if config.batch is not self.config.batch:  # steps have other sizes
            self.data.loader.source = self.data.build_steps(config)
        self.config = self.observability.step_meter.config = config

    def _train_step(self, step: int, batches: list[Batch], progress: Progress) -> bool:
        """Train on one step, counted from 0, and return whether any rank was asked to stop.
        Collective.
        """
        config = self.config
        number = step + 1
        guard = self.control.step_guard
        self.control.watchdog.report_phase(number, "forward and backward")
        began = time.perf_counter()
        rate = compute_learning_rate(config, number)
        if config.factors.balance:
            set_balance_factor(self.engine.module, compute_balance_factor(config, number))
        batches = self.observability.begin_step(step, batches)
        seed_dropout(config.run.seed, step)
        guard.problem = ""  # of the previous step: the guard is not asked when gradients overflow
        flags = self.control.stop_request.to_flag(), self.checkpointing.timer.to_flag()
        with self.observability.record_profile(number):
            result = self.engine.train_step(batches, rate, self._accept_step, flags)
        self.observability.end_step(result)
        # After a skipped step too: it resets the counts, and is collective.
        experts = update_expert_balance(self.engine.module, result.is_applied)
        module = self.engine.module
        measured = measure_mean_depth(module) | measure_next_sentence(module)
        measured |= measure_indexer_loss(module)
        self.steps_done = number
        seconds = time.perf_counter() - began
        self.observability.step_meter.record_step(number, seconds)
        if not self.has_trained:
            trim_allocator(self.engine.device)  # compiled kernels have been tuned
            self.has_trained = True
        batch_tokens = config.batch.get_step_tokens(step)
        shown = self.observability.format_progress(batch_tokens)
        progress.advance(batch_tokens, step=number, loss=f"{result.loss:.3f}", **shown)
        is_logged = number % config.train.log_every_steps == 0 or number in (1, config.num_steps)
        if is_logged:
            self._log_step(batches, result, rate, seconds, experts, measured)
        self.observability.check_consistency(number, result.absent, experts, is_logged=is_logged)
        self.observability.log_measurements(number, self.tokens_done)
        if result.is_applied:
            guard.record_accepted(number, result)
        else:
            self._handle_skipped_step(number, result, progress)
        # The sums of the flags of all ranks.
        stops, saves = result.extras
        self.checkpointing.timer.is_due = saves > 0
        return stops > 0

    def _accept_step(self, loss: float, gradient_norm: float) -> bool:
        """Ask the step guard. The engine changes its state after this call, so a copy for a save
        must be complete.
        """
        self.checkpointing.saver.wait_for_copy()
        self.observability.compare_gradients(self.steps_done + 1)
        return self.control.step_guard.accept_step(loss, gradient_norm)

    def _handle_step_end(self, is_stop_requested: bool) -> None:
        """Evaluate, save or stop where that is due after a step. Collective."""
        config = self.config
        is_last = self.steps_done == self.config.num_steps
        evaluated: EvaluationResult | None = None
        if self._is_due(config.evaluation.every_steps) and not is_last:
            evaluated = self._evaluate()
        is_save_due = self._is_due(config.checkpoint.every_steps) or self.checkpointing.timer.is_due
        if is_save_due or is_last or is_stop_requested:
            self._save_checkpoint(evaluated)
        if is_stop_requested and not is_last:
            self._stop_run()
        self._log_saves()
        self.control.watchdog.report_phase(self.steps_done + 1, "reading the batch")

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.steps_done % every_steps == 0

    def _evaluate(self) -> EvaluationResult:
        self.observability.step_meter.mark_other_work()

        def compute_logits(batch: Batch) -> Tensor | None:
            self.control.watchdog.report_phase(self.steps_done, "evaluation")
            return self.engine.compute_logits(batch)

        result = self.evaluation.evaluator.evaluate(compute_logits, self.engine.device)
        further = measure_heldout_next_sentence(self.engine.module, self.config.objective.kind)
        self._log_event("evaluation", tokens=self.tokens_done, **result.to_dict(), **further)
        return result

    def _save_checkpoint(self, evaluated: EvaluationResult | None = None) -> None:
        self.control.watchdog.report_phase(self.steps_done, "saving")
        self.observability.step_meter.mark_other_work()
        self.observability.flush_records()
        state = self.engine.get_state()
        hashes = hash_state_if_bitwise(self.config, state)
        if hashes:
            self._log_event("state_hash", **hashes)
        self.checkpointing.save_state(
            state,
            self.steps_done,
            evaluation=None if evaluated is None else evaluated.to_dict(),
            step_guard=self.control.step_guard.state_dict(),
            **self.control.batch_growth.build_record(self.config),
            **self.control.budget_fit.build_record(self.config),
            **hashes,
        )

    def _finish_saves(self) -> None:
        self.checkpointing.saver.finish_saves()
        self._log_saves()

    def _log_saves(self) -> None:
        request = self.control.stop_request
        for save in self.checkpointing.saver.pop_finished_saves():
            # The time reserved before the end of a Slurm job grows with the slowest save.
            request.longest_save_seconds = max(request.longest_save_seconds, save.seconds)
            self.observability.metric_logger.log_save(save)

    def _handle_skipped_step(self, number: int, result: StepResult, progress: Progress) -> None:
        """Record a step that changed no weight, and rewind where `train.on_bad_step` asks for
        it.
        """
        guard = self.control.step_guard
        # An overflow only lowers the loss scale, so every policy skips it.
        policy: Literal["skip", "rewind", "stop"] = (
            self.config.train.on_bad_step if guard.problem else "skip"
        )
        problem = guard.problem or "gradients overflowed, and the loss scale was lowered"
        self.observability.metric_logger.log_event(
            "bad_step" if guard.problem else "overflow",
            number,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            problem=problem,
            policy=policy,
            **self.data.describe_step(number - 1),
        )
        log.warning("step %d was skipped (%s): %s", number, policy, problem)
        guard.record_skipped(number)
        match policy:
            case "rewind":
                self._rewind_to_checkpoint(number, progress)
            case "skip" | "stop":
                pass  # under "stop" record_skipped has raised
            case unreachable:
                assert_never(unreachable)

    def _rewind_to_checkpoint(self, number: int, progress: Progress) -> None:
        """Load the newest complete checkpoint; the steps that were skipped since stay skipped."""
        before = self.tokens_done
        record = self.checkpointing.rewind(self.engine, self.control.step_guard, number)
        self.steps_done = int(record["steps"])
        self.observability.rewind_records(self.steps_done)
        self.control.batch_growth.load_record(record)
        self._set_config(set_recorded_changes(self.config, record))
        progress.advance(self.tokens_done - before)
        self.observability.metric_logger.log_event("rewind", number, resumed_from=self.steps_done)

    def _stop_run(self) -> None:
        self._finish_saves()
        self._log_measurements()
        reason = next(
            (reason for reason in all_gather_object(self.control.stop_request.reason) if reason), ""
        )
        self._log_event("stopped", reason=reason)
        raise StopRequested(
            f"{reason}: saved after step {self.steps_done} of {self.config.num_steps} into "
            f"{self.config.run.folder}. Run the same command again to continue."
        )

    def _log_event(self, event: str, **fields: Any) -> None:
        self.observability.metric_logger.log_event(event, self.steps_done, **fields)

    def _log_step(
        self,
        batches: list[Batch],
        result: StepResult,
        rate: float,
        seconds: float,
        experts: ExpertLoad,
        measured: dict[str, Tensor],
    ) -> None:
        loader = self.data.loader
        step = self.steps_done - 1
        self.observability.log_step(
            self.steps_done,
            result,
            learning_rate=rate,
            tokens_done=self.tokens_done,
            batch_tokens=self.config.batch.get_step_tokens(step),
            seconds=seconds,
            wait_seconds=loader.wait_seconds,
            batch_digest=self.data.hash_batches(batches, self.engine.device),
            **loader.get_step_metrics(step),
            **{name: float(value) for name, value in measured.items()},
        )
        if experts:
            self._log_event("experts", tokens=self.tokens_done, **experts.to_dict())

    def _log_measurements(self) -> None:
        """Log the median step time and peak memory, which `llmsys reconcile` compares with the
        prediction.
        """
        if metrics := self.observability.step_meter.compute_run_metrics():
            self._log_event("measured", **metrics)

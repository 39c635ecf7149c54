"""The loop: for each step, batches in, numbers out, and a checkpoint now and then.

Everything it uses is already built (see build.py); nothing here knows an engine, a mesh or a file format.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.batch_digest import compute_batch_digest, format_digest
from llmsys.data.dataloader import StepLoader
from llmsys.data.shuffle import derive_order_key
from llmsys.engine.engine import Engine, StepResult
from llmsys.errors import CheckpointError, StopRequested
from llmsys.log import get_logger
from llmsys.optim.lr_schedule import compute_balance_factor, compute_learning_rate
from llmsys.parallel.process_group import all_gather_object, all_reduce_sum, get_rank, get_world_size
from llmsys.progress import Progress
from llmsys.train import checkpoint_load
from llmsys.train.bitwise_checks import hash_state_if_bitwise
from llmsys.train.checkpoint_record import read_record
from llmsys.train.checkpoint_saver import CheckpointSaver
from llmsys.train.evaluator import EvaluationResult, Evaluator
from llmsys.train.expert_load import ExpertLoadReport, set_balance_factor, update_expert_balance
from llmsys.train.gradient_noise_scale import NoiseScaleMeter
from llmsys.train.metric_logger import MetricLogger
from llmsys.train.step_guard import StepGuard
from llmsys.train.step_metrics import StepMeter
from llmsys.train.stop_request import StopRequest
from llmsys.train.watchdog import Watchdog

log = get_logger(__name__)


def seed_dropout(seed: int, step: int) -> None:
    """Make what this rank drops a function of (seed, step, rank), so that a resumed run drops the same."""
    torch.manual_seed(derive_order_key("dropout", seed, step, get_rank()) >> 1)


@dataclass
class Trainer:
    """Trains from the step after `steps_done` to the end of the budget, evaluating and saving on the way."""

    config: RunConfig
    engine: Engine
    loader: StepLoader
    evaluator: Evaluator
    metric_logger: MetricLogger
    run_state: dict[str, Any]
    sample_prompts: Callable[[], list[dict[str, str]]]
    saver: CheckpointSaver
    step_guard: StepGuard
    stop_request: StopRequest
    watchdog: Watchdog
    describe_step_contents: Callable[[int], dict[str, Any]]
    meter: StepMeter
    noise_scale_meter: NoiseScaleMeter | None = None
    steps_done: int = 0

    def train(self) -> EvaluationResult:
        """Run to the end and return the final evaluation. Collective.

        Raises Stopped when the run was asked to end before, after it has saved.
        """
        began = time.perf_counter()
        if self.config.train.on_bad_step == "rewind" and self.steps_done == 0:
            self._save_checkpoint()  # a bad first step must find something to go back to
        with self._build_progress() as progress:
            while self.steps_done < self.config.num_steps:
                self._train_until_rewind(progress)
        self._finish_saves()
        self._log_measurements()
        final = self._evaluate()
        self.watchdog.close()  # what follows is not done in step
        samples = self.sample_prompts()
        self.metric_logger.log_event("samples", self.steps_done, samples=samples)
        self.metric_logger.log_event(
            "finish", self.steps_done, tokens=self.tokens_done, seconds=time.perf_counter() - began
        )
        return final

    @property
    def tokens_done(self) -> int:
        """Tokens trained on so far."""
        return self.config.batch.count_tokens_before(self.steps_done)

    def _build_progress(self) -> Progress:
        total = self.config.batch.count_tokens_before(self.config.num_steps)
        return Progress("train", total, "tok", done=self.tokens_done)

    def _train_until_rewind(self, progress: Progress) -> None:
        """Train until the last step, or until a rewind asks for steps from another place on."""
        for step, batches in self.loader.iter_steps(self.steps_done, self.config.num_steps):
            wished = False
            if step + 1 in self.step_guard.left_out:
                self.steps_done = step + 1
            else:
                wished = self._train_step(step, batches, progress)
            if self.steps_done != step + 1:
                return
            self._handle_step_end(wished)

    def _train_step(self, step: int, batches: list[Any], progress: Progress) -> bool:
        """Train on one step. Gives whether a rank wishes to stop."""
        config, number = self.config, step + 1
        self.watchdog.report_phase(number, "forward and backward")
        began = time.perf_counter()
        rate = compute_learning_rate(config, number)
        seed_dropout(config.run.seed, step)
        if config.factors.balance:
            set_balance_factor(self.engine.module, compute_balance_factor(config, number))
        if self.noise_scale_meter is not None:
            batches = self.noise_scale_meter.begin_step(step, batches)
        self.step_guard.problem = ""  # of the step before: gradients that overflow are not judged
        result = self.engine.train_step(batches, rate, self.step_guard.accept_step, (self.stop_request.to_flag(),))
        if self.noise_scale_meter is not None:
            self.noise_scale_meter.end_step(result)
        experts = update_expert_balance(self.engine.module, result.is_applied)
        self.steps_done = number
        seconds = time.perf_counter() - began
        self.meter.record_step(number, seconds)
        noise = (
            {}
            if self.noise_scale_meter is None
            else self.noise_scale_meter.format_noise_scale(config.batch.get_tokens_at(step))
        )
        progress.advance(
            config.batch.get_tokens_at(step), step=number, loss=f"{result.loss:.3f}", **self.meter.details, **noise
        )
        if number % config.train.log_every_steps == 0 or number in (1, config.num_steps):
            self._log_step(batches, result, rate, seconds, experts)
        if result.is_applied:
            self.step_guard.record_accepted(number, result)
        else:
            self._handle_skipped_step(number, result, progress)
        return result.extras[0] > 0

    def _handle_step_end(self, wished: bool) -> None:
        """What is due after a step: an evaluation, a checkpoint, the end."""
        config, last = self.config, self.steps_done == self.config.num_steps
        evaluated: EvaluationResult | None = None
        if self._is_due(config.evaluation.every_steps) and not last:
            evaluated = self._evaluate()
        if self._is_due(config.checkpoint.every_steps) or last or wished:
            self._save_checkpoint(evaluated)
        if wished and not last:
            self._stop_run()
        self._log_saves()
        self.watchdog.report_phase(self.steps_done + 1, "reading the batch")

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.steps_done % every_steps == 0

    def _log_step(
        self, batches: list[Batch], result: StepResult, rate: float, seconds: float, experts: ExpertLoadReport
    ) -> None:
        digest = self._hash_batches(batches)
        batch_tokens = self.config.batch.get_tokens_at(self.steps_done - 1)
        self.metric_logger.log_event(
            "step",
            self.steps_done,
            tokens=self.tokens_done,
            loss=result.loss,
            learning_rate=rate,
            gradient_norm=result.gradient_norm,
            batch_tokens=batch_tokens,
            **self.meter.compute_step_metrics(
                batch_tokens, seconds + self.loader.wait_seconds, self.loader.wait_seconds
            ),
            batch_digest=digest,
            **self.loader.get_step_metrics(self.steps_done - 1),
            **({} if self.noise_scale_meter is None else self.noise_scale_meter.scale.to_dict()),
        )
        if experts:
            self.metric_logger.log_event("experts", self.steps_done, tokens=self.tokens_done, **experts.to_dict())

    def _hash_batches(self, batches: list[Batch]) -> str:
        """What the step trained on, over all ranks; those that share sequences count them once. Collective."""
        layout = self.config.resolve_layout(get_world_size())
        own = compute_batch_digest(batches) if get_rank() % layout.sequence_parallel_size == 0 else 0
        total = all_reduce_sum(torch.tensor(own, dtype=torch.int64, device=self.engine.device))  # modulo 2^64
        return format_digest(int(total))

    def _log_measurements(self) -> None:
        """What steps took, to be held to the prediction. Collective."""
        if found := self.meter.compute_run_metrics():
            self.metric_logger.log_event("measured", self.steps_done, **found)

    def _evaluate(self) -> EvaluationResult:
        self.meter.mark_other_work()

        def compute_logits(batch: Batch) -> Tensor:
            self.watchdog.report_phase(self.steps_done, "evaluation")
            return self.engine.compute_logits(batch)

        result = self.evaluator.evaluate(compute_logits, self.engine.device)
        self.metric_logger.log_event("evaluation", self.steps_done, tokens=self.tokens_done, **result.to_dict())
        return result

    def _save_checkpoint(self, evaluated: EvaluationResult | None = None) -> None:
        self.watchdog.report_phase(self.steps_done, "saving")
        self.meter.mark_other_work()
        more = {"evaluation": None if evaluated is None else evaluated.to_dict(), "judge": self.step_guard.state_dict()}
        state = self.engine.get_state()
        if found := hash_state_if_bitwise(self.config, state):
            self.metric_logger.log_event("state_hash", self.steps_done, **found)
        self.saver.save_state(state, self.steps_done, self.run_state, **more, **found)

    def _finish_saves(self) -> None:
        self.saver.finish_saves()
        self._log_saves()

    def _log_saves(self) -> None:
        for save in self.saver.pop_finished_saves():
            self.stop_request.longest_save_seconds = max(self.stop_request.longest_save_seconds, save.seconds)
            self.metric_logger.log_save(save)

    def _handle_skipped_step(self, number: int, result: StepResult, progress: Progress) -> None:
        """Record a step that changed nothing, and go back to the last checkpoint where that is the policy."""
        policy = self.config.train.on_bad_step if self.step_guard.problem else "skip"
        problem = self.step_guard.problem or "gradients overflowed, and the loss scale was lowered"
        self.metric_logger.log_event(
            "bad_step" if self.step_guard.problem else "overflow",
            number,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            problem=problem,
            policy=policy,
            **self.describe_step_contents(number - 1),
        )
        log.warning("step %d was refused (%s): %s", number, policy, problem)
        self.step_guard.record_skipped(number)
        if policy == "rewind":
            self._rewind_to_checkpoint(number, progress)

    def _rewind_to_checkpoint(self, number: int, progress: Progress) -> None:
        """Take over the newest whole checkpoint, but remember the steps that were bad since."""
        self.saver.wait_for_save()
        newest = checkpoint_load.find_newest_checkpoint(self.config.run.folder / "checkpoints")
        if newest is None:
            raise CheckpointError(f"step {number} was bad, and no whole checkpoint is left to go back to.")
        checkpoint_load.load_checkpoint(self.engine, newest)
        record = read_record(newest)
        self.step_guard.load_state_dict(record.get("judge", {}), known=self.step_guard.left_out)
        before, self.steps_done = self.tokens_done, record["steps"]
        progress.advance(self.tokens_done - before)
        self.metric_logger.log_event("rewind", number, resumed_from=self.steps_done)

    def _stop_run(self) -> None:
        self._finish_saves()
        self._log_measurements()
        reason = next((one for one in all_gather_object(self.stop_request.reason) if one), "")
        self.metric_logger.log_event("stopped", self.steps_done, reason=reason)
        raise StopRequested(
            f"{reason}: saved after step {self.steps_done} of {self.config.num_steps} into {self.config.run.folder}. "
            f"Run the same command again to continue."
        )

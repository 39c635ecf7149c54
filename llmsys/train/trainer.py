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
from llmsys.data.digest import as_text, digest_of
from llmsys.data.loader import StepLoader
from llmsys.data.order import order_key
from llmsys.engine.engine import Engine, StepResult
from llmsys.errors import CheckpointError, Stopped
from llmsys.log import logger
from llmsys.optim.schedule import balance_factor, learning_rate
from llmsys.parallel.group import gathered, rank, sum_over_ranks, world_size
from llmsys.progress import Progress
from llmsys.train import checkpoint
from llmsys.train.balance import ExpertReport, set_balance, settle_experts
from llmsys.train.bitwise import hashed
from llmsys.train.checkpoint_record import read_record
from llmsys.train.faults import StepJudge
from llmsys.train.measure import Evaluator, Result
from llmsys.train.metrics import Meter
from llmsys.train.noise import NoiseMeter
from llmsys.train.record import Record
from llmsys.train.saver import Saver
from llmsys.train.signals import StopWish
from llmsys.train.watchdog import Watchdog

log = logger(__name__)


def seed_dropout(seed: int, step: int) -> None:
    """Make what this rank drops a function of (seed, step, rank), so that a resumed run drops the same."""
    torch.manual_seed(order_key("dropout", seed, step, rank()) >> 1)


@dataclass
class Trainer:
    """Trains from the step after `steps_done` to the end of the budget, evaluating and saving on the way."""

    config: RunConfig
    engine: Engine
    loader: StepLoader
    evaluator: Evaluator
    record: Record
    run_state: dict[str, Any]
    sample: Callable[[], list[dict[str, str]]]
    saver: Saver
    judge: StepJudge
    wish: StopWish
    watchdog: Watchdog
    contents: Callable[[int], dict[str, Any]]
    meter: Meter
    noise: NoiseMeter | None = None
    steps_done: int = 0

    def train(self) -> Result:
        """Run to the end and return the final evaluation. Collective.

        Raises Stopped when the run was asked to end before, after it has saved.
        """
        began = time.perf_counter()
        if self.config.train.bad_step == "rewind" and self.steps_done == 0:
            self._save()  # a bad first step must find something to go back to
        with self._progress() as progress:
            while self.steps_done < self.config.steps:
                self._train_on(progress)
        self._finish_saves()
        self._measured()
        final = self._evaluate()
        self.watchdog.close()  # what follows is not done in step
        samples = self.sample()
        self.record.write("samples", self.steps_done, samples=samples)
        self.record.write("finish", self.steps_done, tokens=self.tokens, seconds=time.perf_counter() - began)
        return final

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.config.batch.tokens_before(self.steps_done)

    def _progress(self) -> Progress:
        total = self.config.batch.tokens_before(self.config.steps)
        return Progress("train", total, "tok", done=self.tokens)

    def _train_on(self, progress: Progress) -> None:
        """Train until the last step, or until a rewind asks for steps from another place on."""
        for step, batches in self.loader.steps(self.steps_done, self.config.steps):
            wished = False
            if step + 1 in self.judge.left_out:
                self.steps_done = step + 1
            else:
                wished = self._step(step, batches, progress)
            if self.steps_done != step + 1:
                return
            self._after_step(wished)

    def _step(self, step: int, batches: list[Any], progress: Progress) -> bool:
        """Train on one step. Gives whether a rank wishes to stop."""
        config, number = self.config, step + 1
        self.watchdog.beat(number, "forward and backward")
        began = time.perf_counter()
        rate = learning_rate(config, number)
        seed_dropout(config.run.seed, step)
        if config.factors.balance:
            set_balance(self.engine.module, balance_factor(config, number))
        if self.noise is not None:
            batches = self.noise.begin(step, batches)
        self.judge.problem = ""  # of the step before: gradients that overflow are not judged
        result = self.engine.train_step(batches, rate, self.judge.accept, (self.wish.raised(),))
        if self.noise is not None:
            self.noise.end(result)
        experts = settle_experts(self.engine.module, result.applied)
        self.steps_done = number
        seconds = time.perf_counter() - began
        self.meter.step(number, seconds)
        noise = {} if self.noise is None else self.noise.words(config.batch.tokens_at(step))
        progress.advance(
            config.batch.tokens_at(step), step=number, loss=f"{result.loss:.3f}", **self.meter.details, **noise
        )
        if number % config.train.log_every_steps == 0 or number in (1, config.steps):
            self._log(batches, result, rate, seconds, experts)
        if result.applied:
            self.judge.took(number, result)
        else:
            self._refused(number, result, progress)
        return result.extras[0] > 0

    def _after_step(self, wished: bool) -> None:
        """What is due after a step: an evaluation, a checkpoint, the end."""
        config, last = self.config, self.steps_done == self.config.steps
        evaluated: Result | None = None
        if self._due(config.evaluation.every_steps) and not last:
            evaluated = self._evaluate()
        if self._due(config.checkpoint.every_steps) or last or wished:
            self._save(evaluated)
        if wished and not last:
            self._stop()
        self._tell_saves()
        self.watchdog.beat(self.steps_done + 1, "reading the batch")

    def _due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.steps_done % every_steps == 0

    def _log(
        self, batches: list[Batch], result: StepResult, rate: float, seconds: float, experts: ExpertReport
    ) -> None:
        digest = self._digest(batches)
        batch_tokens = self.config.batch.tokens_at(self.steps_done - 1)
        self.record.write(
            "step",
            self.steps_done,
            tokens=self.tokens,
            loss=result.loss,
            learning_rate=rate,
            gradient_norm=result.gradient_norm,
            batch_tokens=batch_tokens,
            **self.meter.fields(batch_tokens, seconds + self.loader.wait_seconds, self.loader.wait_seconds),
            batch_digest=digest,
            **self.loader.describe(self.steps_done - 1),
            **({} if self.noise is None else self.noise.scale.fields()),
        )
        if experts:
            self.record.write("experts", self.steps_done, tokens=self.tokens, **experts.fields())

    def _digest(self, batches: list[Batch]) -> str:
        """What the step trained on, over all ranks; those that share sequences count them once. Collective."""
        layout = self.config.fitted_layout(world_size())
        own = digest_of(batches) if rank() % layout.sequence_ranks == 0 else 0
        total = sum_over_ranks(torch.tensor(own, dtype=torch.int64, device=self.engine.device))  # modulo 2^64
        return as_text(int(total))

    def _measured(self) -> None:
        """What steps took, to be held to the prediction. Collective."""
        if found := self.meter.measured():
            self.record.write("measured", self.steps_done, **found)

    def _evaluate(self) -> Result:
        self.meter.other_work()

        def logits(batch: Batch) -> Tensor:
            self.watchdog.beat(self.steps_done, "evaluation")
            return self.engine.logits(batch)

        result = self.evaluator.evaluate(logits, self.engine.device)
        self.record.write("evaluation", self.steps_done, tokens=self.tokens, **result.fields())
        return result

    def _save(self, evaluated: Result | None = None) -> None:
        self.watchdog.beat(self.steps_done, "saving")
        self.meter.other_work()
        more = {"evaluation": None if evaluated is None else evaluated.fields(), "judge": self.judge.state()}
        state = self.engine.state()
        if found := hashed(self.config, state):
            self.record.write("state_hash", self.steps_done, **found)
        self.saver.save(state, self.steps_done, self.run_state, **more, **found)

    def _finish_saves(self) -> None:
        self.saver.finish()
        self._tell_saves()

    def _tell_saves(self) -> None:
        for save in self.saver.news():
            self.wish.longest_save_seconds = max(self.wish.longest_save_seconds, save.seconds)
            self.record.save(save)

    def _refused(self, number: int, result: StepResult, progress: Progress) -> None:
        """Record a step that changed nothing, and go back to the last checkpoint where that is the policy."""
        policy = self.config.train.bad_step if self.judge.problem else "skip"
        problem = self.judge.problem or "gradients overflowed, and the loss scale was lowered"
        self.record.write(
            "bad_step" if self.judge.problem else "overflow",
            number,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            problem=problem,
            policy=policy,
            **self.contents(number - 1),
        )
        log.warning("step %d was refused (%s): %s", number, policy, problem)
        self.judge.refused(number)
        if policy == "rewind":
            self._rewind(number, progress)

    def _rewind(self, number: int, progress: Progress) -> None:
        """Take over the newest whole checkpoint, but remember the steps that were bad since."""
        self.saver.wait()
        newest = checkpoint.newest_whole(self.config.run.folder / "checkpoints")
        if newest is None:
            raise CheckpointError(f"step {number} was bad, and no whole checkpoint is left to go back to.")
        checkpoint.load(self.engine, newest)
        record = read_record(newest)
        self.judge.load(record.get("judge", {}), known=self.judge.left_out)
        before, self.steps_done = self.tokens, record["steps"]
        progress.advance(self.tokens - before)
        self.record.write("rewind", number, resumed_from=self.steps_done)

    def _stop(self) -> None:
        self._finish_saves()
        self._measured()
        reason = next((one for one in gathered(self.wish.reason) if one), "")
        self.record.write("stopped", self.steps_done, reason=reason)
        raise Stopped(
            f"{reason}: saved after step {self.steps_done} of {self.config.steps} into {self.config.run.folder}. "
            f"Run the same command again to continue."
        )

"""The loop: for each step, batches in, numbers out, and a checkpoint now and then.

Everything it uses is already built (see build.py); nothing here knows an engine, a mesh or a file format.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.loader import StepLoader
from llmsys.data.order import order_key
from llmsys.engine.engine import Engine, StepResult
from llmsys.errors import LlmsysError
from llmsys.log import EventWriter, Progress
from llmsys.optim.schedule import learning_rate
from llmsys.parallel.group import rank
from llmsys.train import checkpoint
from llmsys.train.balance import ExpertReport, settle_experts
from llmsys.train.measure import Evaluator, Result
from llmsys.train.tracking import Trackers


@dataclass
class Record:
    """Where numbers go. On ranks other than 0 nothing is written."""

    events: EventWriter | None
    trackers: Trackers | None

    def write(self, event: str, step: int, **fields: Any) -> None:
        """One event, and its plain numbers to the trackers."""
        if self.events is None:
            return
        self.events.write(event, step=step, **fields)
        if self.trackers is not None:
            numbers = {
                f"{event}/{key}": float(value) for key, value in fields.items() if isinstance(value, int | float)
            }
            self.trackers.log(step, numbers)


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
    steps_done: int = 0

    def train(self) -> Result:
        """Run to the end and return the final evaluation. Collective."""
        began = time.perf_counter()
        with self._progress() as progress:
            for step, batches in self.loader.steps(self.steps_done, self.config.steps):
                self._step(step, batches, progress)
        final = self._evaluate()
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

    def _step(self, step: int, batches: list[Any], progress: Progress) -> None:
        config = self.config
        began = time.perf_counter()
        rate = learning_rate(config, step + 1)
        seed_dropout(config.run.seed, step)
        result = self.engine.train_step(batches, rate)
        self._refuse_nonfinite(step, result)
        experts = settle_experts(self.engine.module)
        self.steps_done = step + 1
        seconds = time.perf_counter() - began + self.loader.wait_seconds
        progress.advance(config.batch.tokens_at(step), step=self.steps_done, loss=f"{result.loss:.3f}")
        if self.steps_done % config.train.log_every_steps == 0 or self.steps_done in (1, config.steps):
            self._log(result, rate, seconds, experts)
        if self._due(config.evaluation.every_steps) and self.steps_done < config.steps:
            self._evaluate()
        if self._due(config.checkpoint.every_steps) or self.steps_done == config.steps:
            self._save()

    def _due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.steps_done % every_steps == 0

    def _refuse_nonfinite(self, step: int, result: StepResult) -> None:
        if not (math.isfinite(result.loss) and math.isfinite(result.gradient_norm)):
            raise LlmsysError(
                f"step {step + 1}: loss {result.loss}, gradient norm {result.gradient_norm}. A step must be finite. "
                f"Lower optimizer.learning_rate or train in fp32; the run goes on from its last checkpoint."
            )

    def _log(self, result: StepResult, rate: float, seconds: float, experts: ExpertReport) -> None:
        batch_tokens = self.config.batch.tokens_at(self.steps_done - 1)
        self.record.write(
            "step",
            self.steps_done,
            tokens=self.tokens,
            loss=result.loss,
            learning_rate=rate,
            gradient_norm=result.gradient_norm,
            batch_tokens=batch_tokens,
            tokens_per_second=batch_tokens / seconds,
            seconds=seconds,
            data_wait_seconds=self.loader.wait_seconds,
            **self.loader.describe(self.steps_done - 1),
        )
        if experts:
            self.record.write("experts", self.steps_done, tokens=self.tokens, **experts.fields())

    def _evaluate(self) -> Result:
        result = self.evaluator.evaluate(self.engine.logits, self.engine.device)
        self.record.write("evaluation", self.steps_done, tokens=self.tokens, **result.fields())
        return result

    def _save(self) -> None:
        began = time.perf_counter()
        folder = self.config.run.folder / "checkpoints"
        path = checkpoint.save(self.engine, folder, self.run_state, self.config.checkpoint.keep_last)
        self.record.write("checkpoint", self.steps_done, folder=str(path), seconds=time.perf_counter() - began)

"""The budget of a run that shall end after given minutes (`train.fit_minutes`).

A promise of minutes holds only as long as the machine is as fast as when it was probed. So the run
measures its own steps, and from time to time plans as many tokens as the time that is left allows,
with the evaluation at its end. Every new budget is an event `budget`, and every checkpoint has the
budgets so far and the seconds that are spent, so that a resumed run keeps its schedule and its end.

Rank 0 decides for all ranks.

Invariants:
- The learning rate of a step is a function of the config with the recorded budgets.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.config.train import EVALUATED_COST
from llmsys.parallel.process_group import run_on_rank_zero
from llmsys.train.recorded_changes import set_budgets

# A new budget is at most this many times the planned one.
MAX_GROWTH = 16
# The speed is that of this share of the minutes before: loads come and go.
WINDOW_SHARE = 0.1
MIN_MARKS = 8
# Each plan follows this share of the steps that are left; the first ones follow as many steps as
# there were before, since it shows early when the machine is much slower than planned.
NEXT_SHARE = 1 / 12
FIRST_STEPS = 4
# Steps whose time is not that of the others: they allocate memory and choose kernels.
WARM_UP_STEPS = 2
# A plan that changes the remaining tokens by less is not worth an event.
MIN_CHANGE = 0.02


class BudgetFit:
    """The budgets of one run, decided from its speed.

    Args:
        minutes: `train.fit_minutes`; 0: the budget stays.
        evaluated_tokens: tokens of the evaluation at the end.
        record: the record of the checkpoint that the run continues from; empty for a run that
            begins.
        clock: returns seconds. Tests replace it.
    """

    def __init__(
        self,
        minutes: float = 0.0,
        evaluated_tokens: int = 0,
        record: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = 60 * minutes
        self._evaluated_tokens = evaluated_tokens
        self._clock = clock
        self._spent = float(record.get("budget_fit", {}).get("seconds", 0.0))
        self._began = clock()
        # Seconds and tokens of the run after each step.
        self._marks: deque[tuple[float, int]] = deque()
        self._first_step = self._next_step = 0

    def begin(self, config: RunConfig, steps_done: int) -> None:
        """Begin the time of this process.

        Args:
            config: the config of the run.
            steps_done: steps before the first one to train.
        """
        self._began = self._clock()
        self._marks.clear()
        self._first_step = steps_done + WARM_UP_STEPS
        self._next_step = self._first_step + FIRST_STEPS

    def find_budget(
        self, config: RunConfig, steps_done: int, save_seconds: float
    ) -> RunConfig | None:
        """Return the config whose budget fits the time that is left, or None. Collective where a
        plan is due.

        Args:
            config: the config with the budgets so far.
            steps_done: steps that are done.
            save_seconds: time of a checkpoint, of which one follows the last step.
        """
        if not self._seconds:
            return None
        self._add_mark(config, steps_done)
        if steps_done < self._next_step or steps_done >= config.num_steps:
            return None
        wanted = run_on_rank_zero(lambda: self._plan_tokens(config, steps_done, save_seconds))
        planned, done = config.train.get_budget(), self._marks[-1][1]
        is_small = abs(wanted - planned) < MIN_CHANGE * (planned - done)
        fitted = config
        if not is_small and config.batch.count_steps_for(wanted) != config.num_steps:
            budgets = [one.model_dump() for one in config.train.fitted_budgets]
            budgets.append({"after_step": steps_done, "tokens": wanted})
            fitted = set_budgets(config, {"budget_fit": {"budgets": budgets}})
        share = int(NEXT_SHARE * (fitted.num_steps - steps_done))
        self._next_step = steps_done + max(1, min(share, steps_done - self._first_step))
        return None if fitted is config else fitted

    def _add_mark(self, config: RunConfig, steps_done: int) -> None:
        """Record the time of a step, and forget those before the window."""
        marks, now = self._marks, self._clock()
        tokens = config.batch.count_tokens_before(steps_done)
        if marks and tokens <= marks[-1][1]:  # a rewind
            marks.clear()
        if steps_done < self._first_step:
            return
        marks.append((now, tokens))
        start = now - WINDOW_SHARE * self._seconds
        while len(marks) > MIN_MARKS and marks[1][0] < start:
            marks.popleft()

    def _plan_tokens(self, config: RunConfig, steps_done: int, save_seconds: float) -> int:
        """Return the budget whose training and evaluation end on time, at least one more step."""
        done = config.batch.count_tokens_before(steps_done)
        if len(self._marks) < 2:
            return config.train.get_budget()
        (first_time, first_tokens), (last_time, last_tokens) = self._marks[0], self._marks[-1]
        cost = (last_time - first_time) / (last_tokens - first_tokens)
        spent = self._get_spent_seconds()
        left = self._seconds - spent - save_seconds
        tokens = int(left / cost - EVALUATED_COST * self._evaluated_tokens)
        if spent < self._seconds / 2:
            # At a moment's speed the evaluation alone may take all that is left. A later plan can
            # shorten a run; none can continue one that has ended.
            tokens = max(tokens, int(left / cost / 2))
        most = MAX_GROWTH * config.train.tokens - done
        return done + max(1, min(tokens, most))

    def _get_spent_seconds(self) -> float:
        """Return the seconds of the run so far, those of earlier processes included."""
        return self._spent + self._clock() - self._began

    def describe(self, fitted: RunConfig, steps_done: int) -> dict[str, Any]:
        """Return the fields of the event of a new budget, of the config that `find_budget`
        returned.
        """
        return {
            "tokens": fitted.train.get_budget(),
            "steps": fitted.num_steps,
            "seconds": self._get_spent_seconds(),
            "tokens_done": fitted.batch.count_tokens_before(steps_done),
        }

    def build_record(self, config: RunConfig) -> dict[str, Any]:
        """Return what a checkpoint records: budgets and spent seconds; empty where none fits."""
        if not self._seconds:
            return {}
        budgets = [one.model_dump() for one in config.train.fitted_budgets]
        return {"budget_fit": {"seconds": self._get_spent_seconds(), "budgets": budgets}}

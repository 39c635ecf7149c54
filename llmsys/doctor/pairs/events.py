"""The events of a case: the step at which each happens, and what a run with them must do.

`list_expected_actions` says it without any code of the trainer; `EventScript` makes them happen in
a real one.

Invariants:
- Each event happens at its own step, so that none hides what another one leaves behind.
- An event that changes a step happens once: a step that is repeated after it is an ordinary one.
"""

import math
import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.config.engine import DeepSpeedEngineConfig
from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.cases import BRANCH_STEPS, STEPS
from llmsys.doctor.pairs.factor import Assignment
from llmsys.doctor.pairs.plain_losses import DocumentLosses
from llmsys.engine.engine import EngineState, StepResult
from llmsys.model.local_tensor import get_local_tensor
from llmsys.parallel.dtensor_slices import get_local_region
from llmsys.parallel.process_group import get_rank, get_world_size
from llmsys.train.evaluator import EvaluationResult
from llmsys.train.save_timer import SaveTimer
from llmsys.train.trainer import Trainer

# Step after which, or at which, each event happens; counted from 1.
EVENT_STEPS = {
    "evaluate": 1,
    "save": 2,
    "evaluate and save": 3,
    "skip": 4,
    "overflow": 5,
    "rewind": 6,
    "signal": 7,
    "kill": 8,
}


@dataclass(frozen=True)
class Action:
    """One action of a run: `train`, `evaluate`, `save` or `load`.

    Attributes:
        kind: the action.
        step: the step, counted from 1; of `load` the steps that are done, 0: the initial weights.
        is_applied: whether a step that is trained changes the weights.
        run: 0, or 1 for the branch.
    """

    kind: Literal["train", "evaluate", "save", "load"]
    step: int
    is_applied: bool = True
    run: int = 0


def list_expected_actions(assignment: Assignment, overflowed: Collection[str] = ()) -> list[Action]:
    """Return what the run of a case must do, in order, to the end of its branch.

    A rewind and a resumption go to the newest save. Steps that were refused before a rewind stay
    left out; those that were refused after the newest save are trained when a killed run repeats
    them.

    Args:
        assignment: label by factor.
        overflowed: events whose step overflows in fp16 by itself, which comes before them.
    """
    happens = {name for name in EVENT_STEPS if assignment[name] != "no"}
    at = {step: name for name, step in EVENT_STEPS.items() if name in happens}
    is_half = assignment["precision"] == "fp16"
    actions: list[Action] = []
    saved: dict[int, frozenset[int]] = {}
    left_out: set[int] = set()
    done = 0

    def save() -> None:
        saved[done] = frozenset(left_out)
        actions.append(Action("save", done))

    if "rewind" in happens:
        save()
    while done < STEPS:
        step = done + 1
        event = at.get(step, "")
        if event in overflowed:
            event = "overflow"
        if step not in left_out:
            is_refused = event in ("skip", "overflow", "rewind")
            actions.append(Action("train", step, not is_refused))
            if is_refused:
                del at[step]
                # A loss scale that was too large says nothing about the data.
                if not (event == "overflow" and is_half):
                    left_out.add(step)
            if event == "rewind":
                done = max(saved)
                left_out |= saved[done]
                actions.append(Action("load", done))
                continue
        done = step
        if event in ("evaluate", "evaluate and save"):
            actions.append(Action("evaluate", step))
        if event in ("save", "evaluate and save", "signal") or step == STEPS:
            save()
        if event in ("signal", "kill"):
            del at[step]
            done = max(saved, default=0)
            left_out = set(saved.get(done, ()))
            actions.append(Action("load", done))
            if not saved and "rewind" in happens:
                save()
    actions.append(Action("evaluate", STEPS))
    if assignment["branch"] == "yes":
        actions.append(Action("load", STEPS, run=1))
        if "rewind" in happens:
            actions.append(Action("save", STEPS, run=1))
        actions += [Action("train", STEPS + number, run=1) for number in range(1, BRANCH_STEPS + 1)]
        actions.append(Action("save", STEPS + BRANCH_STEPS, run=1))
        actions.append(Action("evaluate", STEPS + BRANCH_STEPS, run=1))
    return actions


class Piece(NamedTuple):
    """Part of a tensor on a rank: full shape, (first index, size) in each dim, and values."""

    shape: tuple[int, ...]
    region: tuple[tuple[int, int], ...]
    values: Tensor


@dataclass
class Entry:
    """An action that a run took, with its numbers.

    Attributes:
        action: the action.
        loss: of a step in nats per target, of an evaluation the held-out loss.
        norm: gradient norm before clipping.
        tensors: full tensors of the training state after a step, as they are stored; None: not
            looked at.
        pieces: what one rank has of them.
        documents: losses by document that the run has stored for the step; None: it records none,
            or trained the step again.
    """

    action: Action
    loss: float = 0.0
    norm: float = 0.0
    tensors: dict[str, Tensor] | None = None
    pieces: dict[str, Piece] | None = None
    documents: DocumentLosses | None = None


class KilledError(Exception):
    """The ranks are to end without a save."""


def is_seen_at_the_end(assignment: Assignment) -> bool:
    """Return whether the state of a case is looked at after the last step only.

    Args:
        assignment: label by factor.
    """
    return assignment["inspection"] == "the end" and assignment["precision"] == "fp32"


def copy_pieces(state: EngineState) -> dict[str, Piece]:
    """Return copies of what this rank has of a state, in host memory.

    No rank talks to another, so that to look at a state changes nothing about it.

    Args:
        state: from `Engine.get_state`.
    """
    return {
        name: Piece(
            tuple(tensor.shape),
            tuple(get_local_region(tensor)),
            get_local_tensor(tensor).detach().cpu().clone(),
        )
        for name, tensor in state.tensors.items()
    }


@dataclass
class EventScript:
    """Makes the events of a case happen in a trainer, and records what it does.

    Attributes:
        assignment: label by factor.
        fired: events that have happened in earlier processes of the run.
        run: 0, or 1 for the branch.
        entries: what the trainer did.
    """

    assignment: Assignment
    fired: set[str] = field(default_factory=set)
    run: int = 0
    entries: list[Entry] = field(default_factory=list)
    _result: StepResult | None = None
    _is_rewound: bool = False
    _clock: float = 0.0  # seconds, of this rank

    def attach(self, trainer: Trainer) -> None:
        """Take the places of some methods of one trainer. Collective."""
        target: Any = trainer
        self._trainer, self._config = trainer, trainer.config
        trainer.checkpointing.timer = SaveTimer(1.0, lambda: self._clock)
        self._train_step, self._handle_step_end = target._train_step, target._handle_step_end
        self._evaluate, self._save_checkpoint, self._rewind = (
            target._evaluate,
            target._save_checkpoint,
            target._rewind_to_checkpoint,
        )
        target._train_step = self.train_step
        target._handle_step_end = self.handle_step_end
        target._evaluate, target._save_checkpoint = self.evaluate, self.save_checkpoint
        target._rewind_to_checkpoint = self.rewind
        guard, engine = target.control.step_guard, target.engine
        self._accept, self._engine_step = guard.accept_step, engine.train_step
        guard.accept_step, engine.train_step = self.accept_step, self.run_engine_step
        self.entries.append(Entry(Action("load", trainer.steps_done, run=self.run)))

    def _find_event(self, step: int) -> str:
        """Return the event of a step that has not happened yet, or an empty text."""
        for name, number in EVENT_STEPS.items():
            if (
                number == step
                and self.run == 0
                and self.assignment[name] != "no"
                and name not in self.fired
            ):
                return name
        return ""

    def _is_due_by_clock(self, event: str) -> bool:
        return event == "save" and self.assignment[event] == "by minutes"

    def train_step(self, step: int, batches: Any, progress: Any) -> bool:
        """Train step `step`, counted from 0, with its event, and record it."""
        event = self._find_event(step + 1)
        policy = "rewind" if event == "rewind" else "skip"
        self._set_config(train={"on_bad_step": policy})
        if event == "signal" and get_rank() == get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._is_due_by_clock(event) and get_rank() == 0:
            self._clock += 60
        self._event = event
        self._is_rewound = False
        if event == "overflow" and not isinstance(self._config.engine, DeepSpeedEngineConfig):
            self._trainer.engine.observe_gradients = _set_infinite_gradient
        try:
            is_stopping: bool = self._train_step(step, batches, progress)
        finally:
            if event == "overflow":
                self._trainer.engine.observe_gradients = None
        if event in ("skip", "overflow", "rewind", "signal"):
            self.fired.add(event)
        if not self._is_rewound:
            self._record_step(step + 1)
        return is_stopping

    def rewind(self, number: int, progress: Any) -> None:
        """Record the refused step, and rewind."""
        self._is_rewound = True
        self._record_step(number)
        self._rewind(number, progress)
        self.entries.append(
            Entry(Action("load", self._trainer.steps_done, run=self.run), pieces=self._look())
        )

    def run_engine_step(self, batches: Any, rate: float, *rest: Any, **named: Any) -> StepResult:
        """Run the engine's step and keep its result."""
        self._result = self._engine_step(batches, rate, *rest, **named)
        return self._result

    def accept_step(self, loss: float, norm: float) -> bool:
        """Ask the step guard, with a norm that it refuses where the event wants that."""
        # DeepSpeed gives copies of its gradients, so an overflow there begins at the guard.
        is_spoiled = self._event == "overflow" and isinstance(
            self._config.engine, DeepSpeedEngineConfig
        )
        is_refused = self._event in ("skip", "rewind") or is_spoiled
        accepted: bool = self._accept(loss, float("inf") if is_refused else norm)
        return accepted

    def handle_step_end(self, is_stop_requested: bool) -> None:
        """Evaluate and save where the events say so; end without a save at a kill."""
        step = self._trainer.steps_done
        event = self._find_event(step)
        evaluates, saves = (
            event in ("evaluate", "evaluate and save"),
            event in ("save", "evaluate and save") and not self._is_due_by_clock(event),
        )
        self._set_config(
            evaluation={"every_steps": int(evaluates)}, checkpoint={"every_steps": int(saves)}
        )
        self._handle_step_end(is_stop_requested)
        if event == "kill":
            self.fired.add(event)
            raise KilledError

    def evaluate(self) -> EvaluationResult:
        """Evaluate, and record the loss."""
        result: EvaluationResult = self._evaluate()
        action = Action("evaluate", self._trainer.steps_done, run=self.run)
        self.entries.append(Entry(action, loss=float(result.to_dict()["loss"])))
        return result

    def save_checkpoint(self, *arguments: Any) -> None:
        """Save, and record it."""
        self._save_checkpoint(*arguments)
        self.entries.append(Entry(Action("save", self._trainer.steps_done, run=self.run)))

    def _record_step(self, number: int) -> None:
        result = self._result
        assert result is not None
        action = Action("train", number, result.is_applied, self.run)
        self.entries.append(Entry(action, result.loss, result.gradient_norm, pieces=self._look()))

    def _look(self) -> dict[str, Piece] | None:
        """Return this rank's part of the state where this step is looked at. Collective."""
        is_last = self._trainer.steps_done in (STEPS, STEPS + BRANCH_STEPS)
        if is_seen_at_the_end(self.assignment) and not is_last:
            return None
        return copy_pieces(self._trainer.engine.get_state())

    def _set_config(self, **changes: dict[str, Any]) -> None:
        config: RunConfig = self._trainer.config
        sections = {
            name: getattr(config, name).model_copy(update=values)
            for name, values in changes.items()
        }
        self._trainer.config = config.model_copy(update=sections)


def _set_infinite_gradient(gradients: Any, scale: float) -> None:
    """Make one element of the first gradient that this rank has infinite."""
    for gradient in gradients.values():
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.numel():
            local.view(-1)[0] = float("inf")
            return


# Halvings of the first loss scale that a tiny model needs at most.
MAX_OVERFLOWS = 8


def accept_overflows(entries: Sequence[Entry], expected: Sequence[Action]) -> list[Action]:
    """Return the expected actions with the steps refused that overflowed by themselves in fp16.

    Args:
        entries: what the run recorded.
        expected: from `list_expected_actions`.
    """
    changed, overflows = list(expected), 0
    for place, (entry, action) in enumerate(zip(entries, expected, strict=False)):
        is_overflow = action.is_applied and not math.isfinite(entry.norm)
        if (
            is_overflow
            and overflows < MAX_OVERFLOWS
            and entry.action == replace(action, is_applied=False)
        ):
            changed[place], overflows = entry.action, overflows + 1
    return changed


def find_overflowed_events(assignment: Assignment, entries: Sequence[Entry]) -> list[str]:
    """Return the refusals of a step that in fp16 overflowed by itself when its event was due.

    The engine then refuses the step for its loss scale, before the guard is asked: it is not left
    out later, and nothing is rewound.

    Args:
        assignment: label by factor.
        entries: what the run recorded.
    """
    found = []
    for name in ("skip", "rewind"):
        norms = [
            entry.norm
            for entry in entries
            if entry.action.kind == "train" and entry.action.step == EVENT_STEPS[name]
        ]
        if assignment[name] != "no" and norms and not math.isfinite(norms[0]):
            found.append(name)
    return found


def list_actions(entries: Sequence[Entry]) -> list[Action]:
    """Return the actions of recorded entries."""
    return [entry.action for entry in entries]

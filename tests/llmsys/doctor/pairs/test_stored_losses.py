"""Losses by document that a case has stored: those of every step that it trained, once, as the
plain process computes them.
"""

from collections.abc import Callable

import pytest

from llmsys.doctor.pairs.case_processes import CaseRunner
from llmsys.doctor.pairs.cases import Limits, PairCase, build_default_assignment
from llmsys.doctor.pairs.check import write_datasets
from llmsys.doctor.pairs.comparison import DOCUMENTS, FP32, SUM, find_difference
from llmsys.doctor.pairs.events import Action, Entry
from llmsys.doctor.pairs.plain_losses import DocumentLosses
from llmsys.doctor.pairs.stored_losses import find_last_places

# 4 targets, of which the mean is 2 nats.
PLAIN: DocumentLosses = {(0, 0, 7): (3, 7.0), (0, 1, 2): (1, 1.0)}


def compare(
    documents: DocumentLosses | None,
    rounding: dict[str, float] | None = None,
    loss: float = 2.0,
) -> str | None:
    entry = Entry(Action("train", 4), loss, 3.0, documents=documents)
    plain = PLAIN
    difference = find_difference(7, entry, loss, 3.0, {}, FP32, 0.0, rounding or {}, plain)
    return None if difference is None else difference.what


def test_stored_losses_are_held_to_their_bands() -> None:
    assert compare(None) is None
    assert compare(dict(reversed(PLAIN.items()))) is None
    # Documents whose losses are exchanged have the same sum.
    assert compare({(0, 0, 7): (3, 6.0), (0, 1, 2): (1, 2.0)}) == DOCUMENTS
    moved = {(0, 0, 7): (3, 7.0 + 1e-3), (0, 1, 2): (1, 1.0 - 1e-3)}
    assert compare(moved) == DOCUMENTS
    assert compare(moved, {DOCUMENTS: 2e-3}) is None
    assert compare(PLAIN | {(0, 1, 2): (1, float("nan"))}) == SUM
    # Rounding explains no other sum than the loss that the same run has logged.
    assert compare(PLAIN, {DOCUMENTS: 1.0}, loss=2.0 * (1 + 1.1e-5)) == SUM


def test_a_target_that_is_missing_or_counted_twice_is_named_with_its_document() -> None:
    text = "the targets of document {} of source 0 in epoch {}"
    assert compare({}) == text.format(7, 0)
    assert compare(PLAIN | {(0, 1, 2): (2, 1.0)}) == text.format(2, 1)
    assert compare(PLAIN | {(0, 0, 3): (1, 1.0)}) == text.format(3, 0)


def test_a_step_counts_as_it_was_trained_last() -> None:
    actions = [
        Action("load", 0),
        Action("train", 1),
        Action("save", 1),
        Action("train", 2),
        Action("train", 3, is_applied=False),
        Action("load", 1),
        Action("train", 2),
        Action("load", 2, run=1),
        Action("train", 3, run=1),
    ]
    entries = [Entry(action) for action in actions]
    # Step 3 is left out after the load.
    assert find_last_places(entries, 0) == {1: 1, 2: 6}
    assert find_last_places(entries, 1) == {3: 8}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    root = tmp_path_factory.mktemp("pairs")
    write_datasets(root)
    return CaseRunner(root, Limits(processes=4))


def build_case(**labels: str) -> PairCase:
    chosen = {name.replace("_", " "): label for name, label in labels.items()}
    recorded = build_default_assignment() | {"document losses": "recorded"}
    return PairCase(tuple((recorded | chosen).items()), 1)


@pytest.mark.distributed
def test_losses_are_stored_once_through_every_event(runner: CaseRunner) -> None:
    events = ("save", "skip", "overflow", "rewind", "signal", "branch")
    case = build_case(kill="2 pipeline", z_loss="on", **dict.fromkeys(events, "yes"))
    assert runner.run_case(case).problem == ""


def keep_rewound_steps() -> None:
    """Keep what was stored of the steps that a rewind repeats."""
    from llmsys.train.loss_recorder import DocumentLossRecorder

    DocumentLossRecorder.rewind = lambda self, steps: None  # type: ignore[method-assign]


def keep_steps_after_the_newest_save() -> None:
    """Keep what a killed run stored after the save that it is resumed from."""
    from llmsys.train import build_trainer, loss_recorder

    loss_recorder.MAX_ROWS = 1
    build_trainer.truncate_loss_parts = lambda *_: None  # type: ignore[attr-defined]


def store_refused_steps_as_applied() -> None:
    """Store the outcome of the step before."""
    from dataclasses import replace

    from llmsys.engine.engine import StepResult
    from llmsys.train.loss_recorder import DocumentLossRecorder

    end_step = DocumentLossRecorder.end_step

    def end(self: DocumentLossRecorder, result: StepResult) -> None:
        end_step(self, replace(result, is_applied=True))

    DocumentLossRecorder.end_step = end  # type: ignore[method-assign]


def leave_out_the_last_document() -> None:
    """Count the targets of the last document of a micro-batch for the one before."""
    from typing import Any

    from llmsys.data.target_documents import SpanSums

    add = SpanSums.add_losses

    def add_losses(self: SpanSums, losses: Any, valid: Any, spans: Any) -> None:
        add(self, losses, valid, spans.clamp(max=max(0, len(self.documents_S) - 2)))

    SpanSums.add_losses = add_losses  # type: ignore[method-assign, assignment]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("bug", "labels", "problem"),
    [
        (keep_rewound_steps, {"rewind": "yes"}, "which was not trained"),
        # The files of the second rank are written by nobody else.
        (
            keep_steps_after_the_newest_save,
            {"kill": "1 fsdp", "shard": "2"},
            "the targets of document",
        ),
        (store_refused_steps_as_applied, {"skip": "yes"}, "is stored as applied, and was not"),
        (leave_out_the_last_document, {}, "the targets of document"),
    ],
)
def test_a_planted_bug_of_the_record_fails_its_case(
    runner: CaseRunner, bug: Callable[[], None], labels: dict[str, str], problem: str
) -> None:
    spoiled = CaseRunner(runner.root, runner.limits, prepare=bug)
    assert problem in spoiled.run_case(build_case(**labels)).problem

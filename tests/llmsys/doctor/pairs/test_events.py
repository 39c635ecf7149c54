"""What a run with events must do, in order."""

import math

from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.cases import build_default_assignment
from llmsys.doctor.pairs.events import (
    Action,
    Entry,
    EventScript,
    find_overflowed_events,
    list_expected_actions,
)
from llmsys.engine.engine import StepResult


def list_texts(**events: str) -> list[str]:
    assignment = build_default_assignment() | {
        name.replace("_", " "): label for name, label in events.items()
    }

    def describe(action: Action) -> str:
        refused = "" if action.is_applied else "-"
        return f"{'b' if action.run else ''}{action.kind[0]}{action.step}{refused}"

    return [describe(action) for action in list_expected_actions(assignment)]


def test_a_run_without_events_saves_and_evaluates_at_its_end() -> None:
    assert list_texts() == [*(f"t{step}" for step in range(1, 10)), "s9", "e9"]


def test_evaluations_and_saves_are_at_steps_of_their_own() -> None:
    found = list_texts(evaluate="yes", save="yes", evaluate_and_save="yes")
    assert found[:7] == ["t1", "e1", "t2", "s2", "t3", "e3", "s3"]
    assert list_texts(save="by minutes") == list_texts(save="yes")


def test_refused_steps_change_no_weight() -> None:
    found = list_texts(skip="yes", overflow="yes")
    assert found[3:6] == ["t4-", "t5-", "t6"]


def test_a_rewind_repeats_the_steps_since_the_save_but_for_those_that_were_refused() -> None:
    found = list_texts(save="yes", skip="yes", rewind="yes")
    assert found == [
        "s0",
        "t1",
        "t2",
        "s2",
        "t3",
        "t4-",
        "t5",
        "t6-",
        "l2",
        "t3",
        "t5",
        "t7",
        "t8",
        "t9",
        "s9",
        "e9",
    ]


def test_a_loss_scale_that_was_too_large_leaves_no_step_out_of_a_rewind() -> None:
    found = list_texts(overflow="yes", rewind="yes", precision="fp16")
    assert found[:13] == [
        "s0",
        *(f"t{step}" for step in range(1, 5)),
        "t5-",
        "t6-",
        "l0",
        "t1",
        "t2",
        "t3",
        "t4",
        "t5",
    ]


def test_a_signal_saves_before_the_end_and_a_kill_does_not() -> None:
    assert list_texts(signal="yes")[6:10] == ["t7", "s7", "l7", "t8"]
    assert list_texts(kill="2 fsdp")[7:10] == ["t8", "l0", "t1"]
    assert list_texts(kill="2 fsdp", save="yes")[8:11] == ["t8", "l2", "t3"]


def test_a_killed_run_trains_steps_again_that_were_refused_after_its_save() -> None:
    found = list_texts(save="yes", skip="yes", kill="2 fsdp")
    assert found[found.index("l2") :][:4] == ["l2", "t3", "t4", "t5"]


def test_a_branch_goes_on_from_the_last_save() -> None:
    assert list_texts(branch="yes")[-5:] == ["bl9", "bt10", "bt11", "bs11", "be11"]


def train_step_entry(step: int, norm: float) -> Entry:
    return Entry(Action("train", step, is_applied=False), 1.0, norm)


def test_a_step_that_overflows_before_it_is_skipped_is_trained_after_a_rewind() -> None:
    assignment = build_default_assignment()
    assignment |= {"precision": "fp16", "save": "yes", "skip": "yes", "rewind": "yes"}
    entries = [train_step_entry(4, math.nan), train_step_entry(6, 1.0), train_step_entry(4, 1.0)]

    overflowed = find_overflowed_events(assignment, entries)

    assert overflowed == ["skip"]
    actions = list_expected_actions(assignment, overflowed)
    after = actions.index(Action("load", 2))
    assert actions[after + 1 : after + 5] == [Action("train", step) for step in (3, 4, 5, 7)]


def test_nothing_is_rewound_where_the_step_overflows() -> None:
    assignment = build_default_assignment() | {"precision": "fp16", "rewind": "yes"}
    entries = [train_step_entry(6, math.inf)]

    overflowed = find_overflowed_events(assignment, entries)

    assert overflowed == ["rewind"]
    actions = list_expected_actions(assignment, overflowed)
    assert Action("train", 6, is_applied=False) in actions
    assert not any(action.kind == "load" for action in actions)


def test_a_step_is_recorded_where_its_rewind_did_not_happen() -> None:
    class OneStepTrainer:
        """A trainer whose engine refuses the step by itself."""

        config = RunConfig()
        steps_done = 6

    script = EventScript(build_default_assignment() | {"rewind": "yes", "inspection": "the end"})
    vars(script).update(_trainer=OneStepTrainer(), _config=OneStepTrainer.config)
    script._result = StepResult(1.0, math.inf, targets=8, is_applied=False)
    script._train_step = lambda *arguments: False

    script.train_step(5, [], None)

    assert [entry.action for entry in script.entries] == [Action("train", 6, is_applied=False)]
    assert script.fired == {"rewind"}

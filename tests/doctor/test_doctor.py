"""The doctor itself: what its matrix holds, a part of it run for real, drills that pass, and drills that must not."""

import json
from typing import Any

import pytest

from launch.main import main
from llmsys.doctor import crash
from llmsys.doctor.accident import Accident
from llmsys.doctor.cells import ENGINES, Cell, matrix
from llmsys.doctor.crash import DRILLS, Drill, run_drills, with_kills
from llmsys.doctor.parity_table import run_parity, table
from llmsys.doctor.ranks import Failed, run_tasks
from llmsys.doctor.subjects import CROWDED, DENSE, IDLE, SUBJECTS


def test_the_matrix_has_every_engine_axis_precision_policy_and_subject() -> None:
    cells = [cell for ranks in (1, 2, 4) for cell in matrix(ranks, ("fp32", "bf16"))]
    assert {cell.engine for cell in cells} == set(ENGINES)
    assert {cell.recompute for cell in cells} == {"none", "selective", "block"}
    assert {cell.precision for cell in cells} == {"fp32", "bf16"}
    for axis in ("replicate", "expert", "tensor", "context"):
        assert any(axis in dict(cell.layout) for cell in cells), axis
    assert {cell.subject.name for cell in cells} == {subject.name for subject in SUBJECTS}
    assert len(cells) == len({cell.title for cell in cells})


@pytest.mark.distributed
def test_cells_with_adversarial_routing_agree_and_a_cell_that_dies_fails_alone() -> None:
    """Two ranks: all tokens on one expert, an idle one, a layout that cannot be built, and one after it."""
    broken = Cell(2, "fsdp", (("tensor", 2),), "fp32", "none", DENSE, 3)  # three rows at a time do not divide eight
    cells = [
        Cell(2, "fsdp", (("expert", 2),), "fp32", "block", CROWDED, 2),
        broken,
        Cell(2, "fsdp", (("tensor", 2), ("expert", 2)), "fp32", "selective", IDLE, 2),
    ]
    outcomes = run_parity(cells, lambda outcome: None)
    assert [outcome.passed for outcome in outcomes] == [True, False, True]
    assert "3 sequences do not divide" in outcomes[1].failure
    assert "FAIL" in table(outcomes)


def _task(number: int) -> int:
    import os
    import time

    if number == 1:
        time.sleep(60)
    if number == 3 and os.environ["RANK"] == "1":
        os._exit(9)
    return number * 10


@pytest.mark.distributed
def test_a_task_that_hangs_or_dies_is_told_and_the_others_are_done() -> None:
    found = dict(run_tasks(_task, range(5), ranks=2, timeout_seconds=15))
    assert [found[number] for number in (0, 2, 4)] == [0, 20, 40]
    assert isinstance(found[1], Failed)
    assert "did not answer within 15 s" in found[1]
    assert isinstance(found[3], Failed)
    assert "rank 1 ended without an answer" in found[3]


CHOSEN = (
    "killed between backward and step",
    "killed writing the record in the background",
    "a flipped bit",
    "a full disk",
    "random kills",
)


@pytest.mark.distributed
def test_killed_starved_and_damaged_runs_end_where_a_calm_one_ends() -> None:
    drills = with_kills([drill for drill in DRILLS if drill.name in CHOSEN], 3)
    assert len(drills) == len(CHOSEN)
    outcomes = run_drills(drills, lambda outcome: None)
    assert all(outcome.passed for outcome in outcomes), [outcome.text for outcome in outcomes if not outcome.passed]


@pytest.mark.distributed
def test_a_drill_fails_when_the_trajectory_is_another_one() -> None:
    """A run that goes on with another seed, and an accident that never happens."""

    def cheat(config: Any) -> str:
        other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
        crash.finished(other, 1)
        return "done"

    never = crash.struck(Accident("removing an older one", 999), 1, 1)
    cheated, calm = run_drills([Drill("cheat", "", cheat), Drill("never", "", never)], lambda outcome: None)
    assert not cheated.passed
    assert "a calm run in" in cheated.text
    assert not calm.passed
    assert "nothing happened" in calm.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parity", "--engine", "fsdq"], "--engine fsdq is not a row. Use fsdp, ddp,"),
        (["parity", "--precision", "fp8"], "--precision fp8 is unknown. Use fp32, bf16 or fp16."),
        (["crash", "--drills", "nothing"], "--drills nothing: no such drill. Use killed before the backward pass,"),
    ],
)
def test_what_the_doctor_does_not_know_is_named(words: list[str], message: str, capsys: Any) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_verb_tells_in_json_what_passed(capsys: Any) -> None:
    assert main(["doctor", "parity", "--processes", "1", "--engine", "ddp", "--precision", "fp32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"]
    assert all(cell["distance"]["gradient"] < 1e-4 for cell in answer["cells"])

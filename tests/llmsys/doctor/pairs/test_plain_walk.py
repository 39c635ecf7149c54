"""What planted errors of rounding explain: a step by itself, or a run with all before it; and
measuring changes nothing.
"""

from pathlib import Path

import pytest
import torch

from llmsys.doctor.pairs.cases import Limits, build_default_assignment, build_parts
from llmsys.doctor.pairs.check import write_datasets
from llmsys.doctor.pairs.comparison import LOSS, NORM, Rounding
from llmsys.doctor.pairs.events import Action, Entry
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_walk import (
    PlainWalk,
    iter_step_rounding,
    measure_walk_rounding,
)

TRAINED = [Entry(Action("train", step)) for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("walk")
    write_datasets(made)
    return made


def build_phases(root: Path, **labels: str) -> list[Phase]:
    [part] = build_parts(build_default_assignment() | labels, 3, root / "case", Limits())
    return [Phase(0, part.config, part.ranks)]


def measure_after(root: Path, steps: int, **labels: str) -> tuple[PlainWalk, Rounding]:
    """The rounding of one step after others, and the walk that took it."""
    walk = PlainWalk(build_phases(root, **labels))
    for entry in TRAINED[: steps - 1]:
        walk.take_action(entry)
    before = walk.plain.copy_state()
    walk.take_action(TRAINED[steps - 1])
    [*_, rounding] = iter_step_rounding(walk, TRAINED[steps - 1], before)
    return walk, rounding


def test_a_measured_step_is_as_if_it_had_not_been_measured(root: Path) -> None:
    plain = PlainWalk(build_phases(root))
    for entry in TRAINED[:2]:
        expected = plain.take_action(entry)
    walk, _ = measure_after(root, 1)
    assert walk.take_action(TRAINED[1]) == expected
    for name, value in plain.plain.state.tensors.items():
        assert torch.equal(walk.plain.state.tensors[name], value), name


def test_rounding_of_bf16_is_thousands_of_times_that_of_fp32(root: Path) -> None:
    _, single = measure_after(root, 1)
    _, half = measure_after(root, 1, precision="bf16")
    # 8 units of 2⁻²⁴ and 2 of 2⁻⁸ are planted.
    expected = (2 * 2**-8) / (8 * 2**-24)
    for name in (LOSS, NORM, "first_moment/blocks.0.attention.q_proj.weight"):
        assert expected / 30 < half[name] / single[name] < expected * 30
    # A loss of about 4 nats, off by a few of the planted errors.
    assert 1e-8 < single[LOSS] < 1e-4


def test_rounding_of_a_step_is_that_of_this_step_alone(root: Path) -> None:
    _, third = measure_after(root, 3)
    walked = measure_walk_rounding(build_phases(root), TRAINED)
    assert len(walked) == 3
    names = [name for name in third if name.startswith("parameter/")]
    alone = sum(third[name] for name in names)
    together = [sum(one[name] for name in names) for one in walked]
    # Errors of three steps are in the weights, and those of the first in all that follows.
    assert together[0] < together[1] < together[2]
    assert together[2] > 1.2 * alone


def test_nothing_is_planted_in_what_is_no_model(root: Path) -> None:
    _, found = measure_after(root, 1, optimizer="lion")
    entries = [Entry(Action("save", 0)), Entry(Action("load", 0))]
    assert all(
        value == 0.0
        for numbers in measure_walk_rounding(build_phases(root), entries)
        for value in numbers.values()
    )
    assert found[LOSS] > 0

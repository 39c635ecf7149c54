"""What planted errors of rounding explain: a step by itself, or a run with all before it; and
measuring changes nothing.
"""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmsys.config.matrix_optimizers import SoapConfig
from llmsys.config.optimizer import AdamWConfig, ScheduleFreeConfig
from llmsys.doctor.pairs.cases import Limits, build_default_assignment, build_parts
from llmsys.doctor.pairs.check import write_datasets
from llmsys.doctor.pairs.comparison import LOSS, NORM, Rounding
from llmsys.doctor.pairs.events import Action, Entry
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_optimizers import PlainStep, follow_ties, list_moment_names
from llmsys.doctor.pairs.plain_walk import (
    PlainWalk,
    WalkRounding,
    iter_step_rounding,
    iter_walk_rounding,
    measure_bfloat16_spacing,
    measure_int8_spacing,
    round_moments,
)
from llmsys.doctor.rounding import SAMPLES

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
    [*_, rounding] = islice(iter_step_rounding(walk, TRAINED[steps - 1], before), SAMPLES)
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
    walked = next(iter_walk_rounding(build_phases(root), TRAINED))
    assert len(walked) == 3
    names = [name for name in third if name.startswith("parameter/")]
    alone = sum(third[name] for name in names)
    together = [sum(one[name] for name in names) for one in walked]
    # Errors of three steps are in the weights, and those of the first in all that follows.
    assert together[0] < together[1] < together[2]
    assert together[2] > 1.2 * alone


@pytest.mark.parametrize(("precision", "samples"), [("fp32", 16), ("bf16", 64)])
def test_more_samples_are_drawn_where_tokens_choose_other_experts(
    root: Path, precision: str, samples: int
) -> None:
    walk = PlainWalk(build_phases(root, precision=precision))
    before = walk.plain.copy_state()
    walk.take_action(TRAINED[0])
    drawn = [float(rounding[LOSS]) for rounding in iter_step_rounding(walk, TRAINED[0], before)]
    assert len(drawn) == samples


def test_soap_sorts_by_the_gradient_that_the_run_has_seen(root: Path) -> None:
    """Two eigenvalues that are nearly equal change places where a gradient is rounded."""
    name = "blocks.0.attention.o_proj.weight"
    walk = PlainWalk(build_phases(root, optimizer="soap"))
    config = walk.config.optimizer
    assert isinstance(config, SoapConfig)
    for entry in TRAINED[:2]:
        walk.take_action(entry)
    before = walk.plain.copy_state()
    kinds = list_moment_names(config, name, walk.plain.parameters[name].shape)
    moments = {kind: before.tensors[f"{kind}/{name}"].double() for kind in kinds}

    walk.take_action(TRAINED[2])
    plain = dict(walk.plain.state.tensors)
    beta = config.betas[0]
    gradient = (plain[f"first_moment/{name}"] - beta * moments["first_moment"]) / (1 - beta)
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
    seen = gradient + 0.3 * gradient.norm() / noise.norm() * noise.double()
    # Its columns are in another order.
    expected = dict(moments)
    PlainStep(config, 3, 0.01, 0.0, 0.0).compute_weight(
        name, before.tensors[f"parameter/{name}"], seen, expected
    )

    walk.plain.load_state(before)
    walk.take_action(
        replace(TRAINED[2], tensors={f"first_moment/{name}": expected["first_moment"]})
    )
    found = walk.plain.state.tensors
    squares = found[f"second_moment/{name}"]
    torch.testing.assert_close(squares, expected["second_moment"])
    assert float((squares - plain[f"second_moment/{name}"]).norm()) > 0.1 * float(squares.norm())
    # All else is that of the plain gradient, so that a wrong one is found.
    for kind in ("first_moment", "left_moment", "right_moment"):
        torch.testing.assert_close(found[f"{kind}/{name}"], plain[f"{kind}/{name}"])


def test_a_gradient_that_squares_have_lost_is_the_plain_one() -> None:
    config = ScheduleFreeConfig()
    step = PlainStep(config, count=3, rate=1e-2, decay=0.0, share=0.5)
    beta = config.betas[1]
    # Elements whose square is next to a large one, next to none, and other than the plain one.
    plain = torch.tensor([1e-6, 1e-6, 1e-6], dtype=torch.float64)
    theirs = torch.tensor([1e-6, 1e-6, 2e-6], dtype=torch.float64)
    before = {"second_moment": torch.tensor([2e-6, 0.0, 0.0], dtype=torch.float64)}
    exact = beta * before["second_moment"] + (1 - beta) * theirs**2
    after = {"second_moment": exact.float().double()}

    found = step.find_contained_gradient("norm.weight", torch.zeros(3), plain, before, after)

    assert found[0] == plain[0]
    torch.testing.assert_close(found[1:], theirs[1:], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("gap", "is_tie"), [(0.0, True), (0.5e-6, True), (-0.5e-6, True), (2e-6, False)]
)
def test_a_run_says_which_of_two_equal_eigenvalues_comes_first(gap: float, is_tie: bool) -> None:
    values = torch.tensor([1.0, 0.3 + gap, 0.3, 0.1], dtype=torch.float64)
    lengths = torch.tensor([3.0, 2.0, 1.0, 5.0], dtype=torch.float64)
    order = torch.arange(4)
    # The run has put the third before the second, and, wrongly, the last before all.
    swapped = follow_ties(order, values, lengths, lengths[[0, 2, 1, 3]])
    assert swapped.tolist() == ([0, 2, 1, 3] if is_tie else [0, 1, 2, 3])
    assert follow_ties(order, values, lengths, lengths).tolist() == [0, 1, 2, 3]
    wrong = follow_ties(order, values, lengths, lengths[[3, 0, 1, 2]])
    assert wrong.tolist() == [0, 1, 2, 3]
    # Each matrix of a stack by itself.
    stacked = torch.stack([lengths, lengths[[0, 2, 1, 3]]])
    orders, all_values, all_lengths = (one.expand(2, 4) for one in (order, values, lengths))
    assert follow_ties(orders, all_values, all_lengths, stacked).tolist() == [
        [0, 1, 2, 3],
        swapped.tolist(),
    ]


def test_soap_follows_the_order_of_the_run_among_equal_eigenvalues() -> None:
    """Without it, squares of two columns would stand in each other's places."""
    config = SoapConfig(precondition_every_steps=1)
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    moments = {
        f"{side}_{kind}": torch.eye(4, dtype=torch.float64) * (1 if kind == "basis_moment" else 100)
        for side in ("left", "right")
        for kind in ("moment", "basis_moment")
    }
    squares = torch.rand(4, 4, generator=generator, dtype=torch.float64)
    moments |= {"first_moment": torch.zeros_like(squares), "second_moment": squares}

    def take_step(found: dict[str, Tensor]) -> Tensor:
        changed = dict(moments)
        step = PlainStep(config, 2, 1e-2, 0.0, 0.0, found)
        step.compute_weight("q_proj.weight", torch.zeros_like(squares), gradient * 1e-6, changed)
        return changed["second_moment"]

    plain = take_step({})
    theirs = plain[[1, 0, 2, 3]][:, [0, 1, 3, 2]]
    torch.testing.assert_close(take_step({"second_moment": theirs}), theirs)


def test_further_samples_explain_a_run_in_which_rounding_decides(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = TRAINED[:1]
    monkeypatch.setattr("llmsys.doctor.pairs.plain_walk.MOST_SAMPLES", 5)
    cases: tuple[dict[str, str], ...] = ({}, {"moments": "bf16"}, {"experts": "all"})
    for labels in cases:
        phases = build_phases(root, **labels)
        drawn = [one[0][LOSS] for one in iter_walk_rounding(phases, entries)]
        assert len(drawn) == 3
        walked = WalkRounding(phases, entries)
        found = [one[LOSS] for one in walked.iter_rounding(0)]
        assert found == sorted(found)
        # What is drawn stays, and nothing is drawn again.
        assert [one[LOSS] for one in walked.iter_rounding(0)] == found[-1:]


def test_errors_decide_between_experts_of_equal_scores(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.doctor.pairs.plain_walk.MOST_CHOICE_SAMPLES", 5)
    walk = PlainWalk(build_phases(root, experts="all"))
    walk.take_action(TRAINED[0])

    def measure_norm() -> float:
        before = walk.plain.copy_state()
        _, norm = walk.take_action(TRAINED[1])
        samples = list(iter_step_rounding(walk, TRAINED[1], before))
        walk.plain.load_state(before)
        assert len(samples) == 5
        return samples[-1][NORM] / norm

    assert measure_norm() < 1e-4
    for name, router in walk.plain.state.tensors.items():
        if name.startswith("parameter/") and name.endswith("router.weight"):
            router[1:] = router[0]
    assert measure_norm() > 1e-2


@pytest.mark.parametrize("is_corrected", [True, False])
def test_only_a_corrected_walk_asks_moments_for_the_gradient_of_the_run(
    root: Path, is_corrected: bool
) -> None:
    name = "blocks.0.attention.q_proj.weight"
    phases = build_phases(root, optimizer="schedule_free")
    plain = PlainWalk(phases)
    plain.take_action(TRAINED[0])
    state = plain.plain.state.tensors
    # As if the gradient of the run had been twice as long.
    seen = {f"second_moment/{name}": 4 * state[f"second_moment/{name}"]}
    walk = PlainWalk(phases, is_corrected=is_corrected)
    walk.take_action(replace(TRAINED[0], tensors=seen))
    # The first step of schedule-free has the length of the rate, but for eps beside a gradient.
    apart = walk.plain.state.tensors[f"parameter/{name}"] - state[f"parameter/{name}"]
    assert bool(apart.any()) == is_corrected


def test_nothing_is_planted_in_what_is_no_model(root: Path) -> None:
    _, found = measure_after(root, 1, optimizer="lion")
    entries = [Entry(Action("save", 0)), Entry(Action("load", 0))]
    assert all(
        value == 0.0
        for numbers in next(iter_walk_rounding(build_phases(root), entries))
        for value in numbers.values()
    )
    assert found[LOSS] > 0


@pytest.fixture(scope="module")
def walked(root: Path) -> dict[str, list[Rounding]]:
    """The rounding of two steps, by the dtype of moments."""
    return {
        moments: next(iter_walk_rounding(build_phases(root, moments=moments), TRAINED[:2]))
        for moments in ("fp32", "bf16", "int8")
    }


def test_rounded_moments_move_every_step_after_the_first(
    walked: dict[str, list[Rounding]],
) -> None:
    name = "parameter/blocks.0.attention.q_proj.weight"
    # The first step begins with moments of zero, and its update has the moments as computed.
    assert len({walked[moments][0][name] for moments in walked}) == 1
    exact, bf16, int8 = (walked[moments][1][name] for moments in ("fp32", "bf16", "int8"))
    assert 30 * exact < bf16 < int8


def test_rounding_explains_no_less_later_on(walked: dict[str, list[Rounding]]) -> None:
    for first, second in walked.values():
        assert all(first[name] <= second[name] for name in first)


def test_spacings_hold_both_neighbours_of_every_moment() -> None:
    generator = torch.Generator().manual_seed(1)
    moment = torch.randn(16, 32, generator=generator, dtype=torch.float64) ** 3
    towards = torch.tensor(float("inf")).bfloat16()
    stored = moment.bfloat16()
    above, below = stored.nextafter(towards), stored.nextafter(-towards)
    spacing = measure_bfloat16_spacing("first_moment", moment)
    assert bool(((above - stored).double() <= spacing * 1.01).all())
    assert bool(((stored - below).double() <= spacing * 1.01).all())

    largest = moment.abs().amax(-1, keepdim=True)
    code = (moment.abs() / largest).sqrt().mul(127).floor()
    cell = largest * ((code + 1) ** 2 - code**2) / 127**2
    assert bool((cell <= measure_int8_spacing("first_moment", moment) * (1 + 1e-12)).all())

    square = moment**2
    largest = square.amax(-1, keepdim=True)
    code = (square / largest).sqrt().sqrt().mul(255).floor()
    cell = largest * ((code + 1) ** 4 - code**4) / 255**4
    assert bool((cell <= measure_int8_spacing("second_moment", square) * (1 + 1e-12)).all())


def test_only_moments_are_rounded_and_squares_stay_positive() -> None:
    def build_tensors() -> dict[str, torch.Tensor]:
        ones = torch.ones(4, 8, dtype=torch.float64)
        return {"first_moment/w": ones, "second_moment/w": ones * 1e-9, "parameter/w": ones}

    config = AdamWConfig.model_validate({"kind": "adamw", "moments": "int8"})
    tensors = build_tensors()
    round_moments(tensors, config, torch.Generator().manual_seed(1))
    assert torch.equal(tensors["parameter/w"], build_tensors()["parameter/w"])
    assert not torch.equal(tensors["first_moment/w"], build_tensors()["first_moment/w"])
    assert bool((tensors["second_moment/w"] >= 0).all())

    tensors = build_tensors()
    exact = AdamWConfig.model_validate({"kind": "adamw"})
    round_moments(tensors, exact, torch.Generator().manual_seed(1))
    assert all(torch.equal(value, build_tensors()[name]) for name, value in tensors.items())

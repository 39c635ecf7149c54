"""What counts as a difference: each number beyond its band, the first in the order of a step,
and nothing else.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.comparison import (
    BF16,
    BF16_MOMENTS,
    FP16,
    FP32,
    INT8_MOMENTS,
    LOSS,
    NORM,
    SIGN_FLIPS,
    UNCORRECTED,
    Bands,
    decode_moments,
    find_action_difference,
    find_difference,
    select_bands,
)
from llmsys.doctor.pairs.events import Action, Entry

NAMES = (
    "first_moment/a",
    "second_moment/a",
    "parameter/a",
    "parameter/b",
    "average/a",
    "buffer/bias_E",
)


def build_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(8, 4, generator=generator) for name in NAMES}
    return tensors | {"second_moment/a": tensors["second_moment/a"].square()}


def compare(
    *,
    loss: float = 2.0,
    norm: float = 3.0,
    changes: dict[str, Tensor] | None = None,
    action: Action | None = None,
    bands: Bands = FP32,
    rate: float = 0.0,
    rounding: dict[str, float] | None = None,
) -> str | None:
    """Return the name of the number that differs from a plain loss of 2, norm of 3 and tensors."""
    found = build_tensors() | (changes or {})
    entry = Entry(action or Action("train", 4), loss, norm, tensors=found)
    difference = find_difference(7, entry, 2.0, 3.0, build_tensors(), bands, rate, rounding or {})
    return None if difference is None else difference.what


def move(name: str, share: float) -> dict[str, Tensor]:
    """Return a tensor that is off by a share of its length."""
    tensor = build_tensors()[name]
    return {name: tensor * (1 + share)}


def test_equal_runs_differ_in_nothing() -> None:
    assert compare() is None
    assert compare(loss=2.0 * (1 + 0.9e-5), norm=3.0 * (1 - 0.9e-5)) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_losses_and_norms_are_held_to_their_bands(sign: int) -> None:
    assert compare(loss=2.0 * (1 + sign * 1.1e-5)) == "the loss"
    assert compare(norm=3.0 * (1 + sign * 1.1e-5)) == "the gradient norm"
    assert compare(loss=float("nan")) == "the loss"
    assert compare(norm=float("nan")) == "the gradient norm"


def test_a_refused_step_has_a_loss_and_no_norm() -> None:
    refused = Action("train", 4, is_applied=False)
    assert compare(norm=float("inf"), action=refused) is None
    assert compare(loss=2.1, action=refused) == "the loss"
    assert compare(loss=2.1, action=Action("evaluate", 4)) == "the loss"
    assert compare(norm=9.0, action=Action("evaluate", 4)) is None
    assert compare(loss=9.0, norm=9.0, action=Action("load", 4)) is None
    assert compare(changes=move("parameter/a", 1e-3), action=Action("load", 4)) == "parameter/a"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "buffer/bias_E"])
def test_every_tensor_is_held_to_its_band(name: str) -> None:
    assert compare(changes=move(name, 0.9e-5)) is None
    assert compare(changes=move(name, 1.2e-5)) == name
    assert compare(changes={name: build_tensors()[name] * float("nan")}) == name


def test_one_element_of_a_buffer_is_enough() -> None:
    bias = build_tensors()["buffer/bias_E"]
    for step, expected in ((0.5e-6, None), (2e-6, "buffer/bias_E")):
        changed = bias.clone()
        changed[3, 1] += step
        assert compare(changes={"buffer/bias_E": changed}) == expected


def test_the_first_kind_of_a_step_is_named_and_of_a_kind_the_worst() -> None:
    weights = move("parameter/a", 1e-3) | move("parameter/b", 1e-2)
    assert compare(changes=weights) == "parameter/b"
    assert compare(changes=weights | move("first_moment/a", 1e-4)) == "first_moment/a"
    assert compare(changes=weights | move("average/a", 0.1)) == "parameter/b"
    assert compare(loss=2.1, changes=weights) == "the loss"


def test_a_tensor_that_only_one_of_them_has_is_named() -> None:
    found = build_tensors()
    del found["parameter/b"]
    difference = find_difference(
        7, Entry(Action("train", 4), 2.0, 3.0, tensors=found), 2.0, 3.0, build_tensors(), FP32
    )
    assert difference is not None
    assert difference.what == "parameter/b, which one of them lacks,"


def test_counters_are_compared_by_what_they_do() -> None:
    assert compare(changes={"loss_scale": torch.ones(2), "average_weights": torch.ones(3)}) is None


@pytest.mark.parametrize(("error", "expected"), [(0.9e-7, None), (1.1e-7, "lookahead_moment/a")])
def test_a_distance_between_weights_is_as_exact_as_weights(
    error: float, expected: str | None
) -> None:
    # Weights of 1 hold a distance of a thousandth to 1e-5 of a hundredth of them.
    plain = {"parameter/a": torch.ones(1), "lookahead_moment/a": torch.full((1,), 1e-3)}
    found = plain | {"lookahead_moment/a": torch.tensor([1e-3 + error])}
    entry = Entry(Action("train", 4), 2.0, 3.0, tensors=found)
    difference = find_difference(7, entry, 2.0, 3.0, plain, FP32)
    assert (None if difference is None else difference.what) == expected


def test_a_tensor_that_is_mostly_rounding_is_compared_by_the_longest_of_its_kind() -> None:
    found, plain = build_tensors(), build_tensors()
    longest = float(plain["parameter/a"].norm())
    plain["parameter/b"] = torch.zeros(8, 4)
    for share, expected in ((0.9e-5, None), (1.2e-5, "parameter/b")):
        # A hundredth of the longest is the least length that counts.
        found["parameter/b"] = torch.full((8, 4), share * 0.01 * longest / 32**0.5)
        entry = Entry(Action("train", 4), 2.0, 3.0, tensors=found)
        difference = find_difference(7, entry, 2.0, 3.0, plain, FP32)
        assert (None if difference is None else difference.what) == expected


def test_a_few_signs_of_a_sign_update_may_differ_and_no_more() -> None:
    weights = build_tensors()["parameter/a"]
    for flips, expected in ((SIGN_FLIPS, None), (SIGN_FLIPS + 1, "parameter/a")):
        changed = weights.clone()
        changed.view(-1)[:flips] += 2 * 0.01
        assert compare(changes={"parameter/a": changed}, rate=0.01) == expected
    moments = build_tensors()["first_moment/a"].clone()
    moments[0, 0] += 0.01
    assert compare(changes={"first_moment/a": moments}, rate=0.01) == "first_moment/a"


def test_a_basis_is_compared_by_its_angles() -> None:
    name = "left_basis_moment/a"
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    for found, is_equal in ((basis, True), (-basis.flip(-1), True), (basis * 1.01, False)):
        entry = Entry(Action("train", 1), 2.0, 3.0, tensors=build_tensors() | {name: found})
        plain = build_tensors() | {name: basis}
        assert (find_difference(0, entry, 2.0, 3.0, plain, FP32) is None) == is_equal


def test_moments_of_8_bits_are_compared_as_numbers() -> None:
    codes = torch.tensor([[127, -64, 0, 1]], dtype=torch.int8)
    squares = torch.tensor([[255, 128, 0, 1]], dtype=torch.uint8)
    scales = torch.tensor([[2.0, 4.0]])
    found = decode_moments(
        {
            "first_moment/a": codes,
            "scale_of_first_moment/a": scales,
            "second_moment/a": squares,
            "scale_of_second_moment/a": scales,
            "parameter/a": torch.ones(1, dtype=torch.bfloat16),
        }
    )
    assert found.keys() == {"first_moment/a", "second_moment/a", "parameter/a"}
    expected = [[2.0, -2 * (64 / 127) ** 2, 0.0, 4 * (1 / 127) ** 2]]
    torch.testing.assert_close(found["first_moment/a"], torch.tensor(expected))
    expected = [[2.0, 2 * (128 / 255) ** 4, 0.0, 4 * (1 / 255) ** 4]]
    torch.testing.assert_close(found["second_moment/a"], torch.tensor(expected))
    assert found["parameter/a"].dtype == torch.float32


def test_actions_are_those_that_were_expected_in_their_order() -> None:
    actions = [Action("train", 1), Action("save", 1), Action("train", 2)]
    assert find_action_difference(actions, actions) is None
    for found in (
        actions[:2],
        [*actions, Action("evaluate", 2)],
        [actions[1], actions[0], actions[2]],
        [actions[0], actions[1], replace(actions[2], is_applied=False)],
        [actions[0], replace(actions[1], run=1), actions[2]],
    ):
        difference = find_action_difference(found, actions)
        assert difference is not None
        assert found[: difference.place] == actions[: difference.place]
        assert difference.place < 3 or len(found) > 3


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"precision": "fp32"}}, FP32),
        ({"train": {"precision": "bf16"}}, BF16),
        ({"train": {"precision": "fp16"}}, FP16),
        (
            {"train": {"precision": "fp32"}, "optimizer": {"kind": "adamw", "moments": "bf16"}},
            BF16_MOMENTS,
        ),
        (
            {"train": {"precision": "fp32"}, "optimizer": {"kind": "adamw", "moments": "int8"}},
            INT8_MOMENTS,
        ),
        ({"train": {"precision": "fp32"}, "optimizer": {"kind": "muon"}}, FP32),
    ],
)
def test_bands_follow_the_dtypes(sections: dict[str, dict[str, Any]], expected: Bands) -> None:
    config = RunConfig.model_validate(sections)
    assert select_bands(config) == expected
    wider = select_bands(config, is_corrected=False)
    # In 16 bits each step begins with the state of the run.
    assert wider == UNCORRECTED.get(expected, expected)
    assert (wider == expected) == (expected in (BF16, FP16))
    assert all(getattr(wider, name) >= getattr(expected, name) for name in ("loss", "moments"))


@pytest.mark.parametrize(
    "choice",
    [
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}},
        {"attention": {"kind": "lsh"}, "position": {"kind": "none"}},
    ],
    ids=["experts", "buckets of a hash"],
)
def test_rounding_explains_more_where_a_token_may_have_made_another_choice(
    choice: dict[str, Any],
) -> None:
    model = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    train = {"precision": "fp32"}
    dense = RunConfig.model_validate({"train": train, "model": model})
    sparse = RunConfig.model_validate({"train": train, "model": model | choice})
    assert select_bands(dense) == FP32
    step = select_bands(sparse)
    assert replace(step, widest=FP32.widest) == FP32
    bands = select_bands(sparse, is_corrected=False)
    assert replace(bands, widest=UNCORRECTED[FP32].widest) == UNCORRECTED[FP32]
    moved = {"first_moment/a": build_tensors()["first_moment/a"] * 1.1}
    rounding = {"first_moment/a": 0.2 * float(build_tensors()["first_moment/a"].norm())}
    for choosing in (step, bands):
        assert compare(changes=moved, rounding=rounding, bands=choosing) is None
        assert compare(changes=moved, bands=choosing) == "first_moment/a"
    assert compare(changes=moved, rounding=rounding, bands=FP32) == "first_moment/a"
    # Even so it explains no gradient that is missing.
    gone = {"first_moment/a": torch.zeros_like(build_tensors()["first_moment/a"])}
    large = {"first_moment/a": 5 * rounding["first_moment/a"]}
    assert compare(changes=gone, rounding=large, bands=bands) == "first_moment/a"
    found = compare(changes=moved, rounding=rounding, bands=select_bands(dense, is_corrected=False))
    assert found == "first_moment/a"

    # In 16 bits a step may be beyond the planted errors by half of them.
    half = {"train": {"precision": "bf16"}}
    far = {"first_moment/a": build_tensors()["first_moment/a"] * 1.6}
    planted = {"first_moment/a": 0.45 * float(build_tensors()["first_moment/a"].norm())}
    for layers, expected in ((model | choice, None), (model, "first_moment/a")):
        bands = select_bands(RunConfig.model_validate(half | {"model": layers}))
        assert compare(changes=far, rounding=planted, bands=bands) == expected


def test_rounding_explains_what_it_moves_by_as_much_and_nothing_else() -> None:
    moved = {"parameter/a": build_tensors()["parameter/a"] * 1.0004}
    apart = 4e-4 * float(build_tensors()["parameter/a"].norm())
    assert compare(changes=moved) == "parameter/a"
    assert compare(changes=moved, rounding={"parameter/a": 1.01 * apart}) is None
    assert compare(changes=moved, rounding={"parameter/a": 0.99 * apart}) == "parameter/a"
    assert compare(changes=moved, rounding={"parameter/b": 9.0, LOSS: 9.0}) == "parameter/a"
    assert compare(loss=2.0004, rounding={LOSS: 5e-4}) is None
    assert compare(loss=2.0004, rounding={NORM: 5e-4}) == LOSS
    assert compare(norm=3.0004, rounding={NORM: 5e-4}) is None


def test_rounding_that_is_blown_up_explains_nothing_in_fp32() -> None:
    moved = {"parameter/a": build_tensors()["parameter/a"] * 1.01}
    blown_up = {"parameter/a": 100.0, LOSS: 100.0}
    assert compare(changes=moved, rounding=blown_up) == "parameter/a"
    assert compare(loss=2.02, rounding=blown_up) == LOSS
    # Over eleven steps by up to three percent.
    assert compare(changes=moved, rounding=blown_up, bands=UNCORRECTED[FP32]) is None
    # In 16 bits a token may take another expert.
    assert compare(changes={"parameter/a": -moved["parameter/a"]}, bands=BF16) == "parameter/a"
    assert (
        compare(changes={"parameter/a": -moved["parameter/a"]}, rounding=blown_up, bands=BF16)
        is None
    )


def test_soap_has_bands_for_what_its_basis_turns_and_for_nothing_else() -> None:
    sections = {"train": {"precision": "fp32"}, "optimizer": {"kind": "soap"}}
    config = RunConfig.model_validate(sections)
    bands = select_bands(config)
    assert (bands.loss, bands.norm, bands.moments) == (FP32.loss, FP32.norm, FP32.moments)
    # Squares are those of the gradient that the run's first moment contains, in its own basis.
    squares = {"second_moment/a": build_tensors()["second_moment/a"] * 1.01}
    assert compare(changes=squares, bands=bands) == "second_moment/a"
    first = {"first_moment/a": build_tensors()["first_moment/a"] * 1.0001}
    assert compare(changes=first, bands=bands) == "first_moment/a"
    wider = select_bands(config, is_corrected=False)
    assert FP32.weights < bands.weights < wider.weights < 0.1
    assert compare(changes=squares, bands=wider) is None

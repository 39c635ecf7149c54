"""Tensor and context axes against one process: loss, norm, expert report and every parameter's
gradient in fp32.
"""

from typing import Any

import pytest

from llmsys.config.parallel_layout import ParallelLayout
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import all_gradients, check_gradients, compute_plain_gradients

TENSOR, CONTEXT = ParallelLayout(tensor=2), ParallelLayout(context=2)
RING = ParallelLayout(context=2, context_kind="ring")
CASES: dict[int, list[tuple[Any, ...]]] = {
    2: [
        ("llama", TENSOR),
        ("tied, own head_dim, one key", TENSOR),
        ("tied, own head_dim, one key", CONTEXT),
        ("learned, offset", TENSOR),
        ("learned, offset", CONTEXT),
        ("sinusoidal", CONTEXT),
        ("relative bias, windows", TENSOR),
        ("qk norm of heads", TENSOR),
        ("qk norm of all", CONTEXT),
        ("sinks, softcap, alibi", TENSOR),
        ("sinks, softcap, alibi", CONTEXT),
        ("windows, own theta", CONTEXT),
        ("latent", TENSOR),
        ("latent, no query latent", CONTEXT),
        ("scaled embedding, capped head", TENSOR),
        ("parallel, two norms", TENSOR),
        ("feed-forward clamped", TENSOR),
        ("universal, rope", TENSOR),
        ("universal, adaptive", CONTEXT),
        ("bert", TENSOR),
        ("bert", CONTEXT),
        ("experts, evenness over the batch", ParallelLayout(tensor=2, expert=2)),
        ("experts, evenness of sequences", TENSOR),
        ("experts, all tokens on one", ParallelLayout(tensor=2, expert=2)),
        ("experts, latent attention, multi-token prediction", ParallelLayout(context=2, expert=2)),
        ("experts, evenness of sequences", CONTEXT, "selective"),
        ("experts, latent attention, multi-token prediction", TENSOR, "full"),
        ("windows, own theta", RING),
        (
            "experts, latent attention, multi-token prediction",
            RING.model_copy(update={"expert": 2}),
            "selective",
        ),
        ("fp8, experts", CONTEXT),
        ("gated attention", TENSOR),
        ("gated attention", CONTEXT),
        ("gated delta", CONTEXT),
        ("mamba2", CONTEXT),
        ("one sub-layer a layer, experts", ParallelLayout(context=2, expert=2), "full"),
        ("attention alone", TENSOR, "selective"),
        ("attention beside states", CONTEXT, "full"),
        ("attention beside states", RING),
        ("kimi delta, experts, latent attention", ParallelLayout(context=2, expert=2), "selective"),
        ("kimi delta, experts, latent attention", RING.model_copy(update={"expert": 2}), "full"),
        (
            "gated delta, experts, multi-token prediction",
            ParallelLayout(context=2, expert=2),
            "selective",
        ),
        (
            "gated delta, experts, multi-token prediction",
            RING.model_copy(update={"expert": 2}),
            "selective",
        ),
    ],
    4: [
        ("llama", TENSOR),
        ("tied, own head_dim, one key", ParallelLayout(tensor=2, context=2)),
        ("learned, offset", ParallelLayout(tensor=4)),
        ("relative bias", ParallelLayout(tensor=2, context=2)),
        ("qk norm of all", ParallelLayout(tensor=2, context=2)),
        ("qk norm of all", ParallelLayout(tensor=4)),
        ("alibi encoder", ParallelLayout(context=4)),
        ("latent, no query latent", ParallelLayout(tensor=2, context=2)),
        ("bert", ParallelLayout(tensor=2, replicate=2)),
        ("experts, all tokens on one", ParallelLayout(tensor=2, expert=4)),
        (
            "experts, latent attention, multi-token prediction",
            ParallelLayout(tensor=2, context=2, expert=2),
        ),
        ("experts, evenness of sequences", ParallelLayout(context=2, replicate=2, expert=2)),
        ("sinks, softcap, alibi", ParallelLayout(context=4, context_kind="ring")),
        ("qk norm of all", ParallelLayout(tensor=2, context=2, context_kind="ring")),
        ("latent, no query latent", ParallelLayout(context=4, context_kind="ulysses_ring")),
        ("gated attention", ParallelLayout(tensor=2, context=2)),
        ("gated delta", ParallelLayout(context=4), "full"),
        ("gated delta", ParallelLayout(context=4, context_kind="ring"), "full"),
        ("gated delta", ParallelLayout(context=4, context_kind="ulysses_ring")),
        ("kimi delta", ParallelLayout(context=4), "full"),
        ("kimi delta", ParallelLayout(context=4, context_kind="ring"), "selective"),
        ("kimi delta", ParallelLayout(context=4, context_kind="ulysses_ring")),
        ("mamba2", ParallelLayout(context=4, context_kind="ring")),
        ("mamba2", ParallelLayout(context=4, context_kind="ulysses_ring"), "selective"),
    ],
}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", sorted(CASES))
def test_axes_change_no_gradient(world_size: int) -> None:
    cases = CASES[world_size]
    for (name, *layout), found in zip(
        cases, run_ranks(all_gradients, world_size, cases)[0], strict=True
    ):
        # One scale is for 128 rows of a rank: gradients of fp8 weights are rounded with other
        # scales on two ranks.
        check_gradients(
            (name, layout), found, compute_plain_gradients(name), 0.04 if "fp8" in name else 2e-5
        )


# Parameters that no axis splits, of which each rank knows a part of the gradient: a sink of its own
# heads, the bias after a row-parallel product, a norm over the heads of all ranks, a key that ranks
# share.
SMALL_PARAMETERS = [
    ("sinks, softcap, alibi", TENSOR),
    ("learned, offset", TENSOR),
    ("qk norm of all", TENSOR),
    ("tied, own head_dim, one key", TENSOR),
]
# What belongs to a token: padding that no expert counts, and the targets further ahead.
TOKENS = [
    ("experts, evenness of sequences", TENSOR),
    ("experts, latent attention, multi-token prediction", CONTEXT),
]


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [SMALL_PARAMETERS, TOKENS], ids=["small parameters", "tokens"])
def test_what_no_axis_splits_has_the_gradient_of_all_ranks_and_its_part_of_the_norm(
    cases: list[tuple[Any, ...]],
) -> None:
    for case, gradients in zip(cases, run_ranks(all_gradients, 2, cases)[0], strict=True):
        check_gradients(case, gradients, compute_plain_gradients(case[0]), 2e-5)

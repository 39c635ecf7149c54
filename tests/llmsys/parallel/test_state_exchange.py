"""Layers with a state over context ranks: steps equal those of one process, and what could be lost
on the way shows.

With initial decays no state would live through a rank's positions and nothing were tested, so rates
are drawn small (`build_named_model`), and one row is a document over all ranks.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.parallel.state_exchange import HeadExchange
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import (
    check_gradients,
    compute_plain_gradients,
    gather_sharded_gradients,
)

ULYSSES = ParallelLayout(context=4)
RING = ParallelLayout(context=4, context_kind="ring")
BOTH = ParallelLayout(context=4, context_kind="ulysses_ring")


def forget_tail(self: HeadExchange, x_BLW: Tensor, size: int) -> Tensor:
    return fetch_tail(self, x_BLW, size) * 0


def forget_state(self: HeadExchange, matrix: Tensor, offset: Tensor) -> Tensor:
    return find_state(self, matrix, offset) * 0


def forget_matrices(self: HeadExchange, matrix: Tensor, offset: Tensor) -> Tensor:
    """Only the rank before counts."""
    return find_state(self, matrix * 0, offset)


def take_first_heads(self: HeadExchange, heads: int) -> slice:
    return slice(0, max(1, heads // self.sharding.ulysses.size))


def take_first_segments(self: HeadExchange, x_BT: Tensor, before: int) -> Tensor:
    return x_BT[:, : before + (x_BT.shape[1] - before) // self.sharding.ring.size]


fetch_tail, find_state = HeadExchange.fetch_tail, HeadExchange.find_state
FAULTS = {
    "the convolution begins anew on each rank": (RING, "fetch_tail", forget_tail),
    "states begin anew on each rank": (RING, "find_state", forget_state),
    "a state goes no further than the next rank": (RING, "find_state", forget_matrices),
    "ranks take the weights of other heads": (ULYSSES, "get_head_slice", take_first_heads),
    "ranks take the documents of other positions": (BOTH, "select_neighbourhood",
                                                    take_first_segments),
}  # fmt: skip


def run_faulty_steps(rank: int, names: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        layout, method, fault = FAULTS[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeadExchange, method, fault)
            found.append(gather_sharded_gradients(rank, "gated delta", layout))
    return [{key: value.numpy() for key, value in one.items()} for one in found] * (rank == 0)


@pytest.mark.distributed
def test_what_is_lost_between_ranks_shows() -> None:
    expected = compute_plain_gradients("gated delta")
    for name, found in zip(FAULTS, run_ranks(run_faulty_steps, 4, list(FAULTS))[0], strict=True):
        with pytest.raises(AssertionError, match="is off by"):
            check_gradients(name, found, expected, 1e-2)

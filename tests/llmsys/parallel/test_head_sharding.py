"""The heads and rows of each rank, whatever number of heads shares a key: all of them, once, and
with their own key.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from llmsys.parallel.context_parallel import KeyValueHeadSharding
from llmsys.parallel.sequence_sharding import SequenceSharding

HEADS, HEAD_DIM = 8, 3
RANKS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (8, 1)]


def build_axis(size: int, rank: int) -> Any:
    return SimpleNamespace(size=size, rank=rank)


def build_sharding(tensor: tuple[int, int], ulysses: tuple[int, int]) -> SequenceSharding:
    """The sharding of one rank in training, from (size, rank) of its axes, without processes."""
    sharding = SequenceSharding.__new__(SequenceSharding)
    sharding._model = cast(Any, SimpleNamespace(training=True))
    sharding.tensor, sharding.ulysses = build_axis(*tensor), build_axis(*ulysses)
    sharding.sequence = build_axis(tensor[0] * ulysses[0], tensor[1] * ulysses[0] + ulysses[1])
    return sharding


@pytest.mark.parametrize(("tensor", "ulysses"), RANKS)
def test_ranks_attend_with_the_heads_of_the_rows_that_they_hold(tensor: int, ulysses: int) -> None:
    seen = []
    for rank in range(tensor):
        # The tensor axis splits the rows of a projection, and the ulysses axis what it gives.
        rows = list(range(HEADS))[rank * HEADS // tensor : (rank + 1) * HEADS // tensor]
        for other in range(ulysses):
            own = build_sharding((tensor, rank), (ulysses, other)).get_head_slice(HEADS)
            heads = list(range(HEADS))[own]
            assert heads == rows[other * len(rows) // ulysses : (other + 1) * len(rows) // ulysses]
            seen += heads
    assert sorted(seen) == list(range(HEADS))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize(("tensor", "ulysses"), RANKS)
def test_a_rank_has_the_keys_of_its_queries_and_no_others(
    tensor: int, ulysses: int, groups: int
) -> None:
    for rank in range(tensor):
        for other in range(ulysses):
            sharding = build_sharding((tensor, rank), (ulysses, other))
            shared = KeyValueHeadSharding(HEADS, groups, HEAD_DIM, sharding)
            queries = range(HEADS)[sharding.get_head_slice(HEADS)]
            needed = sorted({query * groups // HEADS for query in queries})
            assert list(range(groups))[shared.get_local_slice()] == needed
            channels = [
                group * HEAD_DIM + channel for group in needed for channel in range(HEAD_DIM)
            ]
            assert list(range(groups * HEAD_DIM))[shared.get_channel_slice()] == channels


@pytest.mark.parametrize("groups", [1, 2])
def test_a_tensor_rank_uses_the_row_of_the_key_that_its_queries_share(groups: int) -> None:
    rows = torch.arange(groups * HEAD_DIM)
    for rank in range(4):
        shared = KeyValueHeadSharding(HEADS, groups, HEAD_DIM, build_sharding((4, rank), (1, 0)))
        [group] = {query * groups // HEADS for query in range(2 * rank, 2 * rank + 2)}
        assert torch.equal(
            shared.select_tensor_rank_rows(rows), rows[group * HEAD_DIM : (group + 1) * HEAD_DIM]
        )


@pytest.mark.parametrize("groups", [3, 6])
def test_a_key_whose_queries_are_on_two_ranks_is_on_both(groups: int) -> None:
    heads = 12
    for rank in range(4):
        shared = KeyValueHeadSharding(heads, groups, HEAD_DIM, build_sharding((1, 0), (4, rank)))
        needed = sorted({query * groups // heads for query in range(3 * rank, 3 * rank + 3)})
        assert list(range(groups))[shared.get_local_slice()] == needed

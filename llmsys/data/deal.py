"""Who handles which window of a step: so that all ranks do about the same work in attention, or one after another.

A window always has as many tokens as another, but attention within documents costs the sum of their squared lengths:
a window of one long document costs as much as many of short ones. Ranks wait for each other in every micro-batch.
Reads the work of a step's windows, gives their places; promises that this is a function of the step alone, whoever
asks, and that every window has one place. What a step sees never changes, only the order of its sums.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

# N windows of a step, R data ranks, M micro-batches of a rank, S windows of a micro-batch: N = R * M * S


def assign_sequentially(ranks: int, micro_batches: int, size: int) -> NDArray[np.int64]:
    """Places in the step, (R, M, S): each rank takes its windows one after another."""
    return np.arange(ranks * micro_batches * size).reshape(ranks, micro_batches, size)


def assign_balanced(work_N: NDArray[np.int64], ranks: int, micro_batches: int) -> NDArray[np.int64]:
    """Places in the step, (R, M, S), such that micro-batches cost about the same.

    The costliest window left goes to the cheapest micro-batch that has room (Graham 1969, longest processing time
    first, with room for S). Then micro-batches of like cost meet in the same round, since there ranks wait for each
    other, and in each round the rank that did least so far takes the costliest.
    """
    size = len(work_N) // (ranks * micro_batches)
    members: list[list[int]] = [[] for _ in range(ranks * micro_batches)]
    cheapest = [(0, number) for number in range(len(members))]
    for window in np.lexsort((np.arange(len(work_N)), -work_N)).tolist():
        cost, number = heapq.heappop(cheapest)
        members[number].append(window)
        if len(members[number]) < size:
            heapq.heappush(cheapest, (cost + int(work_N[window]), number))
    bins = np.sort(np.array(members), axis=1)
    costs = work_N[bins].sum(1)
    rounds = bins[np.lexsort((bins[:, 0], -costs))].reshape(micro_batches, ranks, size)
    dealt, done = np.empty((ranks, micro_batches, size), np.int64), np.zeros(ranks, np.int64)
    for number, meeting in enumerate(rounds):
        takers = np.lexsort((np.arange(ranks), done))
        dealt[takers, number] = meeting
        done[takers] += work_N[meeting].sum(1)
    return dealt


def compute_imbalance(work_N: NDArray[np.int64], dealt_RMS: NDArray[np.int64]) -> float:
    """How long the ranks' attention takes together, over what it would if all micro-batches cost the same; 1 is even.

    In every round all wait for the costliest micro-batch of the round.
    """
    costs_RM = work_N[dealt_RMS].sum(2)
    return float(costs_RM.max(0).sum() * len(costs_RM) / max(int(costs_RM.sum()), 1))

"""What several processes do together: gathers, reductions and exchanges at a few sizes, into a bandwidth and a latency.

Needs a process group. Every rank runs the same; the slowest one counts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from llmsys.calibrate.clock import measure_median_seconds
from llmsys.estimate.device import Interconnect


def measure_link_seconds(sizes_bytes: Sequence[int], device: torch.device) -> list[tuple[float, float, float]]:
    """(bytes a rank sends, hops, seconds) of an all-gather, an all-reduce and an all-to-all at each size."""
    ranks, found = dist.get_world_size(), []
    for size in sizes_bytes:
        elements = size // 4 // ranks * ranks
        whole, other = (torch.zeros(elements, device=device) for _ in range(2))
        part = torch.zeros(elements // ranks, device=device)
        share = elements * 4 * (ranks - 1) / ranks
        works: list[tuple[float, float, Callable[[], object]]] = [
            (share, ranks - 1, partial(dist.all_gather_into_tensor, whole, part)),
            (2 * share, 2 * (ranks - 1), partial(dist.all_reduce, whole)),
            (share, 1, partial(dist.all_to_all_single, other, whole)),
        ]
        found += [(sent, hops, _measure_slowest_rank(work, device)) for sent, hops, work in works]
    return found


def fit_interconnect(measured: Sequence[tuple[float, float, float]]) -> Interconnect:
    """Bandwidth of the largest transfers, and the latency that is left of the smallest ones."""
    largest = max(sent for sent, _, _ in measured)
    bandwidth = median(sent / seconds for sent, _, seconds in measured if sent >= largest / 2)
    smallest = min(sent for sent, _, _ in measured)
    rest = [max(0.0, seconds - sent / bandwidth) / hops for sent, hops, seconds in measured if sent <= 2 * smallest]
    return Interconnect(bandwidth=bandwidth, latency_seconds=median(rest))


def _measure_slowest_rank(work: Callable[[], object], device: torch.device) -> float:
    """Every rank runs the same number of times, or they would wait for each other forever."""
    dist.barrier()
    seconds = torch.tensor([measure_median_seconds(work, device, budget_seconds=0.0)], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)

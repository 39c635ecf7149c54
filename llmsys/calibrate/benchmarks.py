"""Measure what one device and its links do: matmuls, attention, bandwidths, launch times,
collectives.

Every measurement is the median of repeated runs after a warm-up. Rates are FLOP/s or bytes per
second, by dtype and shape. `BenchmarkSizes` holds the shapes, so that a test and a large machine
run the same code.

Invariants:
- The device has finished before a clock is read.
- Collectives need a process group; every rank runs the same number of repeats, and the slowest rank
  counts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from llmsys.estimate.device_profile import Interconnect, Number

Work = Callable[[], object]


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has finished its queue.

    Args:
        device: The device; a CPU has none.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_median_seconds(
    work: Work, device: torch.device, budget_seconds: float = 0.5, most: int = 50
) -> float:
    """Return the median seconds of `work`: one warm-up run, at least three runs, and as many as fit
    the budget.

    Args:
        work: what is measured.
        device: device that it runs on.
        budget_seconds: time for more than three runs.
        most: largest number of runs.

    Returns:
        Seconds of one run.
    """
    work()
    synchronize_device(device)
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < most):
        began = time.perf_counter()
        work()
        synchronize_device(device)
        times.append(time.perf_counter() - began)
    return median(times)


def measure_host_launch_seconds(work: Work, device: torch.device, times: int = 200) -> float:
    """Measure how long the host takes to launch a kernel while the device may still be busy.

    Args:
        work: Launches a tiny kernel.
        device: The device.
        times: Launches.

    Returns:
        Seconds of one launch.
    """
    work()
    synchronize_device(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    started = time.perf_counter() - began
    synchronize_device(device)
    return started / times


DTYPES: dict[Number, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class BenchmarkSizes:
    """Shapes to measure: matmuls are (rows, inner, columns), attention is (sequences, heads,
    positions, channels).
    """

    matmul_shapes: tuple[tuple[int, int, int], ...]
    grouped_matmul_shapes: tuple[int, int, int, int]  # experts, rows of each, inner, columns
    attention: tuple[int, int, int, int]
    memory_elements: int
    gathered_bytes: tuple[int, ...]
    dtypes: tuple[Number, ...]
    budget_seconds: float


LARGE = BenchmarkSizes(
    matmul_shapes=(
        (4096, 1024, 4096),
        (8192, 4096, 4096),
        (8192, 4096, 14336),
        (16384, 8192, 8192),
        (8192, 8192, 28672),
    ),
    grouped_matmul_shapes=(16, 1024, 4096, 1536),
    attention=(2, 32, 4096, 128),
    memory_elements=1 << 28,
    gathered_bytes=(1 << 20, 1 << 24, 1 << 28),
    dtypes=("bf16", "fp16", "fp32"),
    budget_seconds=0.7,
)
# A few cores: the same questions, at the sizes that such machines train.
SMALL = BenchmarkSizes(
    matmul_shapes=(
        (512, 256, 256),
        (1024, 512, 512),
        (2048, 512, 1408),
        (2048, 1024, 1024),
        (1024, 1024, 4096),
    ),
    grouped_matmul_shapes=(8, 256, 512, 704),
    attention=(2, 8, 512, 64),
    memory_elements=1 << 24,
    gathered_bytes=(1 << 16, 1 << 20, 1 << 24),
    dtypes=("fp32", "bf16"),
    budget_seconds=0.7,
)


@dataclass(frozen=True)
class KernelMeasurements:
    """Measurements of one device. Rates are per second; matmuls are (FLOPs, bytes, seconds) by
    dtype.
    """

    matmuls: dict[Number, list[tuple[float, float, float]]]
    grouped_rate: float
    attention_rate: float
    attention_backward_rate: float
    copy_bandwidth: float
    elementwise_bandwidth: float
    host_bandwidth: float
    launch_seconds: float
    host_seconds: float


def measure_matmuls(
    sizes: BenchmarkSizes, number: Number, device: torch.device
) -> Iterator[tuple[float, float, float]]:
    """Measure products of the shapes of a training step.

    Args:
        sizes: Shapes and repetitions.
        number: Dtype of the operands.
        device: The device.

    Yields:
        FLOPs, bytes and seconds of each matmul.
    """
    dtype = DTYPES[number]
    for rows, inner, columns in sizes.matmul_shapes:
        left, right = (
            _sample_tensor((rows, inner), dtype, device),
            _sample_tensor((inner, columns), dtype, device),
        )
        seconds = measure_median_seconds(
            lambda left=left, right=right: left @ right,  # type: ignore[misc]
            device,
            sizes.budget_seconds,
        )
        moved = dtype.itemsize * (rows * inner + inner * columns + rows * columns)
        yield 2.0 * rows * inner * columns, float(moved), seconds


def measure_grouped_matmul_rate(
    sizes: BenchmarkSizes, number: Number, device: torch.device
) -> float:
    """Measure the grouped products of many experts, forward and backward, as the model runs them.

    Args:
        sizes: Shapes and repetitions.
        number: Dtype of the operands.
        device: The device.

    Returns:
        FLOP/s.
    """
    experts, rows, inner, columns = sizes.grouped_matmul_shapes
    x_MD = _sample_tensor((experts * rows, inner), DTYPES[number], device).requires_grad_()
    weight_EDF = _sample_tensor((experts, inner, columns), DTYPES[number], device).requires_grad_()
    gradient_MF = _sample_tensor((experts * rows, columns), DTYPES[number], device)
    offsets_E = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows

    def forward() -> Tensor:
        if number == "bf16":
            return F.grouped_mm(x_MD, weight_EDF, offs=offsets_E)
        return torch.cat(
            [part @ weight for part, weight in zip(x_MD.split(rows), weight_EDF, strict=True)]
        )

    def compute_gradients() -> object:
        return torch.autograd.grad(forward(), (x_MD, weight_EDF), gradient_MF)

    return (
        3
        * 2.0
        * experts
        * rows
        * inner
        * columns
        / measure_median_seconds(compute_gradients, device, sizes.budget_seconds)
    )


def measure_attention_rates(
    sizes: BenchmarkSizes, number: Number, device: torch.device
) -> tuple[float, float]:
    """Measure causal attention.

    Args:
        sizes: Shapes and repetitions.
        number: Dtype of the operands.
        device: The device.

    Returns:
        FLOP/s forward and backward, counting only visible query-key pairs.
    """
    sequences, heads, positions, channels = sizes.attention
    shape = (sequences, heads, positions, channels)
    q, k, v = (_sample_tensor(shape, DTYPES[number], device).requires_grad_() for _ in range(3))
    # Two products over the visible pairs, of two FLOPs each.
    operations = 4.0 * sequences * heads * channels * positions * (positions + 1) / 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def compute_gradients() -> None:
        torch.autograd.grad(forward().sum(), (q, k, v))

    alone = measure_median_seconds(forward, device, sizes.budget_seconds)
    # A difference of two times: noise must not bring it near zero.
    backward = max(
        measure_median_seconds(compute_gradients, device, sizes.budget_seconds) - alone, alone / 2
    )
    # Backward has five products where forward has two.
    return operations / alone, 2.5 * operations / backward


def measure_bandwidths(sizes: BenchmarkSizes, device: torch.device) -> tuple[float, float]:
    """Measure the memory of a device.

    Args:
        sizes: Shapes and repetitions.
        device: The device.

    Returns:
        Bytes per second of a copy, and of the sum of two tensors into a third.
    """
    x, y, z = (_sample_tensor((sizes.memory_elements,), torch.float32, device) for _ in range(3))
    copied = measure_median_seconds(lambda: y.copy_(x), device, sizes.budget_seconds)
    summed = measure_median_seconds(lambda: torch.add(x, y, out=z), device, sizes.budget_seconds)
    # fp32: one read and one write, and two reads and one write.
    return 8.0 * sizes.memory_elements / copied, 12.0 * sizes.memory_elements / summed


def measure_host_bandwidth(sizes: BenchmarkSizes, device: torch.device) -> float:
    """Measure the copy from pinned host memory to a device.

    Args:
        sizes: Shapes and repetitions.
        device: The device; on a CPU a copy in memory is measured.

    Returns:
        Bytes per second.
    """
    held = torch.zeros(sizes.memory_elements, pin_memory=device.type == "cuda")
    there = torch.empty(sizes.memory_elements, device=device)
    return (
        4.0
        * sizes.memory_elements
        / measure_median_seconds(lambda: there.copy_(held), device, sizes.budget_seconds)
    )


def measure_launch_seconds(device: torch.device) -> tuple[float, float]:
    """Measure the cost of tiny kernels.

    Args:
        device: The device.

    Returns:
        Seconds between two of them on the device, and the host's seconds to launch one.
    """
    x = torch.zeros(16, device=device)
    host = measure_host_launch_seconds(lambda: x.add_(1), device)
    if device.type != "cuda":
        return host, host
    # A graph is launched once, which leaves the time of the device between kernels.
    graph = torch.cuda.CUDAGraph()
    times = 200
    with torch.cuda.graph(graph):
        for _ in range(times):
            x.add_(1)
    synchronize_device(device)
    return measure_median_seconds(graph.replay, device) / times, host


def _sample_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers: products of zeros draw less power and so run faster than a training
    step's.
    """
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def measure_link_seconds(
    sizes_bytes: Sequence[int], device: torch.device
) -> list[tuple[float, float, float]]:
    """Measure an all-gather, an all-reduce and an all-to-all at each size. Collective.

    Args:
        sizes_bytes: Bytes of one rank's tensor.
        device: Device of the tensors, which chooses NCCL or gloo.

    Returns:
        (bytes that a rank sends, hops of its ring or exchange, seconds of the slowest rank) for
        each collective and size.
    """
    ranks = dist.get_world_size()
    found = []
    for size in sizes_bytes:
        elements = size // 4 // ranks * ranks
        whole, other = (torch.zeros(elements, device=device) for _ in range(2))
        part = torch.zeros(elements // ranks, device=device)
        share = elements * 4 * (ranks - 1) / ranks
        # Bytes that a rank sends, and messages in a row: gather and reduce go around a ring.
        works: list[tuple[float, float, Callable[[], object]]] = [
            (share, ranks - 1, partial(dist.all_gather_into_tensor, whole, part)),
            (2 * share, 2 * (ranks - 1), partial(dist.all_reduce, whole)),
            (share, 1, partial(dist.all_to_all_single, other, whole)),
        ]
        found += [(sent, hops, _measure_slowest_rank(work, device)) for sent, hops, work in works]
    return found


def fit_interconnect(measured: Sequence[tuple[float, float, float]]) -> Interconnect:
    """Fit bandwidth and latency to measured collectives.

    Args:
        measured: Bytes sent, hops and seconds of each.

    Returns:
        The bandwidth of the largest transfers, and the latency that remains of the smallest.
    """
    largest = max(sent for sent, _, _ in measured)
    bandwidth = median(sent / seconds for sent, _, seconds in measured if sent >= largest / 2)
    smallest = min(sent for sent, _, _ in measured)
    rest = [
        max(0.0, seconds - sent / bandwidth) / hops
        for sent, hops, seconds in measured
        if sent <= 2 * smallest
    ]
    return Interconnect(bandwidth=bandwidth, latency_seconds=median(rest))


def _measure_slowest_rank(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the slowest rank. Collective: repeats are fixed, or ranks would wait
    forever.
    """
    dist.barrier()
    seconds = torch.tensor(
        [measure_median_seconds(work, device, budget_seconds=0.0)], device=device
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)

"""Seconds of a piece of work on a device: warmed up, repeated, the median.

Reads a function without arguments; gives seconds. Promises that the device has finished before a clock is read.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

Work = Callable[[], object]


def synchronize_device(device: torch.device) -> None:
    """Wait until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_median_seconds(work: Work, device: torch.device, budget_seconds: float = 0.5, most: int = 50) -> float:
    """Median seconds of `work`: after one run to warm up, at least three runs, as many as fit the budget."""
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
    """Seconds the host takes to start `work`, a tiny kernel, while the device may still be busy with others."""
    work()
    synchronize_device(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    started = time.perf_counter() - began
    synchronize_device(device)
    return started / times

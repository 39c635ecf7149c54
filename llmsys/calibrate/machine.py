"""The whole of `llmsys calibrate` on one process: which device, which sizes, which group."""

import os

import torch
import torch.distributed as dist

from llmsys.calibrate.kernels import LARGE, SMALL, BenchmarkSizes
from llmsys.calibrate.measure import calibrate_device
from llmsys.estimate.device import DeviceProfile
from llmsys.parallel.rendezvous import bind_rendezvous


def measure_machine(
    *, sizes: BenchmarkSizes | None = None, watts: float | None = None, base: DeviceProfile | None = None
) -> DeviceProfile | None:
    """The profile; None on ranks other than 0. Joins a process group when the environment names one."""
    device = _choose_device()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if several:
        bind_rendezvous()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        found = calibrate_device(sizes or (LARGE if device.type == "cuda" else SMALL), device, watts=watts, base=base)
        return found if not dist.is_initialized() or dist.get_rank() == 0 else None
    finally:
        if several:
            dist.destroy_process_group()


def _choose_device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device

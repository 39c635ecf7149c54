"""Measure how long a save stalls training, in the foreground and in the background, and how it
slows concurrent steps.

    python tools/bench/checkpoint.py --megabytes 400 --processes 2

Each process holds its share of a state of that size (as FSDP2 would shard it) on the accelerator if
there is one, and "trains" by matmuls. Saves use the trainer's CheckpointSaver. Stall is the time
from the call to its return; "steps beside it" is the extra time of steps until the save was on
disk.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine.engine import EngineState
from llmsys.train.checkpoint_saver import CheckpointSaver

ROWS = 4096
STEP_SECONDS = 0.1


def main() -> None:
    """Read the command line, start the ranks, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=400, help="of state, over all processes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3, help="of each kind; the table has medians")
    parser.add_argument(
        "--folder", type=Path, help="where to save; default: the system's temporary folder"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        multiprocessing.spawn(_run_rank, (arguments, folder), nprocs=arguments.processes)


def _run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.processes))
    store = dist.FileStore(f"{folder}/store", arguments.processes)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=arguments.processes)
    state = _build_state(arguments.megabytes, device)
    step = _build_step(device)
    alone = statistics.median(_measure_seconds(step) for _ in range(10))
    found = {
        mode: _measure_saves(mode, state, step, alone, arguments.saves, Path(folder))
        for mode in ("sync", "async")
    }
    if rank == 0:
        _print_table(arguments, device, alone, found)
    dist.destroy_process_group()


def _build_state(megabytes: int, device: torch.device) -> dict[str, Tensor]:
    """Return tensors of 16 MB, sharded over the ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    columns = 16 * 2**20 // 4 // ROWS
    local = torch.randn(ROWS // dist.get_world_size(), columns, device=device)
    return {
        f"parameter/{number}": DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
        for number in range(max(1, megabytes // 16))
    }


def _build_step(device: torch.device) -> Any:
    """Return a function that multiplies matrices for about STEP_SECONDS."""
    a = torch.randn(
        512 if device.type == "cpu" else 8192, 512 if device.type == "cpu" else 8192, device=device
    )
    once = min(_measure_seconds(lambda: a @ a) for _ in range(5))
    count = max(1, round(STEP_SECONDS / max(once, 1e-5)))

    def run_products() -> None:
        for _ in range(count):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run_products


def _measure_seconds(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _measure_saves(
    mode: str, state: dict[str, Tensor], step: Any, alone: float, count: int, folder: Path
) -> dict[str, float]:
    """Return seconds: making buffers, stall of a save, all of a save, and the slowdown of
    concurrent steps.
    """
    saver = CheckpointSaver(
        folder / mode, CheckpointConfig.model_validate({"mode": mode, "keep_last": 1})
    )
    prepared = _measure_seconds(lambda: saver.allocate_buffers(EngineState(state, 0)))
    stalls, totals, beside = [], [], []
    for number in range(1, count + 1):
        stalls.append(
            _measure_seconds(lambda n=number: saver.save_state(EngineState(state, n), n, {}))
        )
        saves: list[Any] = []
        extra = 0.0
        while not (saves := saver.pop_finished_saves()):
            extra += _measure_seconds(step) - alone
        saver.finish_saves()
        totals.append(saves[-1].seconds)
        beside.append(extra)
        dist.barrier()
    shutil.rmtree(folder / mode, ignore_errors=True)
    medians = {"stall": stalls, "total": totals, "beside": beside}
    return {
        "prepared": prepared,
        **{name: statistics.median(values) for name, values in medians.items()},
    }


def _print_table(
    arguments: argparse.Namespace, device: torch.device, alone: float, found: dict[str, Any]
) -> None:
    sync, background = found["sync"], found["async"]
    print(
        f"{arguments.megabytes} MB over {arguments.processes} processes, {device.type}, steps of "
        f"{alone:.3f} s\n"
    )
    print("| mode | stall | of a save at once | whole save | steps beside it took longer by |")
    print("|---|---|---|---|---|")
    for mode, numbers in found.items():
        cells = (
            f"{numbers['stall']:.3f} s | {numbers['stall'] / sync['stall']:.1%} | "
            f"{numbers['total']:.2f} s"
        )
        print(f"| {mode} | {cells} | {numbers['beside']:.2f} s |")
    print(f"\nMaking the buffers before the first step took {background['prepared']:.3f} s.")


if __name__ == "__main__":
    main()

"""Runs a function on several real processes joined by gloo, and brings back what each returned or raised."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 240

# Processes are forked from a server that has imported these and done nothing with them: importing torch once for each
# process of each group would cost more than what most tests do.
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on `world_size` fresh processes; the results by rank.

    An exception on any rank fails the test with that rank's number and traceback; a rank that hangs is named.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(sender, store, rank, world_size, dict(os.environ), function, arguments),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            return _answers({receiver: rank for rank, (receiver, _) in enumerate(pipes)})
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(ranks: dict[Connection, int]) -> list[Any]:
    """The results by rank, taken as they come: what one rank raised is told at once, though others then wait for it."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(results) < len(ranks):
        silent = [receiver for receiver, rank in ranks.items() if rank not in results]
        ready = wait(silent, timeout=deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {[ranks[one] for one in silent]} did not answer within {TIMEOUT_SECONDS} s")
        for receiver in ready:
            kind, value = receiver.recv()  # type: ignore[union-attr]
            if kind == "error":
                raise AssertionError(f"rank {ranks[receiver]} raised:\n{value}")
            results[ranks[receiver]] = value
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's is that of its first use
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        sender.send(("result", function(rank, *arguments)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    dist.barrier()

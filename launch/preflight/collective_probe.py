"""Run one process of `llmsys preflight`'s exchange: test an all-reduce and an all-to-all, and
measure their bandwidth.

Started by ssh as `python -m llmsys.launch.preflight.collective_probe TIMEOUT_SECONDS` with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT; prints one line of JSON. Uses NCCL on the first accelerator
of each host, or gloo where there is none.
"""

import datetime
import json
import os
import sys
from typing import Any

from llmsys.launch.process.rank_environment import choose_interface

BYTES_ON_CPU, BYTES_ON_ACCELERATOR = 4 << 20, 64 << 20


def run_probe(timeout_seconds: int) -> dict[str, Any]:
    """Join the process group, check the collectives and measure them. Collective.

    Returns bandwidths in bytes that one host sends, divided by the seconds of the slowest one.
    """
    import torch
    import torch.distributed as dist

    from llmsys.calibrate.benchmarks import measure_link_seconds
    from llmsys.parallel.rendezvous import bind_rendezvous

    choose_interface()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bind_rendezvous()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
    require_correct_collectives(device)
    size = BYTES_ON_ACCELERATOR if device.type == "cuda" else BYTES_ON_CPU
    _, reduced, exchanged = (
        sent / seconds for sent, _, seconds in measure_link_seconds([size], device)
    )
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return {
        "backend": backend.rpartition(":")[2],
        "interface": interface,
        "all_reduce": reduced,
        "all_to_all": exchanged,
    }


def require_correct_collectives(device: Any) -> None:
    """Run both collectives on known numbers; raise RuntimeError when a result is wrong.
    Collective.
    """
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, mine = (
        torch.tensor([rank + 1.0], device=device),
        torch.full((ranks,), float(rank), device=device),
    )
    theirs = torch.empty_like(mine)
    dist.all_reduce(total)
    dist.all_to_all_single(theirs, mine)
    if float(total) != ranks * (ranks + 1) / 2 or theirs.tolist() != list(range(ranks)):
        raise RuntimeError(
            f"wrong results: {float(total)} and {theirs.tolist()} on rank {rank} of {ranks}"
        )


if __name__ == "__main__":
    try:
        result = run_probe(int(sys.argv[1]))
    except Exception as error:
        result = {"problem": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    print(json.dumps(result), flush=True)
    os._exit(0)  # peers may be gone, and a library's clean-up would wait for them

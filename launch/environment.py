"""What the launchers tell a process: its rank, the world, and how to reach the others.

torchrun, deepspeed and accelerate set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*; srun sets SLURM_*, from which the same
names are filled. A stray `--local_rank=N`, which the deepspeed launcher adds, is taken out of the arguments.
"""

import os
from collections.abc import MutableMapping, Sequence

SLURM_NAMES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
    "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR",
}
SLURM_FIRST_PORT = 20_000


def launched(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in environment


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Fill the usual names under `srun`, which sets its own. Does nothing where a launcher has already spoken."""
    if launched(environment) or "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return
    for name, slurm_name in SLURM_NAMES.items():
        if slurm_name in environment:
            environment.setdefault(name, environment[slurm_name])
    job = int(environment.get("SLURM_JOB_ID", "0"))
    environment.setdefault("MASTER_PORT", str(SLURM_FIRST_PORT + job % 20_000))


def without_local_rank(arguments: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """The arguments without `--local_rank=N` or `--local-rank N`; N is kept as LOCAL_RANK if nothing else says it."""
    kept: list[str] = []
    iterator = iter(arguments)
    for argument in iterator:
        name, _, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            environment.setdefault("LOCAL_RANK", value or next(iterator, "0"))
        else:
            kept.append(argument)
    return kept

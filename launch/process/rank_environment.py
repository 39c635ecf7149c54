"""Fill RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* from any launcher's variables, and choose a
network interface.

torchrun, deepspeed and accelerate set these names. srun, Open MPI and PMI (MPICH, Intel MPI) set
names of their own, which are copied. `--local_rank=N`, which the deepspeed launcher adds, is
removed from the arguments. Where the user names no network interface, the one that leads to rank 0
is chosen.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from llmsys.errors import LaunchError
from llmsys.launch.hosts.network_interfaces import find_interface_to, get_loopback_interface
from llmsys.parallel.flight_recorder import set_flight_recorder_variables

Environment = MutableMapping[str, str]

SLURM_NAMES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}
MPI_NAMES = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)
SLURM_FIRST_PORT = 20_000
MPI_PORT = 29_500
HERE = "127.0.0.1"
# DeepSpeed's launcher sets LOCAL_SIZE where torchrun sets LOCAL_WORLD_SIZE
DEEPSPEED_LOCAL_SIZE = "LOCAL_SIZE"
FIRST_HOST = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<number>\d+)[^\]]*\](?P<suffix>[^,\[]*))?")


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return "RANK" in environment


def adopt_launcher(environment: Environment = os.environ) -> None:
    """Fill the usual names from whatever launcher started this process. Names that are set already
    are kept.

    Args:
        environment: Variables to read and to fill, by default those of this process.

    Raises:
        LaunchError: Ranks are on several hosts and nothing names the host of rank 0.
    """
    if not is_launched(environment):
        _adopt_slurm(environment)
    if not is_launched(environment):
        _adopt_mpi(environment)
    if DEEPSPEED_LOCAL_SIZE in environment and is_launched(environment):
        environment.setdefault("LOCAL_WORLD_SIZE", environment[DEEPSPEED_LOCAL_SIZE])


def _adopt_slurm(environment: Environment) -> None:
    """Copy the names of an `srun` with one task per rank. An interactive shell of a job is no
    rank.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return
    _copy_variables(environment, SLURM_NAMES)
    if "LOCAL_WORLD_SIZE" not in environment and (local := _parse_node_tasks(environment)):
        environment["LOCAL_WORLD_SIZE"] = local
    # The node srun was typed on may be a login node: the first node of the step is where rank 0 is.
    first = parse_first_host(environment.get("SLURM_STEP_NODELIST", "")) or environment.get(
        "SLURM_LAUNCH_NODE_IPADDR"
    )
    if first:
        environment.setdefault("MASTER_ADDR", first)
    job = int(environment.get("SLURM_JOB_ID", "0"))
    # All ranks compute the same port, and jobs that share a node different ones.
    environment.setdefault("MASTER_PORT", str(SLURM_FIRST_PORT + job % 20_000))


def _adopt_mpi(environment: Environment) -> None:
    """Copy the names of `mpirun` or `mpiexec`. These do not name rank 0's host: it is this one,
    or MASTER_ADDR.
    """
    names = next(
        (
            one
            for one in MPI_NAMES
            if one["RANK"] in environment and one["WORLD_SIZE"] in environment
        ),
        None,
    )
    if names is None:
        return
    here = environment.get(names["LOCAL_WORLD_SIZE"]) == environment[names["WORLD_SIZE"]]
    if "MASTER_ADDR" not in environment and not here:
        raise LaunchError(
            f"mpirun started rank {environment[names['RANK']]} of "
            f"{environment[names['WORLD_SIZE']]} on several hosts, but MASTER_ADDR, the host of "
            "rank 0, is not set. Set it: `mpirun -x MASTER_ADDR=FIRST_HOST …` (Open MPI) or "
            "`mpiexec -genv MASTER_ADDR FIRST_HOST …`."
        )
    _copy_variables(environment, names)
    environment.setdefault("MASTER_ADDR", HERE)
    environment.setdefault("MASTER_PORT", str(MPI_PORT))


def _copy_variables(environment: Environment, names: Mapping[str, str]) -> None:
    for name, theirs in names.items():
        if theirs in environment:
            environment.setdefault(name, environment[theirs])


def parse_first_host(node_list: str) -> str:
    """Return the first host of Slurm's `node[03-05,9],other` (here node03), or "" where there is
    none.
    """
    found = FIRST_HOST.match(node_list)
    return f"{found['prefix']}{found['number'] or ''}{found['suffix'] or ''}" if found else ""


def _parse_node_tasks(environment: Mapping[str, str]) -> str | None:
    """Return this node's entry of `2(x3),1`: the tasks on each node of the step, in order."""
    counts: list[str] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        counts += [tasks] * int(times.rstrip(")") or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] or None if node < len(counts) else None


def choose_interface(environment: Environment = os.environ) -> None:
    """Set the network interface of gloo and NCCL where the user has not.

    Without a choice, gloo binds to the address of this host's own name. Debian makes that a
    loopback address, and ranks of other hosts wait for it until the time-out. Loopback is right
    only when every rank is on this host.

    Args:
        environment: Variables to read and to fill, by default those of this process.

    Raises:
        LaunchError: No interface leads to the host of rank 0.
    """
    ranks = environment.get("WORLD_SIZE")
    if ranks is None or "MASTER_ADDR" not in environment:
        return
    # loopback is right only when every rank is on this host
    if environment.get("LOCAL_WORLD_SIZE") == ranks:
        if (alone := get_loopback_interface()) is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", alone)
        return
    if {
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    } <= environment.keys() or "LOCAL_WORLD_SIZE" not in environment:
        return
    chosen = find_interface_to(environment["MASTER_ADDR"])
    environment.setdefault("GLOO_SOCKET_IFNAME", chosen)
    # `=`: this very name, not all that begin so
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Segments grow in place: a step whose tensors have other sizes than those before it leaves no holes
# in them.
ALLOCATOR_SETTINGS = "expandable_segments:True"


def set_device_variables(trace_folder: Path, environment: Environment = os.environ) -> None:
    """Set the variables of torch's allocator and of its flight recorder where the user has not;
    before torch is loaded.

    Args:
        trace_folder: Folder of the files that the flight recorder writes.
        environment: Variables to read and to fill, by default those of this process.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS
    set_flight_recorder_variables(trace_folder, environment)


def strip_local_rank(arguments: Sequence[str], environment: Environment = os.environ) -> list[str]:
    """Return the arguments without `--local_rank=N` and `--local-rank N`.

    Args:
        arguments: Command-line arguments of a rank, without the program's name.
        environment: Gets LOCAL_RANK=N where it has none; by default this process's.

    Returns:
        The other arguments, in order.
    """
    kept: list[str] = []
    iterator = iter(arguments)
    for argument in iterator:
        name, _, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            environment.setdefault("LOCAL_RANK", value or next(iterator, "0"))
        else:
            kept.append(argument)
    return kept

"""The process group of a run, and small collectives over it.

Reads RANK, WORLD_SIZE and the rendezvous variables that launchers set; without them the process is
a world of one.

Invariants:
- Every collective ends within the timeout or raises.
"""

import datetime
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.errors import LaunchError, LlmsysError
from llmsys.parallel.rendezvous import bind_rendezvous

Value = TypeVar("Value")

# Timeout of a collective.
TIMEOUT_SECONDS = 300

# World size from which gloo connects two ranks when they first communicate; a full mesh connects
# all at once.
LAZY_MESH_RANKS = 64

# Open files of a rank without its connections: token files (256), libraries, logs.
OWN_DESCRIPTORS = 512


def get_local_device() -> torch.device:
    """Return the device of this process.

    Returns:
        The accelerator with this process's local rank; the CPU where there is none.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def init_process_group(timeout_seconds: int = TIMEOUT_SECONDS) -> Iterator[None]:
    """Join the launcher's process group, or a group of one without a launcher, and leave it at the
    end. Collective.

    Args:
        timeout_seconds: Longest wait for peers in one collective.

    Yields:
        Nothing; the group exists inside the context.

    Raises:
        LaunchError: RANK is set without the other variables, or the system allows too few open
            files.
    """
    device = get_local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo too on GPUs: objects and control messages are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        _check_launcher_variables()
        prepare_descriptors(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        bind_rendezvous()
        # With its device NCCL connects here, where a failure names it, and splits the groups of
        # meshes off this one. Its buffers are then allocated before those of the first step.
        dist.init_process_group(
            backend, timeout=timeout, device_id=device if device.type == "cuda" else None
        )
    else:
        # A store in memory: one process needs no port.
        dist.init_process_group(
            backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


def set_group_timeout(group: dist.ProcessGroup) -> None:
    """Give a group the timeout of the run: torch gives groups other than the first its own, 10 or
    30 minutes.

    Args:
        group: A group that this rank belongs to.
    """
    first = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    if isinstance(first, dist.ProcessGroupGloo):  # a dry run has groups without communication
        dist.distributed_c10d._set_pg_timeout(first.options._timeout, group)


def _check_launcher_variables() -> None:
    missing = [
        name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise LaunchError(
            f"RANK={os.environ['RANK']} is set but {', '.join(missing)} is not. Start the ranks "
            "with torchrun, deepspeed or srun, or unset RANK to train in one process."
        )


def prepare_descriptors(rank: int, world_size: int) -> None:
    """Raise the limit of open files to what the system allows, and keep gloo from opening one for
    every rank.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.

    Raises:
        LaunchError: The system allows fewer than this rank needs.
    """
    if world_size >= LAZY_MESH_RANKS:
        # connects when two ranks first communicate
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Every rank is connected to the store of rank 0.
    needed = OWN_DESCRIPTORS + (world_size if rank == 0 else 0)
    if hard not in (resource.RLIM_INFINITY, -1) and hard < needed:
        raise LaunchError(
            f"rank {rank} of {world_size} needs {needed} open files, and this system allows "
            f"{hard} (ulimit -Hn). Raise the limit to {needed} or more: LimitNOFILE of the "
            "service, or /etc/security/limits.conf."
        )


def get_rank() -> int:
    """Return the rank of this process.

    Returns:
        The rank; 0 without a process group.
    """
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of processes that train together.

    Returns:
        The world size; 1 without a process group.
    """
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place. Collective.

    Args:
        tensor: Same shape and dtype on every rank.

    Returns:
        `tensor` itself.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_max(tensor: Tensor) -> Tensor:
    """Take the element-wise maximum of a tensor over all ranks, in place. Collective.

    Args:
        tensor: Same shape and dtype on every rank.

    Returns:
        `tensor` itself.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def all_gather_tensor(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather a tensor of every rank. Collective.

    Args:
        tensor: Same shape and dtype on every rank.
        group: The ranks that take part; None: all.

    Returns:
        The tensors stacked along a new first dim, in the order of the group's ranks.
    """
    ranks = get_world_size() if group is None else group.size()
    gathered = tensor.new_empty(ranks, tensor.numel())
    if ranks == 1:
        gathered.copy_(tensor.view(1, -1))
    else:
        dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1), group=group)
    return gathered.view(ranks, *tensor.shape)


def run_on_rank_zero(action: Callable[[], Value]) -> Value:
    """Run `action` on rank 0 and broadcast the result. Collective.

    Args:
        action: Returns a picklable object, for instance a summary to print; not None.

    Returns:
        The result, on every rank.

    Raises:
        LlmsysError: On rank 0, the error of `action`.
        SystemExit: On the other ranks, so that one failure reads as one message and not as a list
            of lost connections.
    """
    if get_world_size() == 1:
        return action()
    failure: BaseException | None = None
    message: list[Value | None] = [None]
    if get_rank() == 0:
        try:
            message = [action()]
        except LlmsysError as error:
            failure = error
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[0] is None:
        # Rank 0 prints the error, once for all; 2 is the exit code that it ends with.
        raise SystemExit(2)
    return message[0]


def all_gather_object(value: Value) -> list[Value]:
    """Gather a small picklable object of every rank. Collective.

    Args:
        value: This rank's object.

    Returns:
        One object per rank, ordered by rank.
    """
    values = [value] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank has arrived. Collective."""
    if get_world_size() > 1:
        dist.barrier()

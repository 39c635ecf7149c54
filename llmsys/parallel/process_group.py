"""Joining and leaving the process group, and the few reductions that everything else is made of.

Reads RANK, WORLD_SIZE and the rendezvous variables that every launcher sets; without them the process is a world of
one. Promises that after `join` every collective ends within the stated time or raises.
"""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.errors import LaunchError, LlmsysError
from llmsys.parallel.rendezvous import bind_rendezvous

Value = TypeVar("Value")

TIMEOUT_SECONDS = 300
"""How long a rank waits for its peers in one collective before it gives up."""


def get_local_device() -> torch.device:
    """The accelerator with this process's local rank, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def init_process_group(timeout_seconds: int = TIMEOUT_SECONDS) -> Iterator[None]:
    """Join the group that the launcher made, or a group of one when there was no launcher; leave it at the end."""
    device = get_local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        _check_launcher_variables()
        bind_rendezvous()
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_launcher_variables() -> None:
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(
            f"RANK={os.environ['RANK']} is set but {', '.join(missing)} is not. "
            f"Start the ranks with torchrun, deepspeed or srun, or unset RANK to train in one process."
        )


def get_rank() -> int:
    """This process's number, 0 when there is one process only."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, in place, and returned."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_max(tensor: Tensor) -> Tensor:
    """The largest of each number over all ranks, in place, and returned."""
    if get_world_size() > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def all_gather_tensor(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`tensor` of every rank of a group (None: of all), stacked in the order of the ranks."""
    ranks = get_world_size() if group is None else group.size()
    gathered = tensor.new_empty(ranks, tensor.numel())
    if ranks == 1:
        gathered.copy_(tensor.view(1, -1))
    else:
        dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1), group=group)
    return gathered.view(ranks, *tensor.shape)


def run_on_rank_zero(action: Callable[[], str]) -> str:
    """What `action` returns on rank 0, on every rank. If it fails there, rank 0 raises and the others leave quietly.

    One failure then reads as one message, not as one message and a row of lost connections.
    """
    if get_world_size() == 1:
        return action()
    failure: BaseException | None = None
    message: list[str | None] = [None]
    if get_rank() == 0:
        try:
            message = [action()]
        except LlmsysError as error:
            failure = error
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[0] is None:
        raise SystemExit(2)
    return message[0]


def all_gather_object(value: Value) -> list[Value]:
    """What every rank brings, by rank; small things that pickle. Collective."""
    values = [value] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank is here."""
    if get_world_size() > 1:
        dist.barrier()

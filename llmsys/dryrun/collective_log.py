"""Collectives of a step: operation, mesh axis, count and bytes; and the numbers that they exchange.

Invariants:
- Bytes are those of the full-size side on one rank: what an all-gather writes, what a
  reduce-scatter reads.
- Every operation of the namespaces of collectives is recorded, also one without a name here.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from llmsys.dryrun.known_values import attach_known, drop_known, get_known, leave_fake_mode
from llmsys.parallel.device_mesh import DeviceMeshes

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
}
WAITS = ("wait_tensor", "_wrap_tensor_autograd")
DIRECTED = ("send", "receive")
"""Messages from one rank to another."""
NO_PEER = -1
OPTIMIZER = "optimizer"
"""Part of a step in which the optimizer exchanges what it needs."""


class Message(NamedTuple):
    """A collective as one rank takes part in it.

    Attributes:
        operation: such as all_gather.
        ranks: global ranks that take part, in their order.
        dtype: of what travels.
        bytes: of the full-size side, on this rank.
        peer: the other global rank of a message that is sent or received; NO_PEER of all others.
    """

    operation: str
    ranks: tuple[int, ...]
    dtype: str
    bytes: int
    peer: int = NO_PEER


class Event(NamedTuple):
    """A pass that begins, or a message from one rank to another, in the order of a step.

    Attributes:
        name: `forward`, `backward`, `send` or `receive`.
        ranks: ranks of the group of a message; empty for a pass.
        number: the other rank of a message; the micro-batch of a pass.
        stage: of a pass, counted over all ranks; NO_PEER for a message.
    """

    name: str
    ranks: tuple[int, ...]
    number: int
    stage: int = NO_PEER


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind over one axis.

    Attributes:
        operation: such as all_gather.
        axis: name of the mesh axis.
        ranks: ranks that take part.
        count: calls in a step.
        bytes: sum over the calls of the full-size side, on this rank.
    """

    operation: str
    axis: str
    ranks: int
    count: int
    bytes: int


@dataclass
class CollectiveLog:
    """Messages by the part of a step in which they occur."""

    is_recording: bool = False
    axes: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Axis by the ranks of a process group."""
    messages: Counter[tuple[str, Message]] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    """Passes of a pipeline and directed messages, in their order."""

    def name_axes(self, meshes: DeviceMeshes) -> None:
        """Learn the ranks of the process groups, for the names in the log.

        Several meshes may share a group: the first mesh that has it names it, so axes of a
        layout come before the meshes that are made of them.

        Args:
            meshes: The sub-meshes of the run.
        """
        for field_name in (
            "world",
            "tensor",
            "context",
            "ring",
            "ulysses",
            "member",
            "sequence",
            "expert",
            "expert_fsdp",
            "dense",
            "replica",
            "pipeline",
        ):
            mesh = getattr(meshes, field_name, None)
            if mesh is None:
                continue
            names = mesh.mesh_dim_names or (field_name,)
            for dim, name in enumerate(names):
                self.axes.setdefault(_list_ranks(mesh.get_group(dim)), name)

    def record(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], part: str
    ) -> None:
        """Count one call; operations that are no collective are ignored.

        Args:
            func: The operation.
            args: Its arguments.
            kwargs: Its named arguments.
            tensors: What it reads and writes.
            part: Part of the step: a kind of micro-batch, what happens once, or the optimizer.
        """
        if (
            not self.is_recording
            or func.namespace not in NAMESPACES
            or func._opname in WAITS
            or not tensors
        ):
            return
        largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
        operation = NAMES.get(func._opname, func._opname)
        ranks = _list_ranks(find_group(args, kwargs))
        # send(tensors, group, target, tag), recv_(tensors, group, source, tag)
        peer = ranks[args[2]] if operation in DIRECTED else NO_PEER
        message = Message(
            operation,
            ranks,
            str(largest.dtype).removeprefix("torch."),
            largest.numel() * largest.element_size(),
            peer,
        )
        self.messages[part, message] += 1
        if operation in DIRECTED:
            self.events.append(Event(operation, ranks, peer))

    def record_pass(self, name: str, number: int, stage: int) -> None:
        """Note that a pass of a pipeline begins.

        Args:
            name: `forward` or `backward`.
            number: the micro-batch.
            stage: the stage, counted over all ranks.
        """
        if self.is_recording:
            self.events.append(Event(name, (), number, stage))

    def get_axis(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the axis with these ranks, or of a group that is none."""
        return self.axes.get(ranks, f"group of {len(ranks)}")

    def list_collectives(self, repeats: Callable[[str], int]) -> list[CollectiveCount]:
        """Return the collectives of a step, largest first.

        Args:
            repeats: number of times that a part occurs in a step.
        """
        counts: Counter[tuple[str, str, int]] = Counter()
        sizes: Counter[tuple[str, str, int]] = Counter()
        for (part, message), count in self.messages.items():
            key = message.operation, self.get_axis(message.ranks), len(message.ranks)
            counts[key] += count * repeats(part)
            sizes[key] += count * message.bytes * repeats(part)
        found = [CollectiveCount(*key, counts[key], sizes[key]) for key in counts if counts[key]]
        return sorted(found, key=lambda one: -one.bytes)


@cache
def _list_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def find_group(args: Any, kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a collective, by object or by name."""
    for value in (*args, *kwargs.values()):
        # Functional collectives name their reduction by a string too.
        if isinstance(value, str) and value not in ("sum", "max", "min", "avg", "product"):
            return torch._C._distributed_c10d._resolve_process_group(dist.GroupName(value))
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def exchange_known(func: OpOverload, args: Any, kwargs: dict[str, Any], outputs: Any) -> bool:
    """Attach the numbers that a collective delivers, taking every rank to hold what this rank
    holds.

    Returns:
        Whether the operation is a collective; its outputs are then known where its inputs are.
    """
    name = NAMES.get(func._opname) if func.namespace in NAMESPACES else None
    if name is None:
        return False
    group = find_group(args, kwargs)
    ranks = dist.get_world_size() if group is None else group.size()
    own = dist.get_rank() if group is None else group.rank()
    if func.namespace == "c10d":
        # In place. (output, input, …) where there are two; lists in both.
        tensors = [one for one in tree_leaves(args[:2]) if isinstance(one, Tensor)]
        source, target = tensors[-1], tensors[0]
    else:
        source, target = args[0], next(iter(tree_leaves(outputs)))
    if name in ("receive", "broadcast") and target.is_floating_point():
        drop_known(target)  # hidden states of another rank
        return True
    known = get_known(source)
    if known is None or not isinstance(target, FakeTensor):
        return True
    with leave_fake_mode():
        delivered = _compute_delivery(name, known, ranks, own, target)
        if delivered is None:
            return True
        stored = getattr(target, "_llmsys_known", None)
        if stored is not None and stored.shape == delivered.shape:
            stored.copy_(delivered)  # views of the target see it too
            return True
    attach_known(target, delivered)
    return True


def _compute_delivery(
    name: str, known: Tensor, ranks: int, own: int, target: Tensor
) -> Tensor | None:
    shape = tuple(target.shape)
    rows = known.flatten()
    match name:
        case "all_reduce":
            return known * ranks if known.dtype != torch.bool else known.clone()
        case "broadcast":
            return known.clone()
        case "all_gather":
            return rows.repeat(ranks).reshape(shape)
        case "reduce_scatter":
            return rows.view(ranks, -1)[own].mul(ranks).reshape(shape)
        case "all_to_all":
            # Uneven splits: what arrives from each rank is as much as this rank keeps for itself.
            mine = known.tensor_split(ranks)[own].flatten()
            total = target.numel()
            return (
                mine.repeat(-(-total // max(1, mine.numel())))[:total].reshape(shape)
                if mine.numel()
                else None
            )
        case _:
            return None

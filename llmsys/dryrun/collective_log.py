"""Collectives of a step: operation, mesh axis, count and bytes; and the numbers that they exchange.

Invariants:
- Bytes are those of the full-size side on one rank: what an all-gather writes, what a
  reduce-scatter reads.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """Calls and bytes by phase, operation and axis."""

    is_recording: bool = False
    axes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """(axis, ranks) by the name of a process group."""
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def name_axes(self, meshes: DeviceMeshes) -> None:
        """Learn the names of the process groups, for the log.

        Several meshes may share a group: the first mesh that has it names it, so axes of a
        layout come before the meshes that are made of them.

        Args:
            meshes: The sub-meshes of the run.
        """
        everyone = dist.group.WORLD
        assert everyone is not None
        self.axes[everyone.group_name] = ("world", dist.get_world_size())
        for field_name in (
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
            "world",
        ):
            mesh = getattr(meshes, field_name, None)
            if mesh is None:
                continue
            names = mesh.mesh_dim_names or (field_name,)
            for dim, name in enumerate(names):
                group = mesh.get_group(dim)
                self.axes.setdefault(group.group_name, (name, group.size()))

    def record(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], phase: str
    ) -> None:
        """Count one call; operations that are no collective are ignored."""
        if not self.is_recording or func.namespace not in NAMESPACES:
            return
        name = NAMES.get(func._opname)
        if name is None:
            return
        group = find_group(args, kwargs)
        axis = (
            "world"
            if group is None
            else self.axes.get(group.group_name, (f"group of {group.size()}", 0))[0]
        )
        key = (phase, name, axis)
        self.counts[key] += 1
        self.bytes[key] += max(
            (tensor.numel() * tensor.element_size() for tensor in tensors), default=0
        )

    def list_collectives(self, repeats: Callable[[str], int]) -> list[CollectiveCount]:
        """Return the collectives of a step, largest first.

        Args:
            repeats: number of times that a phase occurs in a step.
        """
        counts: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for (phase, name, axis), count in self.counts.items():
            counts[name, axis] += count * repeats(phase)
            sizes[name, axis] += self.bytes[phase, name, axis] * repeats(phase)
        ranks = dict(self.axes.values())
        found = [
            CollectiveCount(name, axis, ranks.get(axis, 0), count, sizes[name, axis])
            for (name, axis), count in counts.items()
        ]
        return sorted(found, key=lambda one: -one.bytes)


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

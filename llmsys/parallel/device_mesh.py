"""One root device mesh with named axes, and the sub-meshes that parallelism is applied over.

Invariants:
- Rank = (((pipeline · R + replicate) · S + shard) · C + context) · T + tensor, for axes of R, S, C
  and T ranks: the ranks that exchange most are neighbours. Context = ring · U + ulysses, for U
  ranks that exchange heads.
- All meshes but `world` and `pipeline` are within one index of the pipeline.
- Every group has the timeout of the run.
- Every mesh is a slice or a flattened axis of the root, so FSDP2 can combine it with a tensor or
  expert axis.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.parallel.process_group import set_group_timeout

# Axes of the root that split sequences: one, or ring and ulysses where both have more than one
# rank.
CONTEXT = ("context", "ring", "ulysses")


@dataclass(frozen=True)
class DeviceMeshes:
    """Sub-meshes of one root. An axis of one rank is None.

    Attributes:
        layout: The resolved layout.
        world: All ranks, one axis.
        dense: Shards the matrices of blocks: ([replicate,] shard · context).
        replica: Shards parameters outside of blocks: ([replicate,] shard · context · tensor).
            `dense` without tensor parallel.
        expert_fsdp: Shards each expert: ([replicate,] ranks of a replica / expert). None where
            experts are sharded as dense parameters are.
        expert: Assigns experts to ranks.
        context: Splits sequences: ring · ulysses.
        ring: Ranks of the context axis that pass key-value blocks to each other.
        ulysses: Ranks of the context axis that exchange heads for positions.
        tensor: Splits matrices.
        member: The ranks of one member of a ring, whose attention has the same positions: ulysses ·
            tensor.
        sequence: The ranks that hold shards of the same sequences: context · tensor, in the order
            of the shards.
        pipeline: Divides the layers among ranks.
    """

    layout: ParallelLayout
    world: DeviceMesh
    dense: DeviceMesh
    replica: DeviceMesh
    expert_fsdp: DeviceMesh | None
    expert: DeviceMesh | None
    context: DeviceMesh | None
    ring: DeviceMesh | None
    ulysses: DeviceMesh | None
    tensor: DeviceMesh | None
    member: DeviceMesh | None
    sequence: DeviceMesh | None
    pipeline: DeviceMesh | None = None

    @property
    def has_separate_experts(self) -> bool:
        """True where experts are on several ranks, or are sharded apart from their block."""
        return self.expert is not None or self.expert_fsdp is not None


def build_device_meshes(layout: ParallelLayout, device: torch.device) -> DeviceMeshes:
    """Build the root mesh of a run and take every axis from it by name. Collective.

    Args:
        layout: A layout that `ParallelLayout.resolve` returned: its world_size is the number of
            ranks.
        device: Its type chooses the backend of the process groups.

    Returns:
        The sub-meshes.
    """
    root = _build_root_mesh(layout, device)
    fsdp = _flatten_axes(root, ("shard", *CONTEXT), "fsdp")
    replica = (
        fsdp
        if layout.tensor == 1
        else _flatten_axes(root, ("shard", *CONTEXT, "tensor"), "replica")
    )
    # The tensor axis does not split experts, so they are sharded over more ranks than their block.
    expert_fsdp = None if layout.tensor == 1 else replica
    expert = None
    if layout.expert > 1:
        # Another view of a replica's ranks, not axes of the root: no grid has both axes where
        # expert cuts across the others (tensor=3, expert=2).
        sizes = layout.ranks_per_replica // layout.expert, layout.expert
        sparse = replica._unflatten(0, sizes, ("expert_fsdp", "expert"))
        expert_fsdp = sparse["expert_fsdp"]
        expert = sparse["expert"]
    ulysses = layout.context // layout.ring_size
    context = _find_flat_mesh(root, CONTEXT, "context")
    sequence = _find_flat_mesh(root, (*CONTEXT, "tensor"), "sequence")
    meshes = DeviceMeshes(
        layout,
        world=root._flatten("world"),
        dense=_add_replicate_axis(root, fsdp),
        replica=_add_replicate_axis(root, replica),
        expert_fsdp=None if expert_fsdp is None else _add_replicate_axis(root, expert_fsdp),
        expert=expert,
        context=context,
        ring=None
        if layout.ring_size == 1
        else context
        if layout.ring_size == layout.context
        else root["ring"],
        ulysses=None if ulysses == 1 else context if ulysses == layout.context else root["ulysses"],
        tensor=root["tensor"] if layout.tensor > 1 else None,
        member=sequence
        if layout.ring_size == 1
        else _find_flat_mesh(root, ("ulysses", "tensor"), "member"),
        sequence=sequence,
        pipeline=root["pipeline"] if layout.pipeline > 1 else None,
    )
    for mesh in vars(meshes).values():
        for group in mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else ():
            set_group_timeout(group)
    return meshes


def _build_root_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    sizes = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "context": layout.context if layout.ring_size in (1, layout.context) else 1,
        "ring": layout.ring_size if layout.ring_size < layout.context else 1,
        "ulysses": layout.context // layout.ring_size if layout.ring_size > 1 else 1,
        "tensor": layout.tensor,
    }
    # An axis of n ranks costs world_size / n process groups, each of them created collectively:
    # none for n = 1. FSDP needs a mesh on one rank too.
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _flatten_axes(root: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh:
    axes = tuple(name for name in names if name in (root.mesh_dim_names or ()))
    return root[axes[0]] if len(axes) == 1 else root[axes]._flatten(flat_name)


def _find_flat_mesh(root: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh | None:
    """Return the mesh of those axes that the root has; None if it has none of them."""
    return (
        _flatten_axes(root, names, flat_name)
        if set(names) & set(root.mesh_dim_names or ())
        else None
    )


def _add_replicate_axis(root: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    """Return the mesh of hybrid sharding, (replicate, shards); `shards` where there is one
    replica.
    """
    if "replicate" not in (root.mesh_dim_names or ()):
        return shards
    # root["replicate", "fsdp"] is deprecated: torch slices by the names of a mesh's own axes, not
    # of flattened ones.
    return DeviceMesh._concatenate([root["replicate"], shards])

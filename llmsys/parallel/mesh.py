"""The meshes over the same ranks: one for dense parameters, one for experts, and the axes inside a copy.

Rank = ((replica · shard + place) · context + part) · tensor + column: the ranks that exchange most are neighbours.
Matrices of a block see (replicate, shard · context[, tensor]), what stands outside of blocks (replicate, whole), and
experts (replicate, expert_shard, expert); whole and expert_shard · expert are all ranks of one copy.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmsys.config.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """`dense` shards ordinary parameters, `expert_shard` shards each expert, `expert` splits experts between ranks.

    `whole` shards over all ranks of a copy; it is `dense` where no axis splits matrices. `expert_shard` is None where
    experts are sharded as everything else is, `expert` where they are not dealt. `tensor` splits matrices (a submesh of
    the same root as `dense`), `context` splits sequences, `parts` are the ranks that hold parts of the same sequences
    (context × tensor, in the order of the parts); None where there is one rank.
    """

    layout: Layout
    world: DeviceMesh
    dense: DeviceMesh
    whole: DeviceMesh
    expert_shard: DeviceMesh | None
    expert: DeviceMesh | None
    context: DeviceMesh | None
    tensor: DeviceMesh | None
    parts: DeviceMesh | None


def make_meshes(layout: Layout, device: torch.device) -> Meshes:
    """Meshes for a layout that `fit` has resolved: its world_size is the number of ranks."""
    world = init_device_mesh(device.type, (layout.world_size,), mesh_dim_names=("world",))
    dense, tensor = _dense(layout, device)
    whole = dense if tensor is None else _whole(layout, device)
    expert_shard, expert = _sparse(layout, device)
    context = _context(layout, device)
    parts = context if tensor is None else tensor if context is None else _parts(layout, device)
    return Meshes(layout, world, dense, whole, expert_shard, expert, context, tensor, parts)


def _dense(layout: Layout, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(mesh of whole matrices, tensor axis). One copy has no replicate axis; one tensor rank has no tensor axis."""
    shape = {"replicate": layout.replicate, "shard": layout.shard * layout.context}
    if layout.tensor > 1:
        shape["tensor"] = layout.tensor
    root = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    dense = root["shard"] if layout.replicate == 1 else root["replicate", "shard"]
    return dense, root["tensor"] if layout.tensor > 1 else None


def _whole(layout: Layout, device: torch.device) -> DeviceMesh:
    shape = (layout.replicate, layout.copy_ranks)
    root = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "whole"))
    return root["whole"] if layout.replicate == 1 else root


def _parts(layout: Layout, device: torch.device) -> DeviceMesh:
    shape = (layout.data_ranks, layout.sequence_ranks)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "parts"))["parts"]


def _sparse(layout: Layout, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    if layout.expert == 1 and layout.tensor == 1:
        return None, None
    sparse = init_device_mesh(
        device.type,
        (layout.replicate, layout.copy_ranks // layout.expert, layout.expert),
        mesh_dim_names=("replicate", "expert_shard", "expert"),
    )
    expert_shard = sparse["expert_shard"] if layout.replicate == 1 else sparse["replicate", "expert_shard"]
    return expert_shard, sparse["expert"] if layout.expert > 1 else None


def _context(layout: Layout, device: torch.device) -> DeviceMesh | None:
    if layout.context == 1:
        return None
    shape = (layout.data_ranks, layout.context, layout.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))["context"]

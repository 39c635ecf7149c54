"""The meshes over the same ranks: one for dense parameters, one for experts, and the axes inside a copy.

Rank = ((replica · shard + place) · context + part) · tensor + column: the ranks that exchange most are neighbours.
Matrices of a block see (replicate, shard · context[, tensor]), what stands outside of blocks (replicate, whole), and
experts (replicate, expert_shard, expert); whole and expert_shard · expert are all ranks of one copy.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmsys.config.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class DeviceMeshes:
    """`dense` shards ordinary parameters, `expert_shard` shards each expert, `expert` splits experts between ranks.

    `whole` shards over all ranks of a copy; it is `dense` where no axis splits matrices. `expert_shard` is None where
    experts are sharded as everything else is, `expert` where they are not dealt. `tensor` splits matrices (a submesh of
    the same root as `dense`), `context` splits sequences, `parts` are the ranks that hold parts of the same sequences
    (context × tensor, in the order of the parts); None where there is one rank.
    """

    layout: ParallelLayout
    world: DeviceMesh
    dense: DeviceMesh
    whole: DeviceMesh
    expert_shard: DeviceMesh | None
    expert: DeviceMesh | None
    context: DeviceMesh | None
    tensor: DeviceMesh | None
    parts: DeviceMesh | None


def build_device_meshes(layout: ParallelLayout, device: torch.device) -> DeviceMeshes:
    """Meshes for a layout that `fit` has resolved: its world_size is the number of ranks."""
    world = init_device_mesh(device.type, (layout.world_size,), mesh_dim_names=("world",))
    dense, tensor = _build_dense_and_tensor_meshes(layout, device)
    whole = dense if tensor is None else _build_whole_mesh(layout, device)
    expert_shard, expert = _build_expert_meshes(layout, device)
    context = _build_context_mesh(layout, device)
    parts = context if tensor is None else tensor if context is None else _build_parts_mesh(layout, device)
    return DeviceMeshes(layout, world, dense, whole, expert_shard, expert, context, tensor, parts)


def _build_dense_and_tensor_meshes(
    layout: ParallelLayout, device: torch.device
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(mesh of whole matrices, tensor axis). One copy has no replicate axis; one tensor rank has no tensor axis."""
    shape = {"replicate": layout.replicate, "shard": layout.shard * layout.context}
    if layout.tensor > 1:
        shape["tensor"] = layout.tensor
    root = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    dense = root["shard"] if layout.replicate == 1 else root["replicate", "shard"]
    return dense, root["tensor"] if layout.tensor > 1 else None


def _build_whole_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    shape = (layout.replicate, layout.ranks_per_replica)
    root = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "whole"))
    return root["whole"] if layout.replicate == 1 else root


def _build_parts_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    shape = (layout.data_parallel_size, layout.sequence_parallel_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "parts"))["parts"]


def _build_expert_meshes(layout: ParallelLayout, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    if layout.expert == 1 and layout.tensor == 1:
        return None, None
    sparse = init_device_mesh(
        device.type,
        (layout.replicate, layout.ranks_per_replica // layout.expert, layout.expert),
        mesh_dim_names=("replicate", "expert_shard", "expert"),
    )
    expert_shard = sparse["expert_shard"] if layout.replicate == 1 else sparse["replicate", "expert_shard"]
    return expert_shard, sparse["expert"] if layout.expert > 1 else None


def _build_context_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh | None:
    if layout.context == 1:
        return None
    shape = (layout.data_parallel_size, layout.context, layout.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))["context"]

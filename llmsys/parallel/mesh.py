"""The two meshes over the same ranks: one for dense parameters, one for experts.

Rank = (replica · shard + place) with the expert axis innermost, so that the processes which exchange tokens are
neighbours: dense (replicate, shard), sparse (replicate, expert_shard, expert) with expert_shard · expert = shard.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmsys.config.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """`dense` shards ordinary parameters, `expert_shard` shards each expert, `expert` splits experts between ranks.

    The last two are None when experts are not split; experts are then ordinary parameters.
    """

    layout: Layout
    world: DeviceMesh
    dense: DeviceMesh
    expert_shard: DeviceMesh | None
    expert: DeviceMesh | None


def make_meshes(layout: Layout, device: torch.device) -> Meshes:
    """Meshes for a layout that `fit` has resolved: replicate · shard is the world size."""
    replicate, shard, expert = layout.replicate, layout.shard, layout.expert
    world = init_device_mesh(device.type, (replicate * shard,), mesh_dim_names=("world",))
    dense = init_device_mesh(device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    if replicate == 1:
        dense = dense["shard"]
    if expert == 1:
        return Meshes(layout, world, dense, None, None)
    sparse = init_device_mesh(
        device.type, (replicate, shard // expert, expert), mesh_dim_names=("replicate", "expert_shard", "expert")
    )
    expert_shard = sparse["expert_shard"] if replicate == 1 else sparse["replicate", "expert_shard"]
    return Meshes(layout, world, dense, expert_shard, sparse["expert"])

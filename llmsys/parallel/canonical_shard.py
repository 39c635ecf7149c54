"""FSDP2 whose gradients are summed by the canonical tree: the bytes of a reduce-scatter, in an order of our own.

A reduce-scatter may add ranks in any order, and another number of ranks is another order. Here every rank sends each
part of its gradient to the rank that keeps this part (the same bytes as a ring's reduce-scatter), and that rank adds
them up by the tree of canonical.py. Replicas then exchange their sums whole and add those up likewise.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llmsys.model.block import TransformerBlock
from llmsys.model.transformer import Transformer
from llmsys.parallel.canonical import sum_tree
from llmsys.parallel.canonical_expert import apply_reproducible_expert_parallel
from llmsys.parallel.group import all_gather_tensor
from llmsys.parallel.mesh import DeviceMeshes
from llmsys.parallel.reduce_scatter import CustomReduceScatter, configure_gradient_reduction
from llmsys.parallel.shards import configure_prefetch


class ReproducibleReduceScatter(CustomReduceScatter):
    """By an all-to-all and the tree. The ranks of a group hold neighbouring leaves of the tree."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See OwnReduceScatter."""
        arrived = torch.empty_like(input_tensor)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        output_tensor.copy_(sum_tree(arrived.view(group.size(), -1)))


def all_reduce_replicas(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """`gradient` becomes its sum over the replicas, in place, by the same tree."""
    gradient.copy_(sum_tree(all_gather_tensor(gradient, group)))


def apply_reproducible_fsdp(model: Transformer, meshes: DeviceMeshes, compute_dtype: torch.dtype) -> None:
    """Experts to their ranks and parameters into shards: fp32 masters, `compute_dtype` in the forward, sums in fp32."""
    policy = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    apply_reproducible_expert_parallel(model, meshes, compute_dtype)
    if meshes.expert_shard is not None:
        for layer in model.list_moe_layers():
            # Micro-batches of other ranks meet in these experts, so their gradients leave autograd in fp32.
            _shard_module(layer.experts, meshes.expert_shard, policy(param_dtype=torch.float32))
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            _shard_module(block, meshes.dense, policy(param_dtype=compute_dtype))
    _shard_module(model, meshes.dense, policy(param_dtype=compute_dtype))
    if meshes.expert is not None:
        configure_prefetch(model)


def _shard_module(module: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """One unit of FSDP, over the last axis of `mesh`; another axis in front of it holds replicas."""
    axes = mesh.mesh_dim_names or ()
    shards = mesh if len(axes) == 1 else mesh[axes[-1]]
    fully_shard(module, mesh=shards, mp_policy=policy)
    configure_gradient_reduction(module, shards, ReproducibleReduceScatter())
    if len(axes) > 1:
        add: Callable[[Tensor], None] = partial(all_reduce_replicas, group=mesh.get_group(axes[0]))
        module.set_all_reduce_hook(add)

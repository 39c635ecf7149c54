"""Experts computed one at a time and for one micro-batch at a time: the same bits whichever rank holds them.

Rows of a product can depend on how many there are, and elements of an activation on where they stand (what is left over
of a vector takes another path through the kernel). So every expert gets the rows of every micro-batch in products and
memory of their own, of shapes that no layout changes. The rows that arrive from R ranks are R micro-batches; the R
gradients of a weight are added up by the tree of canonical.py, in float32 as everywhere.

FSDP2 whose gradients are summed by the canonical tree: the bytes of a reduce-scatter, in an order of our own.

A reduce-scatter may add ranks in any order, and another number of ranks is another order. Here every rank sends each
part of its gradient to the rank that keeps this part (the same bytes as a ring's reduce-scatter), and that rank adds
them up by the tree of canonical.py. Replicas then exchange their sums whole and add those up likewise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmsys.model.experts import GroupedExperts
from llmsys.model.feed_forward import apply_gated_activation
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from llmsys.parallel.fsdp import configure_prefetch
from llmsys.parallel.parallelize import apply_expert_parallel
from llmsys.parallel.process_group import all_gather_tensor
from llmsys.parallel.reduce_scatter import CustomReduceScatter, configure_gradient_reduction
from llmsys.parallel.reproducible_sum import sum_tree

# R ranks that send rows, L experts of this rank, M rows, N rows of one rank for one expert, D width, F width inside

ALIGNMENT = 64
"""Bytes at a multiple of which the operands of a product begin, as new tensors on the CPU do."""


def apply_reproducible_expert_parallel(model: Transformer, meshes: DeviceMeshes, compute_dtype: torch.dtype) -> None:
    """Give each rank of the expert axis its experts, as in fast mode, and compute them one by one."""
    apply_expert_parallel(model, meshes)
    for layer in model.list_moe_layers():
        layer.experts.forward = SequentialExperts(layer.experts, compute_dtype)  # type: ignore[method-assign, assignment]
        if meshes.expert is not None:
            layer.dispatcher = ReproducibleTokenDispatcher(meshes.expert.get_group(), layer.config.num_experts)


class ReproducibleTokenDispatcher(AllToAllTokenDispatcher):
    """All-to-all there and back; in between, experts see which rows came from which rank."""

    def _compute_expert_outputs(self, arrived_MD: Tensor, received_RL: Tensor, experts: GroupedExperts) -> Tensor:
        answers_MD: Tensor = experts(arrived_MD, received_RL)
        return answers_MD


class SequentialExperts:
    """The forward of a layer's experts; `dtype` is the type of their products."""

    def __init__(self, experts: GroupedExperts, dtype: torch.dtype) -> None:
        self.experts, self.dtype = experts, dtype

    def __call__(self, x_MD: Tensor, counts: Tensor) -> Tensor:
        """One answer for each row, in the same order: by rank, then by expert, `counts` of shape (R, L) or (L,)."""
        counts_RL = counts if counts.ndim == 2 else counts[None]
        by_name = {
            n: copy_weight_per_source(_to_local(p), len(counts_RL), self.dtype)
            for n, p in self.experts.named_parameters()
        }
        rows = iter(x_MD.split(counts_RL.flatten().tolist()))
        answers = []
        for source in range(len(counts_RL)):
            by_expert = {name: copies[source].unbind() for name, copies in by_name.items()}
            for expert in range(counts_RL.shape[1]):
                tensors = {name: align_storage(each[expert]) for name, each in by_expert.items()}
                answers.append(align_storage(self._compute_expert(align_storage(next(rows)), tensors)))
        return torch.cat(answers)

    def _compute_expert(self, x_ND: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """What one expert makes of its rows."""

        def apply_projection(name: str, x: Tensor) -> Tensor:
            y, bias = x @ tensors[f"{name}_proj"], tensors.get(f"{name}_bias")
            return y if bias is None else y + bias

        config = self.experts.config
        gate_NF = apply_projection("gate", x_ND) if config.is_gated else None
        return apply_projection("down", apply_gated_activation(config, gate_NF, apply_projection("up", x_ND)))


def copy_weight_per_source(weight: Tensor, sources: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """`weight` in `dtype`, once for each source; the gradient is the tree's sum in the type of `weight`."""
    if sources == 1:
        return (weight.to(dtype),)
    copies: tuple[Tensor, ...] = _SourceCopies.apply(weight, sources, dtype)  # type: ignore[no-untyped-call]
    return copies


def align_storage(x: Tensor) -> Tensor:
    """`x`, and its gradient, at an address that is a multiple of ALIGNMENT: products may depend on that."""
    aligned: Tensor = _AlignedStorage.apply(x)  # type: ignore[no-untyped-call]
    return aligned


class _SourceCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sources: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.dtype = weight.dtype
        cast = weight.to(dtype)
        return tuple(cast.view_as(cast) for _ in range(sources))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return sum_tree(torch.stack([gradient.to(ctx.dtype) for gradient in gradients])), None, None


class _AlignedStorage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _copy_if_unaligned(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _copy_if_unaligned(gradients[0])


def _copy_if_unaligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x.view_as(x)


def _to_local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


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

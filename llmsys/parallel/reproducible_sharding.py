"""Reproducible FSDP2 and experts: the same bits for any number of ranks.

Experts: rows of a matmul can depend on how many there are, and elements of an activation on their
alignment (the remainder of a vector takes another path through the kernel). So each expert computes
the rows of each micro-batch in separate matmuls and storage, of shapes that no layout changes.
The rows that arrive from R ranks are R micro-batches; the R gradients of a weight are summed by the
tree of reproducible_sum.py, in float32.

Gradients: a reduce-scatter may add ranks in any order. Here every rank sends each shard of its
gradient to the rank that keeps it (the same bytes as a ring's reduce-scatter), which sums them by
the tree. Replicas then gather their sums and add them by the tree too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llmsys.config.moe import MoeConfig
from llmsys.model.experts import GroupedExperts
from llmsys.model.feed_forward import apply_gated_activation
from llmsys.model.initialization import Initializer
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.collectives import CustomReduceScatter, configure_gradient_reduction
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from llmsys.parallel.fsdp import configure_prefetch
from llmsys.parallel.parallelize import apply_expert_parallel, build_expert_placement
from llmsys.parallel.plain import PlainModel
from llmsys.parallel.process_group import all_gather_tensor
from llmsys.parallel.reproducible_sum import sum_tree

# R ranks that send rows, L experts of this rank, M rows, N rows of one rank for one expert, D
# width, F width inside

# Alignment of the operands of a matmul in bytes, as of new tensors on the CPU; results can depend
# on it.
ALIGNMENT = 64


def apply_reproducible_expert_parallel(
    model: Transformer, meshes: DeviceMeshes, compute_dtype: torch.dtype
) -> None:
    """Give each rank of the expert axis its experts, as in fast mode, and compute them one by
    one.
    """
    apply_expert_parallel(model, meshes)
    for layer in model.list_moe_layers():
        layer.experts.forward = SequentialExperts(layer.experts, compute_dtype)  # type: ignore[method-assign,assignment]
        if meshes.expert is not None:
            layer.dispatcher = ReproducibleTokenDispatcher(meshes.expert.get_group(), layer.config)


class ReproducibleTokenDispatcher(AllToAllTokenDispatcher):
    """All-to-all dispatcher whose experts see which rows came from which rank; every assignment
    is a row.
    """

    def __init__(self, group: dist.ProcessGroup, config: MoeConfig) -> None:
        super().__init__(group, config)
        # sums of a rank's experts would depend on the number of ranks
        self.sends_once_per_rank = False

    def _compute_expert_outputs(
        self, arrived_MD: Tensor, received_RL: Tensor, experts: GroupedExperts
    ) -> Tensor:
        outputs_MD: Tensor = experts(arrived_MD, received_RL)
        return outputs_MD


class SequentialExperts:
    """The forward of a layer's experts; `dtype` is the dtype of their matmuls."""

    def __init__(self, experts: GroupedExperts, dtype: torch.dtype) -> None:
        self.experts = experts
        self.dtype = dtype

    def __call__(self, x_MD: Tensor, counts: Tensor) -> Tensor:
        """Return one output per row, in the same order: by rank, then by expert, with `counts`
        (R, L) or (L,).
        """
        counts_RL = counts if counts.ndim == 2 else counts[None]
        by_name = {
            n: copy_weight_per_source(get_local_tensor(p), len(counts_RL), self.dtype)
            for n, p in self.experts.named_parameters()
        }
        rows = iter(x_MD.split(counts_RL.flatten().tolist()))
        outputs = []
        for source in range(len(counts_RL)):
            by_expert = {name: copies[source].unbind() for name, copies in by_name.items()}
            for expert in range(counts_RL.shape[1]):
                tensors = {name: align_storage(each[expert]) for name, each in by_expert.items()}
                outputs.append(
                    align_storage(self._compute_expert(align_storage(next(rows)), tensors))
                )
        return torch.cat(outputs)

    def _compute_expert(self, x_ND: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return the outputs of one expert."""

        def apply_projection(name: str, x: Tensor) -> Tensor:
            y = x @ tensors[f"{name}_proj"]
            bias = tensors.get(f"{name}_bias")
            return y if bias is None else y + bias

        config = self.experts.config
        gate_NF = apply_projection("gate", x_ND) if config.is_gated else None
        return apply_projection(
            "down", apply_gated_activation(config, gate_NF, apply_projection("up", x_ND))
        )


def copy_weight_per_source(weight: Tensor, sources: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Copy a weight once per source of rows, so that its gradients are summed by the tree.

    Args:
        weight: The weight.
        sources: Ranks that sent rows.
        dtype: Dtype of the copies.

    Returns:
        (sources, ...) in `dtype`. The gradient is the tree's sum in the dtype of `weight`.
    """
    if sources == 1:
        return (weight.to(dtype),)
    copies: tuple[Tensor, ...] = _SourceCopies.apply(weight, sources, dtype)  # type: ignore[no-untyped-call]
    return copies


def align_storage(x: Tensor) -> Tensor:
    """Move a tensor, and in the backward pass its gradient, to an aligned address.

    Elements of an activation can depend on alignment: the remainder of a vector takes another
    path through the kernel.

    Args:
        x: The tensor.

    Returns:
        `x` at an address that is a multiple of ALIGNMENT.
    """
    aligned: Tensor = _AlignedStorage.apply(x)  # type: ignore[no-untyped-call]
    return aligned


class _SourceCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sources: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.dtype = weight.dtype
        cast = weight.to(dtype)
        return tuple(cast.view_as(cast) for _ in range(sources))  # views: one copy in memory

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


class ReproducibleReduceScatter(CustomReduceScatter):
    """Reduce-scatter by an all-to-all and the tree. The ranks of a group hold neighbouring
    leaves of the tree.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Implement `CustomReduceScatter.__call__`."""
        arrived = torch.empty_like(input_tensor)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        output_tensor.copy_(sum_tree(arrived.view(group.size(), -1)))


def all_reduce_replicas(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a gradient over replicas by the tree, in place. Collective.

    Args:
        gradient: This replica's gradient; becomes the sum.
        group: The replicas.
    """
    gradient.copy_(sum_tree(all_gather_tensor(gradient, group)))


def apply_reproducible_fsdp(
    model: Transformer, meshes: DeviceMeshes, compute_dtype: torch.dtype
) -> None:
    """Apply expert parallelism and FSDP2 with sums in a fixed order.

    Args:
        model: A model on the meta device; changed in place.
        meshes: The sub-meshes; tensor and context parallelism are not supported.
        compute_dtype: Dtype of the forward. Masters and sums are float32.
    """
    policy = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    apply_reproducible_expert_parallel(model, meshes, compute_dtype)
    place = build_expert_placement(model, meshes)
    if meshes.expert_fsdp is not None:
        for layer in model.list_moe_layers():
            # These experts compute micro-batches of other ranks too, so their gradients leave
            # autograd in float32.
            _shard_module(
                layer.experts, meshes.expert_fsdp, policy(param_dtype=torch.float32), place
            )
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            _shard_module(block, meshes.dense, policy(param_dtype=compute_dtype), place)
    _shard_module(model, meshes.dense, policy(param_dtype=compute_dtype), place)
    if meshes.expert is not None:
        configure_prefetch(model)


def build_reproducible_plain(
    model: Transformer,
    meshes: DeviceMeshes,
    compute_dtype: torch.dtype,
    device: torch.device,
    initial: Initializer,
) -> PlainModel:
    """Build plain data parallelism with sums in a fixed order.

    Args:
        model: A model on the meta device; changed in place.
        meshes: The sub-meshes; only the shard axis may have more than one rank.
        compute_dtype: Dtype of the weights. Masters and sums are float32.
        device: Device of this rank.
        initial: Computes initial values.

    Returns:
        The model with its masters; each micro-batch is to be entered as the last one.
    """
    apply_reproducible_expert_parallel(model, meshes, compute_dtype)
    return PlainModel(
        model,
        meshes,
        compute_dtype=compute_dtype,
        device=device,
        initial=initial,
        reduce=ReproducibleReduceScatter(),
    )


def _shard_module(
    module: Any,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    place: Callable[[nn.Parameter], Shard | None],
) -> None:
    """Make one FSDP unit over the last axis of `mesh`; an axis before it holds replicas."""
    axes = mesh.mesh_dim_names or ()
    shards = mesh if len(axes) == 1 else mesh[axes[-1]]
    fully_shard(module, mesh=shards, mp_policy=policy, shard_placement_fn=place)
    configure_gradient_reduction(module, shards, ReproducibleReduceScatter())
    if len(axes) > 1:
        add: Callable[[Tensor], None] = partial(all_reduce_replicas, group=mesh.get_group(axes[0]))
        module.set_all_reduce_hook(add)

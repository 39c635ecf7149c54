"""Parallelism applied to a model from outside, in a fixed order: experts, tensor and context axes,
FSDP2.

Takes a model on the meta device and leaves it sharded without storage; `materialize_parameters`
then gives each rank its own shards of the initial values.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from llmsys.config.expert_sharding import MAX_IMBALANCE, compute_dim_imbalance, select_shard_dim
from llmsys.log import get_logger
from llmsys.model.initialization import Initializer
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.parallel.block_compilation import list_blocks
from llmsys.parallel.collectives import configure_gradient_reduction
from llmsys.parallel.context_parallel import divide_attention
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.dtensor_slices import get_local_region
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from llmsys.parallel.ring_context import apply_ring
from llmsys.parallel.sequence_sharding import SequenceSharding, divide_positions
from llmsys.parallel.tensor_parallel import divide_feed_forwards, split_matrices

log = get_logger(__name__)


def apply_expert_parallel(model: Transformer, meshes: DeviceMeshes) -> None:
    """Divide experts over the expert axis, and give each MoE layer an all-to-all dispatcher.

    Args:
        model: The model on the meta device. Parameters of experts become DTensors, so that
            checkpoints see one parameter of all experts.
        meshes: The sub-meshes; without an expert axis nothing changes.
    """
    if meshes.expert is None:
        return
    for layer in model.list_moe_layers():
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            local = parameter.data.chunk(meshes.expert.size(), dim=0)[
                meshes.expert.get_local_rank()
            ]
            # A DTensor, so that checkpoints see one parameter of all experts.
            shared = DTensor.from_local(
                local.contiguous(), meshes.expert, [Shard(0)], run_check=False
            )
            layer.experts.register_parameter(name, nn.Parameter(shared))
        layer.dispatcher = AllToAllTokenDispatcher(meshes.expert.get_group(), layer.config)


def apply_tensor_context_parallel(model: Transformer, meshes: DeviceMeshes) -> SequenceSharding:
    """Shard matrices over the tensor axis, and sequences over tensor and context.

    Args:
        model: The model on the meta device.
        meshes: The sub-meshes; axes of one rank change nothing.

    Returns:
        How sequences are divided; the engine reduces gradients of full vectors by it.
    """
    sharding = SequenceSharding(model, meshes)
    if meshes.tensor is not None:
        split_matrices(model, meshes.tensor)
        divide_feed_forwards(model, sharding)
    if meshes.ring is not None:
        apply_ring(model, sharding)
    if meshes.sequence is not None:
        divide_positions(model, sharding)
        divide_attention(model, sharding)
    return sharding


def apply_fsdp(
    model: Transformer,
    meshes: DeviceMeshes,
    compute_dtype: torch.dtype,
    offload: Literal["none", "state"] = "none",
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """Apply FSDP2: float32 masters in shards, forward in `compute_dtype`, gradients summed in
    float32.

    Each block is a unit, and its experts are another where they have their own mesh.

    Args:
        model: The model, after all other axes.
        meshes: The sub-meshes.
        compute_dtype: Dtype of gathered weights and of activations.
        offload: With `state` shards are in host memory and are copied to the device as they are
            gathered.
        reduce_dtype: Dtype of the sums over ranks; those over micro-batches are in float32.
    """
    pinned = torch.cuda.is_available()  # on the CPU offload moves nothing
    storage = OffloadPolicy() if offload == "none" else CPUOffloadPolicy(pin_memory=pinned)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    units: list[tuple[Any, DeviceMesh]] = [
        (block, meshes.dense) for block in list_blocks(model)
    ] + [(model, meshes.replica)]
    if meshes.expert_fsdp is not None:
        # Inner modules first: FSDP2 leaves the parameters of inner units out of outer ones.
        units = [(layer.experts, meshes.expert_fsdp) for layer in model.list_moe_layers()] + units
    place = build_expert_placement(model, meshes)
    for module, mesh in units:
        fully_shard(
            module, mesh=mesh, mp_policy=policy, offload_policy=storage, shard_placement_fn=place
        )
        configure_gradient_reduction(module, mesh)


def build_expert_placement(
    model: Transformer, meshes: DeviceMeshes
) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP2's `shard_placement_fn`: experts are split inside where whole experts would make
    uneven shards.

    Logs a warning where neither is even.

    Args:
        model: The model, after `apply_expert_parallel`.
        meshes: The sub-meshes.

    Returns:
        A function from a parameter to its placement; None for dim 0.
    """
    mesh = meshes.dense if meshes.expert_fsdp is None else meshes.expert_fsdp
    shards = mesh.size(mesh.ndim - 1)
    dims = dict[nn.Parameter, int]()
    uneven = ""
    for layer in model.list_moe_layers():
        for name, parameter in layer.experts.named_parameters(recurse=False):
            shape = tuple(get_local_tensor(parameter).shape)
            dims[parameter] = dim = select_shard_dim(shape, shards)
            # Biases of experts, of two dims, are too small for their imbalance to matter.
            if len(shape) > 2 and compute_dim_imbalance(shape[dim], shards) > MAX_IMBALANCE:
                uneven = f"{name} {shape}"
    if uneven:
        log.warning(
            "%s has no dim that %d ranks share evenly, so some ranks hold more of the experts "
            "than others. Use a layout.expert that divides the experts, or a number of ranks that "
            "divides the widths.",
            uneven,
            shards,
        )
    # None is FSDP's default, dim 0.
    return lambda parameter: Shard(dims[parameter]) if dims.get(parameter) else None


def materialize_parameters(
    model: Transformer,
    device: torch.device,
    initial: Initializer,
    *,
    on_host: bool = False,
) -> None:
    """Allocate storage and set the initial value of every parameter; a rank keeps only its shard of
    each.

    Args:
        model: A model on the meta device; changed in place.
        device: Where parameters and buffers are allocated.
        initial: Computes initial values, see `build_initializer`.
        on_host: Allocate parameters in host memory, and only buffers on `device`.
    """
    model.to_empty(device=torch.device("cpu") if on_host else device)
    # Parameters that are offloaded are on the host, buffers are not.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    # `to_empty` has left the buffers without values.
    model.reset_buffers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(initial(name, parameter.shape, get_local_region(parameter)))

"""List the tensors of one block in the order in which they are made, and select those that a recompute policy saves.

The kinds in llmsys/config list their own tensors; this file puts norms and the residual stream around them.
"""

from collections.abc import Iterable, Iterator

from llmsys.config.model import ModelConfig
from llmsys.config.saved_tensor import ActivationShape, Producer, SavedTensor
from llmsys.estimate.saved_attention import (
    iter_attention_tensors,
    iter_cross_attention_tensors,
    iter_output_projection,
)
from llmsys.estimate.software_profile import MemoryProfile


def list_saved_block_tensors(model: ModelConfig, layer: int, shape: ActivationShape) -> list[list[SavedTensor]]:
    """Return the tensors of block `layer`, branch by branch.

    The block's input belongs to its first branch, its output to the next block.
    """
    names = ["attention", *(["cross_attention"] if model.family == "encoder_decoder" else []), "feed_forward"]
    return [
        list(_iter_branch_tensors(model, layer, name, shape, is_first=not index)) for index, name in enumerate(names)
    ]


def _iter_branch_tensors(
    model: ModelConfig, layer: int, name: str, shape: ActivationShape, *, is_first: bool
) -> Iterator[SavedTensor]:
    residual, stream = model.residual, shape.compute_residual_bytes(model.hidden_size)
    if is_first:
        yield SavedTensor("block input", stream, "input")
    elif not (residual.is_parallel or residual.normalizes_sum):  # a sum that a norm or the matmuls save
        yield SavedTensor(f"stream before {name}", stream, "sum")
    if residual.normalizes_input and (is_first or not residual.shares_input_norm):
        yield from model.norm.iter_saved_tensors(f"{name} norm", model.hidden_size, shape)
        producer: Producer = "gather" if shape.tensor > 1 else "pointwise"
        is_saved = name != "feed_forward" or _is_feed_forward_input_saved(model, layer, shape)
        normed = shape.compute_input_bytes(model.hidden_size)
        yield SavedTensor(f"normed input of {name}", normed, producer, is_saved=is_saved)
    elif shape.tensor > 1 and shape.saves_gathered_inputs:
        yield SavedTensor(f"gathered input of {name}", shape.compute_gathered_bytes(model.hidden_size), "gather")
    is_output_saved = residual.normalizes_output
    if name == "attention":
        yield from iter_attention_tensors(model, layer, shape, is_output_saved=is_output_saved)
    elif name == "cross_attention":
        yield from iter_cross_attention_tensors(model, shape, is_output_saved=is_output_saved)
    else:
        yield from _iter_feed_forward_tensors(model, layer, shape, is_output_saved=is_output_saved)
    if residual.normalizes_output:
        yield from model.norm.iter_saved_tensors(f"{name} output norm", model.hidden_size, shape)
    if model.dropout.residual:
        # A CPU saves the mask in the activations' dtype, a GPU in bytes.
        channel = shape.compute_residual_bytes(1) * model.hidden_size
        mask = channel if shape.is_on_cpu else shape.compute_residual_bytes(model.hidden_size, 1)
        yield SavedTensor(f"dropout mask after {name}", mask, "pointwise")
    if residual.normalizes_sum:
        yield SavedTensor(f"sum behind {name}", stream, "sum")
        yield from model.norm.iter_saved_tensors(f"{name} norm", model.hidden_size, shape)
        if name != "feed_forward":
            yield SavedTensor(f"normed sum after {name}", stream, "pointwise")


def _iter_feed_forward_tensors(
    model: ModelConfig, layer: int, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    if model.moe is not None and model.is_moe_layer(layer):
        yield from model.moe.iter_saved_tensors(model.hidden_size, shape, is_output_saved=is_output_saved)
        return
    has_dropout, inner = model.dropout.activation > 0, shape.compute_sharded_bytes(model.intermediate_size)
    yield from model.feed_forward.iter_saved_tensors("", inner, has_dropout=has_dropout)
    if has_dropout:
        yield SavedTensor("dropped channels", inner, "pointwise")
    yield from iter_output_projection("feed-forward projection", model, shape, is_saved=is_output_saved)


def _is_feed_forward_input_saved(model: ModelConfig, layer: int, shape: ActivationShape) -> bool:
    return model.moe is None or not model.is_moe_layer(layer) or model.moe.is_input_saved(shape)


def compute_saved_bytes(tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile) -> int:
    """Return the bytes that a block saves under a recompute policy: none, selective or block."""
    return sum(tensor.bytes for tensor in select_saved_tensors(tensors, policy, compiled, system))


def select_saved_tensors(
    tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> list[SavedTensor]:
    """Return the tensors that a block saves under a recompute policy."""
    tensors = list(tensors)
    if policy == "full":
        return [tensor for tensor in tensors if tensor.producer == "input"]
    if policy == "selective":
        return _apply_selective_policy(tensors, compiled, system)
    if compiled:  # pointwise ops are fused into their readers, and recomputed (min-cut partitioner)
        return [
            tensor
            for tensor in tensors
            if tensor.producer not in ("pointwise", "fused")
            and (tensor.is_saved or tensor.producer == "product")
            and tensor.is_needed
        ]
    return [tensor for tensor in tensors if tensor.is_saved]


def _apply_selective_policy(tensors: list[SavedTensor], compiled: bool, system: MemoryProfile) -> list[SavedTensor]:
    if system.selective == "attention":
        return [tensor for tensor in tensors if tensor.is_saved and not tensor.name.startswith("scores")]
    products = [tensor for tensor in tensors if tensor.producer == "product"]
    if system.selective == "alternate":
        products = products[::2]
    others = [tensor for tensor in tensors if tensor.producer in ("input", "attention", "collective")]
    return [tensor for tensor in [*products, *others] if tensor.is_needed or not compiled]

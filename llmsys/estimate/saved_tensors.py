"""List the tensors of one block in the order in which they are made, and select those that a recompute policy saves.

The kinds in llmsys/config list their own tensors; this file puts norms and the residual stream around them.

What attention saves depends on its kernel, the one that llmsys/model/scaled_dot_product.py would choose on the device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import FP32_BYTES, ActivationShape, Producer, SavedTensor, ScoreShape
from llmsys.estimate.software_profile import MemoryProfile

MAX_CHUNKED_LENGTH, CHUNK = 2048, 128  # llmsys/model/cpu_attention.py

Kernel = Literal["fused", "chunked", "composed", "plain", "explicit"]
"""fused: saves its inputs and a logsumexp; chunked: the CPU's for 16 bits; composed: torch's own fallback, in float32;
plain: our ops for features that no kernel has; explicit: Megatron's before fused attention, in 16 bits."""


def iter_attention_tensors(
    model: ModelConfig, layer: int, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the tensors of self-attention in block `layer`. `is_output_saved`: a norm after it saves its output."""
    whole = model.attention.build_score_shape(model, shape.length, is_causal=model.family != "encoder")
    blocks = model.attention.list_score_blocks(layer, whole, shape)
    scores = blocks[0][0]
    kernel = _choose_kernel(model, *blocks[0], is_cross=False)
    saves_inputs = kernel in ("fused", "explicit")
    yield from model.attention.iter_saved_tensors(
        model,
        whole,
        shape,
        is_rotated=model.uses_rope(layer),
        are_queries_saved=saves_inputs,
        are_keys_saved=saves_inputs and not _must_repeat_key_value_heads(scores, shape),
    )
    for block_scores, block_shape in blocks:
        for tensor in _iter_score_tensors(model, block_scores, kernel, block_shape):
            # Outputs of several calls are joined: what the next matmul saves is none of them.
            is_joined = len(blocks) > 1 and tensor.name == "attention output" and kernel != "fused"
            yield replace(tensor, is_saved=False) if is_joined else tensor
    yield from iter_output_projection("attention projection", model, shape, is_saved=is_output_saved)


def iter_cross_attention_tensors(
    model: ModelConfig, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the tensors of cross-attention: queries of the target's positions, keys and values of the source's."""
    attention = model.attention.cross_attention
    scores = attention.build_score_shape(model, shape.source, is_causal=False)
    kernel = _choose_kernel(model, scores, shape, is_cross=True)
    saves_inputs = kernel in ("fused", "explicit")
    yield from attention.iter_saved_tensors(
        model,
        scores,
        shape,
        is_rotated=False,
        are_queries_saved=saves_inputs,
        are_keys_saved=saves_inputs and not _must_repeat_key_value_heads(scores, shape),
    )
    yield from _iter_score_tensors(model, scores, kernel, shape)
    yield from iter_output_projection("cross-attention projection", model, shape, is_saved=is_output_saved)


def iter_output_projection(
    name: str, model: ModelConfig, shape: ActivationShape, *, is_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the last matmul of a branch: all positions, and after the sum over tensor ranks this rank's."""
    output = shape.compute_residual_bytes(model.hidden_size)
    if shape.tensor == 1:
        yield SavedTensor(name, output, "product", is_saved=is_saved, is_needed=is_saved)
        return
    partial = shape.compute_gathered_bytes(model.hidden_size)
    yield SavedTensor(f"{name}, partial", partial, "product", is_saved=False, is_needed=False)
    yield SavedTensor(name, output, "collective", is_saved=is_saved, is_needed=is_saved)


def _choose_kernel(model: ModelConfig, scores: ScoreShape, shape: ActivationShape, *, is_cross: bool) -> Kernel:
    """Return the kernel for these scores. Positions are a bias in self-attention only, and so are sinks."""
    if shape.has_explicit_scores:
        return "explicit"
    is_unknown = scores.has_softcap or (scores.has_sinks and not is_cross)
    # torch's fused kernel of the CPU has no dropout.
    if is_unknown or (model.dropout.attention > 0 and shape.is_on_cpu):
        return "plain"
    has_trained_scores = model.position.has_trained_scores and not is_cross
    if shape.is_on_cpu and (has_trained_scores or scores.key_channels != scores.value_channels):
        return "composed"
    has_default_scale = scores.scale is None or abs(scores.scale * scores.key_channels**0.5 - 1) < 1e-9
    has_table = model.position.has_score_table and not is_cross
    is_short = max(shape.length, scores.keys) <= MAX_CHUNKED_LENGTH
    if shape.is_on_cpu and shape.value_bytes == 2 and is_short and has_default_scale and not has_table:
        return "chunked"
    return "fused"


def _iter_score_tensors(
    model: ModelConfig, scores: ScoreShape, kernel: Kernel, shape: ActivationShape
) -> Iterator[SavedTensor]:
    """Yield copies of the inputs where a kernel makes them, scores where it saves them, and the output."""
    yield from _iter_input_copies(scores, kernel, shape)
    yield from model.position.iter_saved_tensors(scores, shape)
    yield from _iter_saved_scores(model, scores, kernel, shape)
    output = shape.compute_sharded_bytes(scores.heads * scores.value_channels)
    yield SavedTensor("attention output", output, "pointwise" if kernel in ("composed", "plain") else "attention")


def _iter_input_copies(scores: ScoreShape, kernel: Kernel, shape: ActivationShape) -> Iterator[SavedTensor]:
    share = scores.keys / shape.length
    queries = scores.heads * scores.key_channels
    if kernel in ("composed", "plain", "chunked"):
        # composed and plain expand keys and values to every query head; composed casts to float32.
        heads = scores.key_value_heads if kernel == "chunked" else scores.heads
        keys_values = heads * (scores.key_channels + scores.value_channels)
        size = FP32_BYTES if kernel == "composed" else shape.value_bytes
        yield SavedTensor("queries as they are multiplied", shape.compute_sharded_bytes(queries, size), "pointwise")
        copies = int(shape.compute_sharded_bytes(keys_values, size) * share)
        yield SavedTensor("keys and values likewise", copies, "pointwise")
    elif kernel == "fused" and _must_repeat_key_value_heads(scores, shape):
        copies = int(2 * shape.compute_sharded_bytes(queries) * share)
        yield SavedTensor("keys and values of every head", copies, "fused")


def _must_repeat_key_value_heads(scores: ScoreShape, shape: ActivationShape) -> bool:
    """Return whether keys are copied for every query head: with a table, the fused GPU kernel has no groups."""
    return shape.mask_table != "none" and not shape.is_on_cpu and scores.key_value_heads != scores.heads


def _iter_saved_scores(
    model: ModelConfig, scores: ScoreShape, kernel: Kernel, shape: ActivationShape
) -> Iterator[SavedTensor]:
    heads, keys, has_dropout = scores.heads, scores.keys, model.dropout.attention > 0
    if kernel == "fused":
        yield SavedTensor("logsumexp", shape.compute_sharded_bytes(heads, FP32_BYTES), "attention")
    elif kernel == "chunked":
        share = _compute_causal_share(shape.length) if scores.is_causal else 1.0
        yield SavedTensor("probabilities", int(shape.compute_score_bytes(heads, keys=keys) * share), "attention")
    elif kernel == "explicit":  # Korthikanti 2022, 4.1: softmax 2as, mask as, dropped 2as
        yield SavedTensor("scores, softmax", shape.compute_score_bytes(heads, keys=keys), "pointwise")
    else:
        yield from _iter_unfused_scores(scores, kernel, shape, has_dropout=has_dropout)
    # SDPA turns a boolean table into an additive one.
    if kernel == "fused" and shape.mask_table in ("windows", "documents"):
        rows = shape.sequences if shape.mask_table == "documents" else 1
        yield SavedTensor("table as numbers", rows * shape.length * keys * shape.value_bytes, "fused")
    if has_dropout and kernel != "fused":
        mask = shape.value_bytes if shape.is_on_cpu else 1
        yield SavedTensor("scores, dropout mask", shape.compute_score_bytes(heads, mask, keys=keys), "pointwise")
        yield SavedTensor("scores, dropped", shape.compute_score_bytes(heads, keys=keys), "pointwise")


def _iter_unfused_scores(
    scores: ScoreShape, kernel: Kernel, shape: ActivationShape, *, has_dropout: bool
) -> Iterator[SavedTensor]:
    """Yield T × S for every head: softmax in float32, and without dropout the weights in 16 bits."""
    heads, keys = scores.heads, scores.keys
    if scores.has_softcap:
        yield SavedTensor("scores, capped", shape.compute_score_bytes(heads, keys=keys), "pointwise")
    softmax = shape.compute_score_bytes(heads, FP32_BYTES, keys=keys + scores.has_sinks)
    yield SavedTensor("scores, softmax", softmax, "pointwise")
    if kernel == "plain" and shape.value_bytes != FP32_BYTES and not has_dropout:
        yield SavedTensor("scores, weights", shape.compute_score_bytes(heads, keys=keys), "pointwise")


def _compute_causal_share(length: int) -> float:
    """Return the share of T × T scores that causal attention computes in chunks: up to the end of each chunk."""
    ends = (min(start + CHUNK, length) for start in range(0, length, CHUNK))
    return sum((end - start) * end for start, end in zip(range(0, length, CHUNK), ends, strict=True)) / length**2


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

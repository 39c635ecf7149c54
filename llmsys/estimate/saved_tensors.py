"""List the tensors of one block in the order in which they are made, and select those that a
recompute policy saves.

The kinds in llmsys/config list their own tensors; this file puts norms and the residual stream
around them.

What attention saves depends on its kernel, which the model's own decision table chooses
(config/attention_kernel.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from llmsys.config.long_attention import AttentionConfig
from llmsys.config.lsh_attention import HASH_ORDER
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    Producer,
    SavedTensor,
    ScoreShape,
)
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.estimate.python_blocks import iter_measured_tensors
from llmsys.kernels.attention_kernel import AttentionTraits, choose_attention_kernel
from llmsys.kernels.attention_layers import describe_cross_attention, describe_self_attention

CHUNK = 128  # llmsys/model/cpu_attention.py


@dataclass(frozen=True)
class AttentionMemory:
    """The kernel of one attention, as far as its saved tensors depend on it.

    Attributes:
        kind: fused: saves its inputs and a logsumexp; flex: the same, by flex_attention; chunked:
            the CPU's for 16 bits; composed: torch's own fallback, in float32; plain: our ops for
            features that no kernel has; explicit: Megatron's before fused attention, in 16 bits.
        table: the table of positions by positions that it gets: booleans for windows or documents,
            or numbers.
    """

    kind: Literal["fused", "flex", "chunked", "composed", "plain", "explicit"]
    table: Literal["none", "windows", "documents", "numbers"] = "none"

    @property
    def saves_inputs(self) -> bool:
        """True where queries, keys and values are saved as they come."""
        return self.kind in ("fused", "flex", "explicit")

    def must_repeat_heads(self, scores: ScoreShape, shape: ActivationShape) -> bool:
        """Return whether keys are copied for every query head: with a table, the fused GPU
        kernel has no groups.
        """
        is_on_gpu = self.kind == "fused" and not shape.is_on_cpu
        return is_on_gpu and self.table != "none" and scores.key_value_heads != scores.heads


def choose_attention_memory(
    model: ModelConfig, layer: int, shape: ActivationShape
) -> AttentionMemory:
    """Return the kernel of self-attention in block `layer`."""
    # Padding follows the targets, so causal attention over them needs no document numbers.
    documents, kind = (
        shape.has_documents and model.family != "encoder_decoder",
        model.get_layer_type(layer),
    )
    traits = describe_self_attention(
        model, kind, dtype=shape.dtype, length=shape.length, has_documents=documents
    )
    return _choose_memory(traits, shape)


def _choose_memory(traits: AttentionTraits, shape: ActivationShape) -> AttentionMemory:
    # a ring saves inputs, output and logsumexp, by any kernel
    if shape.has_explicit_scores or shape.has_ring:
        return AttentionMemory("explicit" if shape.has_explicit_scores else "fused")
    if not shape.has_mask_rules:
        traits = replace(traits, has_documents=False, has_window=False)
    choice = choose_attention_kernel(shape.device, traits)
    rule: Literal["none", "windows", "documents"] = "windows" if traits.has_window else "none"
    # Keys that an indexer chooses differ from row to row, as documents do.
    rule = "documents" if traits.has_documents or traits.selects_keys else rule
    table = "none" if not choice.has_table else "numbers" if traits.bias != "none" else rule
    match choice.kernel:
        case "sdpa" if shape.is_on_cpu and (
            traits.has_distance_scores
            or traits.bias == "relative"
            or traits.qk_width != traits.v_width
        ):
            return AttentionMemory("composed", table)
        case "sdpa" | "varlen":
            return AttentionMemory("fused", table)
        case "flex" | "chunked":
            return AttentionMemory(choice.kernel, table)
        case "eager":
            return AttentionMemory("plain", table)
        case unreachable:
            assert_never(unreachable)


def iter_attention_tensors(
    model: ModelConfig, layer: int, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the tensors of self-attention in block `layer`. `is_output_saved`: a norm after it
    saves its output.
    """
    if isinstance(model.attention, PythonAttentionConfig):
        yield from iter_measured_tensors(model.attention, model, layer, shape)
        yield from iter_output_projection(
            "attention projection", model, shape, is_saved=is_output_saved
        )
        return
    linear = model.linear_attention if model.is_linear_layer(layer) else None
    if model.has_attention(layer):
        # Of a hybrid layer the sum of both is saved.
        is_saved = is_output_saved and linear is None
        yield from _iter_pair_tensors(model, layer, shape, is_output_saved=is_saved)
    if linear is not None:
        scores = linear.build_score_shape(model, shape.length, is_causal=True)
        options = dict.fromkeys(("is_rotated", "are_queries_saved", "are_keys_saved"), False)
        yield from linear.iter_saved_tensors(model, scores, shape, **options)
        yield from iter_output_projection(
            "attention projection", model, shape, is_saved=is_output_saved
        )


def _iter_pair_tensors(
    model: ModelConfig, layer: int, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the tensors of full or sliding attention."""
    # Both streams of XLNet see the keys of the first.
    keys = shape.source if model.head.kind == "permutation" else shape.length
    scores = model.attention.build_score_shape(model, keys, is_causal=model.family != "encoder")
    kernel, attention = choose_attention_memory(model, layer, shape), model.attention
    if keys < shape.length:
        states = shape.compute_residual_bytes(model.hidden_size) * keys // shape.length
        yield SavedTensor("first stream", states, "fused")
        yield SavedTensor(
            "visible keys of both streams", shape.sequences * shape.length * keys, "pointwise"
        )
    is_rotated, saved = model.uses_rope(layer), kernel.saves_inputs
    if layer in model.embedding.value_layers:
        # For the gradient of its scale; the sum with the values is saved in their place.
        table = shape.compute_sharded_bytes(scores.key_value_heads * scores.value_channels)
        yield SavedTensor("value embedding", table, "pointwise")
    blocks = attention.list_score_blocks(layer, scores, shape)
    if blocks or attention.recomputes_scores:
        inputs = {"is_rotated": is_rotated, "are_queries_saved": saved, "are_keys_saved": saved}
        yield from attention.iter_saved_tensors(model, scores, shape, **inputs)
    else:
        yield from _iter_kernel_tensors(
            model, attention, scores, kernel, shape, is_rotated=is_rotated
        )
    for block_scores, block_shape, has_table in blocks:
        own = replace(kernel, table="documents" if has_table else "none")
        for tensor in _iter_score_tensors(model, block_scores, own, block_shape):
            # Outputs of several calls are joined: what the next matmul saves is none of them.
            is_joined = tensor.name == "attention output" and kernel.kind != "fused"
            yield replace(tensor, is_saved=False) if is_joined else tensor
    yield from iter_output_projection(
        "attention projection", model, shape, is_saved=is_output_saved
    )


def iter_cross_attention_tensors(
    model: ModelConfig, shape: ActivationShape, *, is_output_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the tensors of cross-attention: queries of the target's positions, keys and values
    of the source's.
    """
    attention = model.attention.cross_attention
    scores = attention.build_score_shape(model, shape.source, is_causal=False)
    length = max(shape.length, shape.source)  # as the chunked kernel of the CPU limits it
    traits = describe_cross_attention(
        model, dtype=shape.dtype, length=length, has_documents=shape.has_documents
    )
    yield from _iter_kernel_tensors(
        model, attention, scores, _choose_memory(traits, shape), shape, is_rotated=False
    )
    yield from iter_output_projection(
        "cross-attention projection", model, shape, is_saved=is_output_saved
    )


def iter_output_projection(
    name: str, model: ModelConfig, shape: ActivationShape, *, is_saved: bool
) -> Iterator[SavedTensor]:
    """Yield the last matmul of a branch: all positions, and after the sum over tensor ranks this
    rank's.
    """
    output = shape.compute_residual_bytes(model.hidden_size)
    if shape.tensor == 1:
        yield SavedTensor(name, output, "product", is_saved=is_saved, is_needed=is_saved)
        return
    partial = shape.compute_gathered_bytes(model.hidden_size)
    yield SavedTensor(f"{name}, partial", partial, "product", is_saved=False, is_needed=False)
    yield SavedTensor(name, output, "collective", is_saved=is_saved, is_needed=is_saved)


def _iter_kernel_tensors(
    model: ModelConfig,
    attention: AttentionConfig,
    scores: ScoreShape,
    kernel: AttentionMemory,
    shape: ActivationShape,
    *,
    is_rotated: bool,
) -> Iterator[SavedTensor]:
    """Yield queries, keys and values, copies of them that a kernel makes, scores that it saves,
    and the output.
    """
    yield from attention.iter_saved_tensors(
        model,
        scores,
        shape,
        is_rotated=is_rotated,
        are_queries_saved=kernel.saves_inputs,
        are_keys_saved=kernel.saves_inputs and not kernel.must_repeat_heads(scores, shape),
    )
    yield from _iter_score_tensors(model, scores, kernel, shape)


def _iter_score_tensors(
    model: ModelConfig, scores: ScoreShape, kernel: AttentionMemory, shape: ActivationShape
) -> Iterator[SavedTensor]:
    """Yield what one call of the kernel saves in addition to its inputs."""
    yield from scores.iter_ring_tensors(shape)
    yield from _iter_input_copies(scores, kernel, shape)
    yield from model.position.iter_saved_tensors(scores, shape)
    yield from _iter_saved_scores(model, scores, kernel, shape)
    output = shape.compute_sharded_bytes(scores.heads * scores.value_channels)
    if kernel.kind == "flex" and scores.has_sinks:
        yield SavedTensor("attention output before sinks", output, "flex")
    producer: Producer = "flex" if kernel.kind == "flex" else "attention"
    yield SavedTensor(
        "attention output",
        output,
        "pointwise" if kernel.kind in ("composed", "plain") else producer,
    )


def _iter_input_copies(
    scores: ScoreShape, kernel: AttentionMemory, shape: ActivationShape
) -> Iterator[SavedTensor]:
    share = scores.keys / shape.length
    queries = scores.heads * scores.key_channels
    if kernel.kind in ("composed", "plain", "chunked"):
        # composed and plain expand keys and values to every query head; composed casts to float32.
        heads = scores.key_value_heads if kernel.kind == "chunked" else scores.heads
        keys_values = heads * (scores.key_channels + scores.value_channels)
        size = FP32_BYTES if kernel.kind == "composed" else shape.value_bytes
        yield SavedTensor(
            "queries as they are multiplied",
            shape.compute_sharded_bytes(queries, size),
            "pointwise",
        )
        copies = int(shape.compute_sharded_bytes(keys_values, size) * share)
        yield SavedTensor("keys and values likewise", copies, "pointwise")
    elif kernel.must_repeat_heads(scores, shape):
        copies = int(2 * shape.compute_sharded_bytes(queries) * share)
        yield SavedTensor("keys and values of every head", copies, "fused")


def _iter_saved_scores(
    model: ModelConfig, scores: ScoreShape, kernel: AttentionMemory, shape: ActivationShape
) -> Iterator[SavedTensor]:
    heads, keys, has_dropout = scores.heads, scores.keys, model.dropout.attention > 0
    is_fused = kernel.kind in ("fused", "flex")
    if is_fused:
        lse = shape.compute_sharded_bytes(heads, FP32_BYTES)
        yield SavedTensor("logsumexp", lse, "flex" if kernel.kind == "flex" else "attention")
    elif kernel.kind == "chunked":
        share = _compute_causal_share(shape.length) if scores.is_causal else 1.0
        yield SavedTensor(
            "probabilities", int(shape.compute_score_bytes(heads, keys=keys) * share), "attention"
        )
    elif kernel.kind == "explicit":  # Korthikanti 2022, 4.1: softmax 2as, mask as, dropped 2as
        yield SavedTensor(
            "scores, softmax", shape.compute_score_bytes(heads, keys=keys), "pointwise"
        )
    else:
        yield from _iter_unfused_scores(scores, kernel, shape, has_dropout=has_dropout)
    # SDPA turns a boolean table into an additive one.
    if is_fused and kernel.table in ("windows", "documents"):
        rows = shape.sequences if kernel.table == "documents" else 1
        yield SavedTensor(
            "table as numbers", rows * shape.length * keys * shape.value_bytes, "fused"
        )
    if has_dropout and not is_fused:
        mask = shape.value_bytes if shape.is_on_cpu else 1
        yield SavedTensor(
            "scores, dropout mask", shape.compute_score_bytes(heads, mask, keys=keys), "pointwise"
        )
        yield SavedTensor(
            "scores, dropped", shape.compute_score_bytes(heads, keys=keys), "pointwise"
        )


def _iter_unfused_scores(
    scores: ScoreShape, kernel: AttentionMemory, shape: ActivationShape, *, has_dropout: bool
) -> Iterator[SavedTensor]:
    """Yield T × S for every head: softmax in float32, and without dropout the weights in 16
    bits.
    """
    heads, keys = scores.heads, scores.keys
    if scores.has_softcap:
        yield SavedTensor(
            "scores, capped", shape.compute_score_bytes(heads, keys=keys), "pointwise"
        )
    softmax = shape.compute_score_bytes(heads, FP32_BYTES, keys=keys + scores.has_sinks)
    yield SavedTensor("scores, softmax", softmax, "pointwise")
    if kernel.kind == "plain" and shape.value_bytes != FP32_BYTES and not has_dropout:
        yield SavedTensor(
            "scores, weights", shape.compute_score_bytes(heads, keys=keys), "pointwise"
        )


def _compute_causal_share(length: int) -> float:
    """Return the share of T × T scores that causal attention computes in chunks: up to the end
    of each chunk.
    """
    ends = (min(start + CHUNK, length) for start in range(0, length, CHUNK))
    return (
        sum((end - start) * end for start, end in zip(range(0, length, CHUNK), ends, strict=True))
        / length**2
    )


def has_saved_output(model: ModelConfig, layer: int) -> bool:
    """Return whether the output of a block is saved for a skip and is not the input of the next
    block: in the middle of a U of an even number of layers.
    """
    return model.u_shaped_skips and 2 * (layer + 1) == model.num_hidden_layers


def list_saved_block_tensors(
    model: ModelConfig, layer: int, shape: ActivationShape
) -> list[list[SavedTensor]]:
    """Return the tensors of block `layer`, branch by branch.

    The block's input belongs to its first branch, its output to the next block.
    """
    names = [
        *(["attention"] if model.list_mixers(layer) else []),
        *(["cross_attention"] if model.family == "encoder_decoder" else []),
        *(["feed_forward"] if model.has_feed_forward(layer) else []),
    ]
    branches = [
        list(_iter_branch_tensors(model, layer, name, shape, is_first=not index))
        for index, name in enumerate(names)
    ]
    if has_saved_output(model, layer):
        stream = shape.compute_residual_bytes(model.hidden_size)
        branches[-1].append(SavedTensor("output before its own skip", stream, "input"))
    if not model.residual.is_reversible:
        return branches
    # States are computed backwards, and branches again; the order of hashes is that of the first
    # pass.
    return [
        [replace(one, is_saved=one.name == HASH_ORDER and one.is_saved) for one in branch]
        for branch in branches
    ]


def _iter_branch_tensors(
    model: ModelConfig, layer: int, name: str, shape: ActivationShape, *, is_first: bool
) -> Iterator[SavedTensor]:
    residual, stream = model.get_residual(layer), shape.compute_residual_bytes(model.hidden_size)
    if is_first:
        yield SavedTensor("block input", stream, "input")
    # a sum that a norm or the matmuls save
    elif not (residual.is_parallel or residual.normalizes_sum):
        yield SavedTensor(f"stream before {name}", stream, "sum")
    if residual.normalizes_input and (is_first or not residual.shares_input_norm):
        yield from model.norm.iter_saved_tensors(f"{name} norm", model.hidden_size, shape)
        producer: Producer = "gather" if shape.tensor > 1 else "pointwise"
        is_saved = name != "feed_forward" or _is_feed_forward_input_saved(model, layer, shape)
        normed = shape.compute_input_bytes(model.hidden_size)
        yield SavedTensor(f"normed input of {name}", normed, producer, is_saved=is_saved)
    elif shape.tensor > 1 and shape.saves_gathered_inputs:
        yield SavedTensor(
            f"gathered input of {name}", shape.compute_gathered_bytes(model.hidden_size), "gather"
        )
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
        yield from model.moe.iter_saved_tensors(
            model.hidden_size, shape, is_output_saved=is_output_saved
        )
        return
    if model.feed_forward_chunk is not None:  # a chunk is computed again in the backward pass
        return
    if isinstance(model.feed_forward, PythonFeedForwardConfig):
        yield from iter_measured_tensors(model.feed_forward, model, layer, shape)
        yield from iter_output_projection(
            "feed-forward projection", model, shape, is_saved=is_output_saved
        )
        return
    has_dropout, inner = (
        model.dropout.activation > 0,
        shape.compute_sharded_bytes(model.intermediate_size),
    )
    yield from model.feed_forward.iter_saved_tensors("", inner, has_dropout=has_dropout)
    if has_dropout:
        yield SavedTensor("dropped channels", inner, "pointwise")
    yield from iter_output_projection(
        "feed-forward projection", model, shape, is_saved=is_output_saved
    )


def _is_feed_forward_input_saved(model: ModelConfig, layer: int, shape: ActivationShape) -> bool:
    return model.moe is None or not model.is_moe_layer(layer) or model.moe.is_input_saved(shape)

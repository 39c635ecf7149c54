"""Memory of activations: what a micro-batch saves for backward, the head with its loss, and an
evaluation forward.

Combines the tensors of saved_tensors.py with the batch and the layout of a run. The result depends
on kernels, so it is called an estimate wherever it is shown. In an evaluation a rank has all
positions of its sequences, whatever axes divide them in training
(llmsys/parallel/sequence_sharding.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from llmsys.config.attention_device import AttentionDevice
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ActivationShape, SavedTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.memory_timeline import MemoryItem, compute_saved_bytes
from llmsys.estimate.saved_tensors import (
    choose_attention_memory,
    has_saved_output,
    list_saved_block_tensors,
)
from llmsys.estimate.software_profile import OURS, MemoryProfile
from llmsys.estimate.state_memory import FP32, get_compute_dtype_bytes

Branches = list[list[SavedTensor]]
# train.activation_checkpoint, whether blocks are compiled, and the program: what decides what is
# saved.
Policy = tuple[str, bool, MemoryProfile]


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with equal tensors; `prefix` is that of their parameters' names."""

    name: str
    prefix: str
    layers: tuple[int, ...]
    branches: Branches

    @property
    def saved_tensors(self) -> list[SavedTensor]:
        """All tensors of one of these blocks."""
        return [tensor for branch in self.branches for tensor in branch]


def compute_micro_batch(config: RunConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Count the sequences of one forward pass of a rank, and such passes in a step.

    Args:
        config: resolved config of a run.
        layout: resolved layout.

    Returns:
        (sequences, passes).
    """
    share = -(-config.batch.sequences_per_step // layout.data_parallel_size)
    sequences = config.batch.resolve_micro_sequences(share)
    return sequences, -(-share // sequences)


def build_activation_shape(
    config: RunConfig, layout: ParallelLayout, system: MemoryProfile = OURS
) -> ActivationShape:
    """Return the size of a micro-batch at the decoder, or at the only stack."""
    source, length = config.sequence_lengths
    return ActivationShape(
        sequences=compute_micro_batch(config, layout)[0],
        length=length,
        source=source,
        context=layout.context,
        tensor=layout.tensor,
        value_bytes=get_compute_dtype_bytes(config),
        has_documents=has_documents(config),
        are_experts_sharded=layout.expert > 1,
        device=AttentionDevice("cpu")
        if system.device == "cpu"
        else AttentionDevice("cuda", system.capability),
        has_mask_rules=system.masks == "kernel",
        has_explicit_scores=system.attention == "explicit",
        is_stream_sharded=system.residual_dtype == "divided",
        saves_gathered_inputs=system.gathered == "kept",
        has_ring=layout.ring_size > 1,
        expert_load=system.expert_load if layout.expert > 1 else 1.0,
    )


def iter_block_groups(config: RunConfig, shape: ActivationShape) -> Iterator[BlockGroup]:
    """Yield the blocks of every stack in the order of the forward pass: encoder, decoder,
    prediction modules.
    """
    model = config.model
    if model.family == "encoder_decoder":
        source = replace(shape, length=shape.source)
        yield from _list_stack_groups(model.encoder_model, "encoder.blocks.", source)
    yield from _list_stack_groups(model, "blocks.", shape)
    if model.multi_token_prediction is not None:
        last, layers = model.num_hidden_layers - 1, tuple(range(model.multi_token_prediction.depth))
        normed = 2 * shape.compute_residual_bytes(model.hidden_size)
        inputs = [SavedTensor("two normed inputs of a prediction module", normed, "pointwise")]
        yield BlockGroup(
            "prediction",
            "prediction.",
            layers,
            [inputs, *list_saved_block_tensors(model, last, shape)],
        )


@lru_cache(maxsize=64)  # every instant of a step asks for them
def _list_stack_groups(
    model: ModelConfig, prefix: str, shape: ActivationShape
) -> tuple[BlockGroup, ...]:
    return tuple(_iter_stack_groups(model, prefix, shape))


def _iter_stack_groups(
    model: ModelConfig, prefix: str, shape: ActivationShape
) -> Iterator[BlockGroup]:
    if model.rnn is not None:
        yield BlockGroup(
            "recurrent", prefix, (0,), [list(model.rnn.iter_saved_tensors(model, shape))]
        )
        return
    groups: dict[tuple[bool, bool, str, bool, bool, bool], list[int]] = {}
    for layer in range(model.num_hidden_layers):
        key = (
            model.is_moe_layer(layer),
            model.uses_rope(layer),
            model.get_layer_type(layer),
            layer in model.embedding.value_layers,
            has_saved_output(model, layer),
            model.has_feed_forward(layer),
        )
        groups.setdefault(key, []).append(layer)
    for (is_moe, *_), layers in groups.items():
        name = "mixture" if is_moe else "dense"
        branches = list_saved_block_tensors(model, layers[0], shape)
        if model.recurrence is not None:
            branches[-1] += model.recurrence.iter_saved_tensors(model, shape)
        yield BlockGroup(name, prefix, tuple(layers), branches)


def list_branch_activations(
    model: ModelConfig,
    shape: ActivationShape,
    policy: Policy,
    branches: Branches,
    number: int,
    *,
    is_over: bool,
) -> list[MemoryItem]:
    """Return what a block's backward holds of activations and their gradients, before or after
    one of its branches.
    """
    left = [tensor for branch in branches[: number + (not is_over)] for tensor in branch]
    again = compute_saved_bytes(
        left, "none", policy[1], _ignore_savings(policy[2])
    ) - compute_saved_bytes(left, *policy)
    # A chunked branch that shares the norm of another one saves nothing; its input has a gradient.
    largest = max(
        (one.bytes for one in branches[number]),
        default=shape.compute_input_bytes(model.hidden_size),
    )
    inside = (1 if is_over else 2) * largest
    inside += 2 * shape.compute_gathered_bytes(model.hidden_size)
    return [
        MemoryItem("recomputed block", max(0, again)),
        MemoryItem("gradients inside a block", inside),
    ]


def _ignore_savings(system: MemoryProfile) -> MemoryProfile:
    """Return a program that keeps everything, as it is in memory while its block runs."""
    if system.saves_plainly:
        return system
    recomputed: Literal["nothing", "fused"] = (
        "nothing" if system.recomputed == "nothing" else "fused"
    )
    return replace(system, recomputed=recomputed, linear_inputs="compute", expert_weights="outputs")


def compute_offloaded_activations(config: RunConfig, layout: ParallelLayout) -> int:
    """Compute the bytes of saved tensors that a rank keeps in host memory.

    Args:
        config: resolved config of a run.
        layout: resolved layout.

    Returns:
        Those of one micro-batch with `train.activation_checkpoint=offload`; else 0.
    """
    if config.train.activation_checkpoint != "offload":
        return 0
    groups = iter_block_groups(config, build_activation_shape(config, layout))
    return sum(
        len(one.layers) * compute_saved_bytes(one.saved_tensors, "offload", False, OURS)
        for one in groups
    )


def has_documents(config: RunConfig) -> bool:
    """Return whether a row of a batch has several documents, or padding.

    Args:
        config: resolved config of a run.
    """
    is_separate = config.batch.attention_scope == "document" or config.objective.has_padding
    return is_separate or config.model.family == "encoder_decoder"


@lru_cache(maxsize=256)  # a plan asks for the same few thousands of times
def compute_mask_bytes(model: ModelConfig, shape: ActivationShape) -> int:
    """Compute the bytes of the table of documents; 0 where every kernel takes documents in another
    form.

    Args:
        model: architecture.
        shape: the micro-batch and the device.

    Returns:
        Booleans for every pair of positions.
    """
    if not shape.has_documents or not shape.has_mask_rules or model.rnn is not None:
        return 0
    stack = model.encoder_model if model.family == "encoder_decoder" else model
    # One layer of each type: a deep model has few.
    layers = {
        stack.get_layer_type(layer): layer
        for layer in range(stack.num_hidden_layers)
        if stack.has_attention(layer)
    }
    kernels = (choose_attention_memory(stack, layer, shape) for layer in layers.values())
    return (
        shape.sequences * shape.length**2 if any(one.table == "documents" for one in kernels) else 0
    )


# llmsys/train/cross_entropy.py: bytes of one block of logits, the rows of its products' tiles, and
# how much of it is in float32 at a time.
BLOCK_BYTES, TILE_ROWS, FLOAT_ELEMENTS_ON_CPU = {"cpu": 1 << 28, "cuda": 1 << 29}, 128, 1 << 19
FLOAT_ROWS_ELSEWHERE = 8192
LOGITS = {
    "logits",
    "gradient of logits",
    "logits in float32",
    "one block of logits",
    "a piece of it in float32",
}


def list_loss_items(
    config: RunConfig, shape: ActivationShape, system: MemoryProfile, head_elements: int
) -> list[MemoryItem]:
    """Bytes in addition to weights and kept activations at the fullest moment of the loss."""
    model = config.model
    hidden = shape.compute_residual_bytes(model.hidden_size)
    if not model.head.has_logits:
        return [MemoryItem("last hidden states", 2 * hidden)]
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    if system.loss in ("kernel", "chunked"):
        return _list_chunked_loss_items(config, shape, system, head_elements, 1 + depth)
    read = shape.compute_gathered_bytes(model.hidden_size) if system.head == "columns" else hidden
    logits = shape.compute_residual_bytes(
        model.vocab_size
    )  # by positions or by columns, a tensor rank has the same share
    items = [
        MemoryItem("last hidden states", (1 + depth) * (hidden + read)),
        MemoryItem("logits", (1 + depth) * logits),
    ]
    if system.loss == "fused":
        return [
            *items,
            MemoryItem("gradient of logits", shape.compute_residual_bytes(model.vocab_size, FP32)),
        ]
    # Log-softmax is kept, and its backward makes gradients of it and of the logits. Over columns
    # (loss parallel) it takes one more. The 16-bit logits are free by then, but nothing as large
    # fits into their place.
    copies = 4 if system.head == "columns" and shape.tensor > 1 else 3
    return [
        *items,
        MemoryItem(
            "logits in float32", copies * shape.compute_residual_bytes(model.vocab_size, FP32)
        ),
    ]


def list_loss_remainders(
    config: RunConfig, shape: ActivationShape, head_elements: int
) -> list[MemoryItem]:
    """Return the loss tensors alive during the blocks' backward: gradients of hidden states and
    of the head.
    """
    if not config.model.head.has_logits:
        return []
    size = shape.value_bytes
    stream = MemoryItem(
        "gradient of the stream", 2 * shape.compute_residual_bytes(config.model.hidden_size)
    )
    items = [stream, MemoryItem("gradient of the head", size * head_elements)]
    if shape.is_on_cpu:  # it is reused from step to step
        logits = _count_logits_rows(config, shape) * config.model.vocab_size * size
        items.append(MemoryItem("one block of logits", logits))
    return items


def _count_logits_rows(config: RunConfig, shape: ActivationShape) -> int:
    """Return the rows of one block of logits."""
    rows = BLOCK_BYTES["cpu" if shape.is_on_cpu else "cuda"] // (
        config.model.vocab_size * shape.value_bytes
    )
    rows = max(16, rows if shape.is_on_cpu or rows < TILE_ROWS else rows // TILE_ROWS * TILE_ROWS)
    return min(shape.compute_residual_bytes(1, 1), rows)


def _list_chunked_loss_items(
    config: RunConfig,
    shape: ActivationShape,
    system: MemoryProfile,
    head_elements: int,
    passes: int,
) -> list[MemoryItem]:
    """Return the items of linear_cross_entropy: one block of logits, and gradients computed in
    forward.
    """
    model = config.model
    tokens, vocabulary, size = (
        shape.compute_residual_bytes(1, 1),
        model.vocab_size,
        shape.value_bytes,
    )
    rows = _count_logits_rows(config, shape)
    blocks = -(-tokens // rows)
    summed, piece = FP32 if blocks > 1 else size, 0
    if shape.is_on_cpu:
        piece = min(rows, max(8, FLOAT_ELEMENTS_ON_CPU // vocabulary)) * vocabulary * FP32
        # The piece is freed before a block's part of the head's gradient is made.
        piece = max(piece, head_elements * size) if blocks > 1 else piece
    elif system.loss == "chunked":  # an allocator keeps places of both sizes
        piece = min(rows, FLOAT_ROWS_ELSEWHERE) * vocabulary * FP32 + (
            head_elements * size if blocks > 1 else 0
        )
    return [
        # What enters the final norm, what it gives, and of each pass the targets' rows and their
        # gradients.
        MemoryItem(
            "last hidden states and their gradient",
            (2 * passes + 2) * shape.compute_residual_bytes(model.hidden_size),
        ),
        MemoryItem("one block of logits", rows * vocabulary * size),
        MemoryItem("a piece of it in float32", piece),
        MemoryItem("gradient of the head", head_elements * passes * summed),
    ]


def sum_logits_bytes(items: list[MemoryItem]) -> int:
    """Of `list_loss_items`, what is as large as rows of logits."""
    return sum(item.bytes for item in items if item.name in LOGITS)


IN_EVALUATION = "in an evaluation"
SOFTCAP_COPIES = 3  # the logits, their quotient, and its tanh


def list_evaluation_block_items(config: RunConfig, training: ActivationShape) -> list[MemoryItem]:
    """Return the bytes of a block over held-out sequences; `training` is the size of a training
    micro-batch.
    """
    model, compiled, shape = (
        config.model,
        config.train.compile == "block",
        _build_evaluation_shape(config, training),
    )
    branches = [branch for kind in iter_block_groups(config, shape) for branch in kind.branches]
    work = max(
        sum(one.bytes for one in branch if not (compiled and one.producer == "fused"))
        for branch in branches
    )
    return [
        MemoryItem("temporaries of a block", work),
        MemoryItem("the stream", 2 * shape.compute_residual_bytes(model.hidden_size)),
        MemoryItem("attention mask", compute_mask_bytes(model, shape)),
    ]


def list_evaluation_logits(config: RunConfig, training: ActivationShape) -> list[MemoryItem]:
    """Return the logits of all held-out positions, and the rows of them that the loss reads in
    float32.
    """
    model, shape = config.model, _build_evaluation_shape(config, training)
    stream = MemoryItem("the stream", 2 * shape.compute_residual_bytes(model.hidden_size))
    if not model.head.has_logits:
        return [stream]
    copies = SOFTCAP_COPIES if getattr(model.head, "softcap", None) is not None else 1
    logits = MemoryItem("logits", copies * shape.compute_residual_bytes(model.vocab_size))
    if not shape.is_on_cpu:
        return [stream, logits]
    rows = min(max(8, FLOAT_ELEMENTS_ON_CPU // model.vocab_size), shape.num_tokens)
    return [
        stream,
        logits,
        MemoryItem("a piece of them in float32", rows * model.vocab_size * FP32),
    ]


def _build_evaluation_shape(config: RunConfig, training: ActivationShape) -> ActivationShape:
    return replace(
        training,
        sequences=config.evaluation_sequences,
        length=config.evaluation.resolve_sequence_length(training.length),
        context=1,
        is_stream_sharded=False,
        has_ring=False,
    )

"""Seconds of the kernels of one micro-batch on one rank: products, experts, attention, elementwise
passes, the loss.

Seconds are those of the forward, for one pass through all blocks of a rank's stages, and how much
more the backward takes.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.estimate.attention_time import estimate_attention_seconds
from llmsys.estimate.kernel_context import KernelContext
from llmsys.estimate.model_tensors import is_head_tied, list_model_tensors

# their inputs are split, the others' outputs
ROW_SPLIT = ("o_proj.weight", "down_proj.weight", "down_proj")
DOWN = ROW_SPLIT[1:]  # the last products of a block


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one micro-batch forward, by kind, in blocks and outside them; not yet divided by
    stages.

    `attention_backward` is without recomputation, `attention_repeated` what selective checkpointing
    repeats; `unneeded` is the part of the blocks whose outputs the backward does not read:
    down-projections, and what brings outputs of experts back; `launches` counts kernels forward."""

    matmul: float
    grouped: float
    attention: float
    elementwise: float
    permutation: float
    loss: float
    head: float
    attention_backward: float
    attention_repeated: float
    unneeded: float
    launches: int

    @property
    def blocks_forward(self) -> float:
        """Forward through the blocks."""
        return self.matmul + self.grouped + self.attention + self.elementwise + self.permutation

    @property
    def blocks_backward(self) -> float:
        """Backward through the blocks: two products for each, twice the bytes."""
        passes = self.matmul + self.grouped + self.elementwise + self.permutation
        return 2 * passes + self.attention_backward


# A plan asks for the kernels of one micro-batch under every number of replicas, shards and stages.
MAX_KEPT = 4096
_kept: dict[tuple[Hashable, ...], tuple[KernelContext, KernelSeconds]] = {}


def estimate_kernel_seconds(bench: KernelContext) -> KernelSeconds:
    """The seconds of one micro-batch forward."""
    layout = bench.layout
    # Of a layout kernels depend on these axes alone. Objects are told apart by identity, as hashes
    # of whole sections take longer than what is kept; the context keeps them alive.
    key = (
        *(id(one) for one in (bench.model, bench.device, bench.software)),
        *(layout.tensor, layout.context, layout.ring_size, layout.expert),
        *(bench.shape, bench.matmul_dtype, bench.expert_matmul_dtype, bench.expert_load),
    )
    if (found := _kept.get(key)) is not None:
        return found[1]
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    seconds = compute_kernel_seconds(bench)
    _kept[key] = bench, seconds
    return seconds


def compute_kernel_seconds(bench: KernelContext) -> KernelSeconds:
    """Compute the seconds of one micro-batch forward.

    Args:
        bench: model, layout, device, program and micro-batch.

    Returns:
        Those of each kind of kernel.
    """
    rows = [
        row
        for row in list_model_tensors(bench.model)
        if row.input is not None and len(row.shape) > 1
    ]
    blocks = [
        row for row in rows if row.name.startswith(("blocks", "encoder.blocks", "prediction"))
    ]
    attention, backward, repeated = estimate_attention_seconds(bench)
    products = [
        (
            row,
            _estimate_grouped_matmul_seconds(bench, row)
            if row.input == "visit"
            else _estimate_tensor_matmul_seconds(bench, row),
        )
        for row in blocks
    ]
    permutation = _estimate_permutation_seconds(bench)
    layers = sum(row.num_copies * row.steps for row in blocks if row.name.endswith("o_proj.weight"))
    if isinstance(bench.model.attention, PythonAttentionConfig):
        layers = bench.model.num_hidden_layers  # its names are the user's
    return KernelSeconds(
        matmul=sum(one for row, one in products if row.input != "visit"),
        grouped=sum(one for row, one in products if row.input == "visit"),
        attention=attention,
        elementwise=_estimate_elementwise_seconds(bench, layers)
        + _count_recurrent_kernels(bench) * bench.device.efficiency.launch_seconds,
        permutation=permutation,
        loss=_estimate_loss_seconds(bench),
        head=sum(
            _estimate_tensor_matmul_seconds(bench, row, head=True) for row in rows if not row.layers
        )
        + _estimate_tied_head_seconds(bench),
        attention_backward=backward,
        attention_repeated=repeated,
        unneeded=permutation / 2 + sum(one for row, one in products if row.name.endswith(DOWN)),
        launches=layers * (LAUNCHES + (LAUNCHES_MOE if bench.model.moe else 0))
        + _count_recurrent_kernels(bench),
    )


LAUNCHES, LAUNCHES_MOE = 30, 40  # kernels of one block forward in eager mode, and what routing adds


def _count_recurrent_kernels(bench: KernelContext) -> int:
    model, shape = bench.model, bench.shape
    return (
        0
        if model.rnn is None
        else model.rnn.count_kernels(model, model.encoder_model, shape.length, shape.source)
    )


def _estimate_tensor_matmul_seconds(
    bench: KernelContext, row: ParameterTensor, *, head: bool = False
) -> float:
    shape, layout, folded = (
        bench.shape,
        bench.layout,
        bench.model.attention.fold_row(bench.shape.length),
    )
    outputs, inputs = (float(one) for one in row.shape[-2:])
    if row.name.endswith(ROW_SPLIT):
        inputs /= layout.tensor
    else:
        outputs /= layout.tensor
    vectors = {
        "source": shape.sequences * shape.source / layout.context,
        "sequence": shape.sequences,
        "predicted": shape.sequences * (shape.length - shape.source or shape.length),
        "distance": 2 * folded.queries - 1 + folded.earlier,
        "encoder_distance": 2 * shape.source - 1,
    }.get(row.input or "token", shape.num_tokens / layout.context)
    return (
        row.num_copies
        * row.steps
        * bench.estimate_matmul_seconds(vectors, inputs, outputs, head=head)
    )


def _estimate_grouped_matmul_seconds(bench: KernelContext, row: ParameterTensor) -> float:
    """The products of the experts of one rank; every rank of the copy brings its own tokens and
    holds E / expert.
    """
    moe, layout = bench.model.moe, bench.layout
    if moe is None:
        return 0.0
    visits = (
        bench.expert_load
        * moe.visits_per_token
        * bench.shape.num_tokens
        / (layout.context * layout.tensor)
    )
    experts = moe.num_experts / layout.expert
    inputs, outputs = row.shape[-2:]
    # Bytes: the weights of all local experts are read, whatever each of them is visited by.
    launch = bench.device.efficiency.launch_seconds
    one = bench.estimate_matmul_seconds(visits / experts, inputs, outputs, grouped=True) - launch
    return row.num_copies * (experts * one + launch)


def _estimate_tied_head_seconds(bench: KernelContext) -> float:
    model, shape = bench.model, bench.shape
    depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
    passes = depth * model.head.has_logits + is_head_tied(model)
    tokens = shape.num_tokens / bench.layout.context
    return passes * bench.estimate_matmul_seconds(
        tokens, model.hidden_size, model.vocab_size / bench.layout.tensor, head=True
    )


def _estimate_loss_seconds(bench: KernelContext) -> float:
    """Softmax and its gradient over the logits, forward and backward together."""
    if not bench.model.head.has_logits:
        return 0.0
    logits = (
        bench.shape.num_tokens
        * bench.model.vocab_size
        / (bench.layout.context * bench.layout.tensor)
    )
    return bench.estimate_memory_seconds(logits * bench.software.loss_bytes)


def _estimate_elementwise_seconds(bench: KernelContext, layers: int) -> float:
    """Norms, residual sums, rotations and activations forward, as one fused pass each, times the
    software's traffic.
    """
    model, layout = bench.model, bench.layout
    tokens = bench.shape.num_tokens / (layout.context * layout.tensor)
    values = 8.0 * model.hidden_size  # two sums with their norms: read both, write both
    values += 2 * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    values += 2 * model.attention.count_normed_channels(model)
    dense = len(model.feed_forward.projections) * model.intermediate_size
    routed = 0.0
    if (moe := model.moe) is not None:
        inner = len(moe.expert.projections) * moe.moe_intermediate_size
        routed = moe.visits_per_token * inner + 3 * moe.shared_expert_size
    moe_layers = model.num_moe_layers
    without = model.num_hidden_layers - moe_layers - model.num_dense_layers
    # Half of the sums and norms of a layer are those of one branch.
    whole = layers - (2 * model.num_hidden_layers - model.num_branches) / 2
    total = whole * values + (layers - moe_layers - without) * dense + moe_layers * routed
    seconds = bench.estimate_memory_seconds(
        tokens * total * bench.shape.value_bytes * bench.software.traffic
    )
    return seconds + layers * 4 * bench.device.efficiency.launch_seconds


def _estimate_permutation_seconds(bench: KernelContext) -> float:
    """Seconds of routing in all blocks: scores of experts, and a visit's vector sorted in,
    weighted and summed out.
    """
    model, layout = bench.model, bench.layout
    if (moe := model.moe) is None:
        return 0.0
    tokens = bench.shape.num_tokens / (layout.context * layout.tensor)
    passes = 5.0
    if bench.software.expert_rows == "visit" and 1 < layout.expert < moe.num_experts:
        passes += 4  # by expert again behind the all-to-all, and back: read and written
    if bench.software.permutation == "dispatch" and layout.expert > 1:
        passes = 0.0
    values = passes * moe.visits_per_token * moe.get_expert_channels(model.hidden_size)
    values += 3 * moe.num_experts
    moved = bench.expert_load * tokens * values * bench.shape.value_bytes * bench.software.traffic
    return model.num_moe_layers * bench.estimate_memory_seconds(moved)

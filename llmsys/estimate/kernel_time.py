"""Seconds of the kernels of one micro-batch on one rank: products, experts, attention, elementwise passes, the loss.

A product's time is the sum of its operations at the device's best rate and of its bytes, so that thin matrices are slow
(a roofline without its corner: Williams 2009). Seconds are those of the forward, for one pass through all blocks of a
rank's stages, and how much more the backward takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.config.attention_kernel import (
    AttentionDevice,
    AttentionDtype,
    AttentionTraits,
    KernelChoice,
    choose_attention_kernel,
)
from llmsys.config.attention_layers import describe_cross_attention, describe_self_attention
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.section import round_up_to_power_of_two
from llmsys.estimate.device_profile import DeviceProfile, Number
from llmsys.estimate.flops import Convention, count_flops, count_visible_pairs, iter_document_lengths
from llmsys.estimate.model_tensors import is_head_tied, list_model_tensors
from llmsys.estimate.software_profile import SoftwareProfile

ROW_SCALED = 0.7  # what products with a scale for each row keep of the 8-bit rate (DeepGEMM and cuBLASLt tables)


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch of a rank: sequences of `length` tokens; of encoder-decoders `source` ones at the encoder.

    `documents` are lengths that repeat until a sequence is full (empty: it is one document); `has_documents` tells
    whether kernels have to keep documents apart.
    """

    sequences: float
    length: int
    source: int
    dtype: Number
    has_documents: bool = False
    documents: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> float:
        """Tokens of the micro-batch."""
        return self.sequences * self.length

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2


@dataclass(frozen=True)
class KernelContext:
    """Everything that seconds of a kernel depend on."""

    model: ModelConfig
    layout: ParallelLayout
    device: DeviceProfile
    software: SoftwareProfile
    shape: MicroBatchShape

    def estimate_matmul_seconds(
        self, rows: float, inner: float, columns: float, *, grouped: bool = False, head: bool = False
    ) -> float:
        """Seconds of a (rows, inner) by (inner, columns) product."""
        device, software = self.device, self.software
        number = software.matmul_dtype if software.matmul_dtype and not head else self.shape.dtype
        reached = device.efficiency.grouped if grouped else device.efficiency.products
        size: float = self.shape.value_bytes
        cast = 0.0
        if number == "fp8":
            reached *= device.efficiency.products_fp8 / device.efficiency.products
            reached *= ROW_SCALED if software.scales == "row" else 1
            cast = (
                3 * (1 + (software.scales == "row")) * (rows * inner + inner * columns)
            )  # both operands are read in 16 bits and written in 8
            size = 1.5
        moved = size * (rows * inner + inner * columns + rows * columns)
        operations = 2 * rows * inner * columns / (device.get_peak_flops(number) * reached)
        return operations + self.estimate_memory_seconds(moved + cast) + device.efficiency.launch_seconds

    def estimate_memory_seconds(self, moved_bytes: float) -> float:
        """Seconds that so many bytes take through memory."""
        return moved_bytes / (self.device.memory_bandwidth * self.device.efficiency.memory)


ROW_SPLIT = ("o_proj.weight", "down_proj.weight", "down_proj")  # their inputs are split, the others' outputs
SCORE_BYTES, SCORE_BYTES_BACKWARD = 14, 22  # per score, unfused: written, scaled and masked, softmax, dropout, read


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one micro-batch forward, by kind, in blocks and outside them; not yet divided by stages.

    `attention_backward` is without recomputation, `attention_repeated` what selective checkpointing repeats; `launches`
    counts kernels forward."""

    matmul: float
    grouped: float
    attention: float
    elementwise: float
    loss: float
    head: float
    attention_backward: float
    attention_repeated: float
    launches: int

    @property
    def blocks_forward(self) -> float:
        """Forward through the blocks."""
        return self.matmul + self.grouped + self.attention + self.elementwise

    @property
    def blocks_backward(self) -> float:
        """Backward through the blocks: two products for each, twice the bytes."""
        return 2 * (self.matmul + self.grouped + self.elementwise) + self.attention_backward


def estimate_kernel_seconds(bench: KernelContext) -> KernelSeconds:
    """The seconds of one micro-batch forward."""
    rows = [row for row in list_model_tensors(bench.model) if row.input is not None and len(row.shape) > 1]
    blocks = [row for row in rows if row.name.startswith(("blocks", "encoder.blocks", "prediction"))]
    attention, backward, repeated = _estimate_attention_seconds(bench)
    layers = sum(row.num_copies * row.steps for row in blocks if row.name.endswith("o_proj.weight"))
    return KernelSeconds(
        matmul=sum(_estimate_tensor_matmul_seconds(bench, row) for row in blocks if row.input != "visit"),
        grouped=sum(_estimate_grouped_matmul_seconds(bench, row) for row in blocks if row.input == "visit"),
        attention=attention,
        elementwise=_estimate_elementwise_seconds(bench, layers)
        + _count_recurrent_kernels(bench) * bench.device.efficiency.launch_seconds,
        loss=_estimate_loss_seconds(bench),
        head=sum(_estimate_tensor_matmul_seconds(bench, row, head=True) for row in rows if not row.layers)
        + _estimate_tied_head_seconds(bench),
        attention_backward=backward,
        attention_repeated=repeated,
        launches=layers * (LAUNCHES + (LAUNCHES_MOE if bench.model.moe else 0)) + _count_recurrent_kernels(bench),
    )


LAUNCHES, LAUNCHES_MOE = 30, 40  # kernels of one block forward in eager mode, and what routing adds


def _count_recurrent_kernels(bench: KernelContext) -> int:
    model, shape = bench.model, bench.shape
    return 0 if model.rnn is None else model.rnn.count_kernels(model, model.encoder_model, shape.length, shape.source)


def _estimate_tensor_matmul_seconds(bench: KernelContext, row: ParameterTensor, *, head: bool = False) -> float:
    shape, layout, folded = bench.shape, bench.layout, bench.model.attention.fold_row(bench.shape.length)
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
    return row.num_copies * row.steps * bench.estimate_matmul_seconds(vectors, inputs, outputs, head=head)


def _estimate_grouped_matmul_seconds(bench: KernelContext, row: ParameterTensor) -> float:
    """The products of the experts of one rank; every rank of the copy brings its own tokens and holds E / expert."""
    moe, layout = bench.model.moe, bench.layout
    if moe is None:
        return 0.0
    visits = moe.visits_per_token * bench.shape.num_tokens / (layout.context * layout.tensor)
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
    logits = bench.shape.num_tokens * bench.model.vocab_size / (bench.layout.context * bench.layout.tensor)
    return bench.estimate_memory_seconds(logits * bench.software.loss_bytes)


def _estimate_attention_seconds(bench: KernelContext) -> tuple[float, float, float]:
    """Seconds forward, backward and repeated of scores and weighted sums. Fused kernels skip what a mask hides."""
    model, shape, device = bench.model, bench.shape, bench.device
    ranks = bench.layout.context * bench.layout.tensor
    if bench.software.attention == "chosen" and device.compute_capability is not None:
        return _estimate_chosen_attention_seconds(bench, AttentionDevice("cuda", device.compute_capability))
    fused = bench.software.attention != "unfused"
    convention: Convention = "causal" if fused else "full"
    counted = count_flops(model, shape.source, 1, convention, target_length=shape.length, documents=shape.documents)
    operations = counted.attention * shape.sequences / ranks
    number: Number = shape.dtype
    if not fused:
        flops = operations / (device.get_peak_flops(number) * device.efficiency.products)
        scores = model.num_hidden_layers * model.num_attention_heads * shape.length**2 * shape.sequences / ranks
        forward = flops + bench.estimate_memory_seconds(scores * SCORE_BYTES)
        return forward, 2 * flops + bench.estimate_memory_seconds(scores * SCORE_BYTES_BACKWARD), forward
    rate = device.get_peak_flops(number) * (
        device.efficiency.native_attention if bench.software.attention == "native" else 1
    )
    if bench.software.context == "ring":  # the last of n ranks works on all of the others' keys, the first on its own
        operations *= 2 - 1 / bench.layout.context
    forward = operations / (rate * device.efficiency.attention)
    # The scores are computed again: five products for two (Dao 2022, section 3.1).
    return forward, 2.5 * operations / (rate * device.efficiency.attention_backward), 0.0


TABLE_SPEED = 0.45  # memory-efficient attention with a bias over flash attention, per pair (FlashAttention-2, figure 5)


def _estimate_chosen_attention_seconds(bench: KernelContext, device: AttentionDevice) -> tuple[float, float, float]:
    """Seconds of the kernels that the model chooses: forward, backward, and what selective checkpointing repeats."""
    layers = [
        _estimate_layer_seconds(bench, choose_attention_kernel(device, traits), traits, pairs)
        for traits, pairs in _iter_attention_layers(bench.model, bench.shape)
    ]
    return sum(one[0] for one in layers), sum(one[1] for one in layers), sum(one[2] for one in layers)


def _iter_attention_layers(model: ModelConfig, shape: MicroBatchShape) -> Iterator[tuple[AttentionTraits, int]]:
    """Yield the traits of every attention layer, and the pairs of positions that see each other in one sequence."""
    dtype: AttentionDtype = "fp32" if shape.dtype == "fp32" else "bf16"
    is_pair = model.family == "encoder_decoder"
    stacks = [(model.encoder_model, shape.source, True)] if is_pair else []
    for stack, length, is_packed in [*stacks, (model, shape.length, shape.has_documents and not is_pair)]:
        depth = 0 if stack.multi_token_prediction is None else stack.multi_token_prediction.depth
        layers = stack.num_hidden_layers if stack.rnn is None else 0
        for layer in [*range(layers), *[layers - 1] * depth]:
            kind, window = stack.get_layer_type(layer), stack.get_attention_window(layer)
            lengths = iter_document_lengths(length, shape.documents if is_packed else ())
            shown = sum(count_visible_pairs(one, window, causal=stack.family != "encoder") for one in lengths)
            pairs = stack.attention.count_pairs(length, None) or shown
            yield describe_self_attention(stack, kind, dtype=dtype, length=length, has_documents=is_packed), pairs
    if is_pair:
        crossed = describe_cross_attention(model, dtype=dtype, length=shape.source, has_documents=True)
        yield from [(crossed, shape.length * shape.source)] * (model.num_hidden_layers if model.rnn is None else 1)


def _estimate_layer_seconds(
    bench: KernelContext, choice: KernelChoice, traits: AttentionTraits, pairs: float
) -> tuple[float, float, float]:
    """Seconds of one layer forward, backward and repeated by selective checkpointing; `pairs` see each other."""
    efficiency, peak = bench.device.efficiency, bench.device.get_peak_flops(bench.shape.dtype)
    heads = bench.model.num_attention_heads * bench.shape.sequences / (bench.layout.context * bench.layout.tensor)
    width = traits.qk_width + traits.v_width
    if choice.kernel == "eager":
        scores = heads * max(pairs, traits.length**2)
        flops = 2 * scores * width / (peak * efficiency.products)
        forward = flops + bench.estimate_memory_seconds(scores * SCORE_BYTES)
        return forward, 2 * flops + bench.estimate_memory_seconds(scores * SCORE_BYTES_BACKWARD), forward
    if choice.has_table:
        pairs, peak = max(pairs, traits.length**2), peak * TABLE_SPEED
    if choice.kernel == "flex":
        width = round_up_to_power_of_two(traits.qk_width, 16) + round_up_to_power_of_two(traits.v_width, 16)
    operations = 2 * heads * pairs * width
    forward = operations / (peak * efficiency.attention)
    # The scores are computed again: five products for two (Dao 2022, section 3.1).
    backward = 2.5 * operations / (peak * efficiency.attention_backward)
    return forward, backward, forward if choice.kernel == "flex" else 0.0


def _estimate_elementwise_seconds(bench: KernelContext, layers: int) -> float:
    """Norms, residual sums, rotations and activations forward, as one fused pass each, times the software's traffic."""
    model, layout = bench.model, bench.layout
    tokens = bench.shape.num_tokens / (layout.context * layout.tensor)
    values = 8.0 * model.hidden_size  # two sums with their norms: read both, write both
    values += 2 * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    values += 2 * model.attention.count_normed_channels(model)
    dense = len(model.feed_forward.projections) * model.intermediate_size
    routed = 0.0
    if (moe := model.moe) is not None:
        inner = len(moe.expert.projections) * moe.moe_intermediate_size
        # A visit's vector is sorted in, and weighted and summed out.
        routed = (
            moe.visits_per_token * (inner + 5 * model.hidden_size) + 3 * moe.shared_expert_size + 3 * moe.num_experts
        )
    moe_layers = model.num_moe_layers
    total = layers * values + (layers - moe_layers) * dense + moe_layers * routed
    seconds = bench.estimate_memory_seconds(tokens * total * bench.shape.value_bytes * bench.software.traffic)
    return seconds + layers * 4 * bench.device.efficiency.launch_seconds

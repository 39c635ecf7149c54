"""Seconds of attention's scores and weighted sums, by the kernel that computes them.

Fused kernels skip what a mask hides. Their rate depends on the length and on the width of a head.
"""

from collections import Counter
from functools import lru_cache

from llmsys.config.attention_device import AttentionDevice, AttentionDtype
from llmsys.config.block_measurement import MeasuredRows
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import FP32_BYTES
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.section import round_up_to_power_of_two
from llmsys.estimate.device_profile import DeviceProfile, Number
from llmsys.estimate.flops import (
    Convention,
    count_flops,
    count_linear_flops,
    count_plain_flops,
    count_visible_pairs,
    iter_document_lengths,
)
from llmsys.estimate.kernel_context import KernelContext, MicroBatchShape
from llmsys.estimate.python_blocks import measure_block
from llmsys.kernels.attention_kernel import (
    AttentionTraits,
    KernelChoice,
    choose_attention_kernel,
    choose_ring_kernel,
)
from llmsys.kernels.attention_layers import describe_cross_attention, describe_self_attention

# per score, unfused: written, scaled and masked, softmax, dropout, read
SCORE_BYTES, SCORE_BYTES_BACKWARD = 14, 22


def estimate_attention_seconds(bench: KernelContext) -> tuple[float, float, float]:
    """Seconds forward, backward and repeated of scores and weighted sums. Fused kernels skip
    what a mask hides.
    """
    model, device = bench.model, bench.device
    ranks = bench.layout.context * bench.layout.tensor
    if isinstance(model.attention, PythonAttentionConfig):
        return _estimate_measured_seconds(bench, model.attention)
    if model.has_linear_layers:
        return _add_seconds(
            _estimate_linear_seconds(bench), _estimate_pair_seconds(bench, device, ranks)
        )
    return _add_seconds(
        _estimate_plain_seconds(bench), _estimate_pair_seconds(bench, device, ranks)
    )


def _add_seconds(*parts: tuple[float, float, float]) -> tuple[float, float, float]:
    forward, backward, repeated = (sum(one) for one in zip(*parts, strict=True))
    return forward, backward, repeated


def _estimate_plain_seconds(bench: KernelContext) -> tuple[float, float, float]:
    """Seconds of an indexer and of the weights that it learns from, which have no gradient:
    products in float32, and each head's scores written and read.
    """
    sparse = getattr(bench.model.attention, "sparse", None)
    if sparse is None:
        return 0.0, 0.0, 0.0
    model, shape, device = bench.model, bench.shape, bench.device
    flops = count_plain_flops(model, shape.length) * shape.sequences
    flops /= device.get_peak_flops("fp32") * device.efficiency.products
    pairs = model.num_attention_layers * shape.sequences * float(shape.length) ** 2
    heads = sparse.index_n_heads + model.num_attention_heads
    forward = flops + bench.estimate_memory_seconds(2 * FP32_BYTES * heads * pairs)
    return forward, 2 * forward, forward


def _estimate_linear_seconds(bench: KernelContext) -> tuple[float, float, float]:
    """Seconds of linear attention between its projections: products and solves at the rate of
    matmuls in float32, and each chunk's tensors written and read once. The backward pass computes
    all of it again, and recomputation of a block once more.
    """
    model, shape, device = bench.model, bench.shape, bench.device
    linear = model.linear_attention
    assert linear is not None
    layers = float(len(model.linear_layers))
    products = linear.count_products(model, 0, shape.length, None)
    products += linear.count_solve_products(shape.length)
    if bench.layout.ring_size > 1:
        products += linear.count_map_products(shape.length)
    # Ranks of a context axis have some of the heads, or of the positions.
    layers /= bench.layout.context
    flops = 2 * layers * shape.sequences * products
    moved = FP32_BYTES * linear.count_chunk_values(shape.length) * layers * shape.sequences
    forward = flops / (device.get_peak_flops("fp32") * device.efficiency.products)
    forward += bench.estimate_memory_seconds(2 * moved)
    return forward, 3 * forward, forward


def _estimate_pair_seconds(
    bench: KernelContext, device: DeviceProfile, ranks: int
) -> tuple[float, float, float]:
    """Seconds of the layers whose queries meet keys."""
    model, shape = bench.model, bench.shape
    if bench.software.attention == "chosen" and device.compute_capability is not None:
        return _estimate_chosen_attention_seconds(
            bench, AttentionDevice("cuda", device.compute_capability)
        )
    pair_layers = model.num_attention_layers
    fused = bench.software.attention != "unfused"
    convention: Convention = "causal" if fused else "full"
    counted = count_flops(
        model, shape.source, 1, convention, target_length=shape.length, documents=shape.documents
    )
    pairs = counted.attention - count_linear_flops(model, shape.length)
    operations = pairs * shape.sequences / ranks
    number: Number = shape.dtype
    if not fused:
        flops = operations / (device.get_peak_flops(number) * device.efficiency.products)
        scores = pair_layers * model.num_attention_heads * shape.length**2 * shape.sequences / ranks
        forward = flops + bench.estimate_memory_seconds(scores * SCORE_BYTES)
        return (
            forward,
            2 * flops + bench.estimate_memory_seconds(scores * SCORE_BYTES_BACKWARD),
            forward,
        )
    rate = device.get_peak_flops(number) * (
        device.efficiency.native_attention if bench.software.attention == "native" else 1
    )
    shapes = model.attention.build_score_shape(model, 0, is_causal=True)
    layers, width = max(1, pair_layers), shapes.key_channels + shapes.value_channels
    positions = pairs / (layers * max(1, shapes.heads * width) * shape.length)
    rate *= compute_fused_rate(positions, shapes.key_channels) * bench.software.attention_rate
    if bench.software.attention == "native" and getattr(model.attention, "sinks", False):
        rate *= bench.software.sink_rate
    # the last of n ranks works on all of the others' keys, the first on its own
    if bench.software.context == "ring":
        operations *= 2 - 1 / bench.layout.context
    forward = operations / (rate * device.efficiency.attention)
    # The scores are computed again: five products for two (Dao 2022, section 3.1).
    return forward, 2.5 * operations / (rate * device.efficiency.attention_backward), 0.0


def _estimate_measured_seconds(
    bench: KernelContext, attention: PythonAttentionConfig
) -> tuple[float, float, float]:
    """Seconds of a class of the user's own: its products at the rate of matmuls, and its saved
    bytes written once and read twice. Selective checkpointing repeats what is no product.
    """
    model, shape, device = bench.model, bench.shape, bench.device
    counted = count_flops(model, shape.length, 1, "full").attention * shape.sequences
    flops = counted / (device.get_peak_flops(shape.dtype) * device.efficiency.products)
    row = MeasuredRows(
        shape.length, value_bytes=shape.value_bytes, has_documents=shape.has_documents
    )
    saved = sum(
        one.bytes
        for layer in range(model.num_hidden_layers)
        for one in measure_block(attention, model, layer, row).saved
        if one.is_saved
    )
    written = bench.estimate_memory_seconds(saved * shape.sequences)
    return flops + written, 2 * (flops + written), written


# flex_attention's backward over flash attention's, per padded pair (queries and keys of 192
# channels, values of 128 on an H100 with torch 2.13: 149 TFLOP/s of the unpadded pairs).
FLEX_BACKWARD = 0.62
# memory-efficient attention with a bias over flash attention, per pair (FlashAttention-2, figure 5)
TABLE_SPEED = 0.45


def _estimate_chosen_attention_seconds(
    bench: KernelContext, device: AttentionDevice
) -> tuple[float, float, float]:
    """Seconds of the kernels that the model chooses: forward, backward, and what selective
    checkpointing repeats.
    """
    choose = choose_attention_kernel if bench.layout.ring_size == 1 else choose_ring_kernel
    layers = [
        [
            count * one
            for one in _estimate_layer_seconds(bench, choose(device, traits), traits, pairs)
        ]
        for traits, pairs, count in _list_attention_layers(bench.model, bench.shape)
    ]
    return (
        sum(one[0] for one in layers),
        sum(one[1] for one in layers),
        sum(one[2] for one in layers),
    )


@lru_cache(maxsize=64)  # a plan asks for the layers of few shapes
def _list_attention_layers(
    model: ModelConfig, shape: MicroBatchShape
) -> list[tuple[AttentionTraits, int, int]]:
    """Return the kinds of attention layers, the pairs of positions that see each other, and how
    many layers.
    """
    dtype: AttentionDtype = "fp32" if shape.dtype == "fp32" else "bf16"
    is_pair = model.family == "encoder_decoder"
    found: list[tuple[AttentionTraits, int, int]] = []
    stacks = [(model.encoder_model, shape.source, True)] if is_pair else []
    for stack, length, is_packed in [
        *stacks,
        (model, shape.length, shape.has_documents and not is_pair),
    ]:
        depth = 0 if stack.multi_token_prediction is None else stack.multi_token_prediction.depth
        layers = stack.num_hidden_layers if stack.rnn is None else 0
        kinds = Counter(
            (stack.get_layer_type(layer), stack.get_attention_window(layer))
            for layer in [*range(layers), *[layers - 1] * depth]
            if stack.has_attention(layer)
        )
        for (kind, window), count in kinds.items():
            lengths = iter_document_lengths(length, shape.documents if is_packed else ())
            shown = sum(
                count_visible_pairs(one, window, causal=stack.family != "encoder")
                for one in lengths
            )
            pairs = stack.attention.count_pairs(length, None) or shown
            traits = describe_self_attention(
                stack, kind, dtype=dtype, length=length, has_documents=is_packed
            )
            found.append((traits, pairs, count))
    if is_pair:
        crossed = describe_cross_attention(
            model, dtype=dtype, length=shape.source, has_documents=True
        )
        found.append(
            (
                crossed,
                shape.length * shape.source,
                model.num_hidden_layers if model.rnn is None else int(model.rnn.score != "none"),
            )
        )
    return found


# Positions at which a fused kernel reaches half of its rate; the rates of a profile are those of
# 8,192 positions.
HALF_RATE_POSITIONS, RATED_POSITIONS = 400, 8192
# Rate by the width of a head over that of 128 (FlashAttention-2, figures 4 to 7; 0.85 for 64 on an
# H100 with torch
# 2.13, where documents of 585 tokens in a sequence of 8,192 reach 0.62 forward, as these two
# constants give).
WIDTH_RATES = ((64, 0.85), (96, 0.9), (128, 1.0))


def compute_fused_rate(positions: float, width: int) -> float:
    """Return the rate of a fused kernel over that of a device's profile.

    Args:
        positions: keys that a query sees, twice their mean for causal attention.
        width: channels of a head.

    Returns:
        About 1 for long sequences and heads of 128 channels.
    """
    reached = positions / (positions + HALF_RATE_POSITIONS)
    rated = RATED_POSITIONS / (RATED_POSITIONS + HALF_RATE_POSITIONS)
    return reached / rated * next((rate for most, rate in WIDTH_RATES if width <= most), 1.0)


def _estimate_layer_seconds(
    bench: KernelContext, choice: KernelChoice, traits: AttentionTraits, pairs: float
) -> tuple[float, float, float]:
    """Seconds of one layer forward, backward and repeated by selective checkpointing; `pairs`
    see each other.
    """
    efficiency, peak = bench.device.efficiency, bench.device.get_peak_flops(bench.shape.dtype)
    heads = (
        bench.model.num_attention_heads
        * bench.shape.sequences
        / (bench.layout.context * bench.layout.tensor)
    )
    width = traits.qk_width + traits.v_width
    if choice.kernel == "eager" and bench.layout.ring_size > 1:
        return _estimate_eager_ring_seconds(bench, heads * traits.length**2, width)
    if choice.kernel == "eager":
        scores = heads * max(pairs, traits.length**2)
        flops = 2 * scores * width / (peak * efficiency.products)
        forward = flops + bench.estimate_memory_seconds(scores * SCORE_BYTES)
        return (
            forward,
            2 * flops + bench.estimate_memory_seconds(scores * SCORE_BYTES_BACKWARD),
            forward,
        )
    if choice.has_table:
        pairs, peak = max(pairs, traits.length**2), peak * TABLE_SPEED
    if choice.kernel == "flex":
        width = round_up_to_power_of_two(traits.qk_width, 16) + round_up_to_power_of_two(
            traits.v_width, 16
        )
    operations = 2 * heads * pairs * width
    if bench.layout.ring_size > 1 and bench.model.has_linear_layers:
        # Positions are neighbours: the last rank works on all of the others' keys.
        operations *= 2 - 1 / bench.layout.ring_size
    peak *= compute_fused_rate(2 * pairs / traits.length, traits.qk_width)
    forward = operations / (peak * efficiency.attention)
    # The scores are computed again: five products for two (Dao 2022, section 3.1).
    backward = 2.5 * operations / (peak * efficiency.attention_backward)
    if choice.kernel == "flex":
        backward /= FLEX_BACKWARD
    return forward, backward, forward if choice.kernel == "flex" else 0.0


def _estimate_eager_ring_seconds(
    bench: KernelContext, scores: float, width: int
) -> tuple[float, float, float]:
    """Seconds of a layer whose ring computes plain products in float32, 256 queries at a time
    (`llmsys/parallel/ring_blocks.py`): a GPU computes every pair of queries and keys, since the
    host does not know which of them a mask hides.
    """
    flops = 2 * scores * width
    flops /= bench.device.get_peak_flops("fp32") * bench.device.efficiency.products
    # The bytes of scores are those of 16 bits.
    moved = bench.estimate_memory_seconds(2 * scores * SCORE_BYTES)
    moved_backward = bench.estimate_memory_seconds(2 * scores * SCORE_BYTES_BACKWARD)
    forward = flops + moved
    # The scores are computed again: five products for two.
    return forward, 2.5 * flops + moved_backward, forward

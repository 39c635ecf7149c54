"""Every kernel of one layer on the roofline of a device (Williams 2009): operations per byte, and
the rate it reaches.

Forward pass of one micro-batch on one device. Seconds are the profile's curve: operations at the
best rate of their kind, bytes at that of the memory, and one launch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.config.linear_attention import LinearAttentionConfig
from llmsys.config.linear_mixer import BaseLinearAttentionConfig
from llmsys.config.long_attention import AttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.flops import count_visible_pairs
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.python_blocks import count_measured_products

VALUE_BYTES = 2  # bf16


@dataclass(frozen=True)
class LayerKernel:
    """One kernel: its operations and bytes, and its seconds on the device."""

    name: str
    flops: float
    moved_bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.moved_bytes

    @property
    def rate(self) -> float:
        """Operations per second that it reaches."""
        return self.flops / self.seconds


def list_layer_kernels(
    model: ModelConfig, device: DeviceProfile, sequences: int, length: int, tensor: int = 1
) -> list[LayerKernel]:
    """List the kernels of the last block: matrices, attention, norms and the activation. Of blocks
    with one sub-layer those of the last attention and of the last feed-forward.

    Args:
        model: architecture.
        device: profile of the accelerator.
        sequences: sequences of a micro-batch.
        length: tokens of each.
        tensor: devices that share each layer.

    Returns:
        Kernels in the order of the block; none for recurrent models.
    """
    if model.rnn is not None:
        return []
    tokens = sequences * length
    found = list(_iter_matrix_kernels(model, device, tokens, tensor))
    last, _ = _list_last_branches(model)
    found += (
        _build_attention_kernel(model, mixer, last, device, sequences, length, tensor)
        for mixer in model.list_mixers(last)
    )
    width = model.intermediate_size or (
        model.moe.moe_intermediate_size if model.moe is not None else 0
    )
    for name, channels, per_value in (
        ("norm", model.hidden_size, 4),
        ("activation", width / tensor, 4),
    ):
        values = tokens * channels
        found.append(
            _build_kernel(
                f"{name} (elementwise)", per_value * values, 3 * VALUE_BYTES * values, device, 1.0
            )
        )
    return found


def _iter_matrix_kernels(
    model: ModelConfig, device: DeviceProfile, tokens: int, tensor: int
) -> Iterator[LayerKernel]:
    mixing, feeding = _list_last_branches(model)
    for row in list_model_tensors(model):
        last = feeding if ".feed_forward" in row.name else mixing
        is_block = row.name.startswith("blocks.") and last in row.layers
        if not is_block or row.input is None or len(row.shape) < 2:
            continue
        grouped = row.input == "visit"
        experts, rows = _count_rows(model, row, tokens, grouped=grouped)
        outputs, inputs = row.shape[-2] / tensor, row.shape[-1]
        flops = 2 * rows * outputs * inputs
        moved = VALUE_BYTES * (rows * (inputs + outputs) + experts * outputs * inputs)
        reached = device.efficiency.grouped if grouped else device.efficiency.products
        yield _build_kernel(
            row.name.split("{i}.")[-1].removesuffix(".weight"), flops, moved, device, reached
        )


def _count_rows(
    model: ModelConfig, row: ParameterTensor, tokens: int, *, grouped: bool
) -> tuple[int, float]:
    """Return the matrices that are read, and the vectors that meet one of them."""
    if not grouped or model.moe is None:
        return 1, tokens
    return model.moe.num_experts, tokens * model.moe.visits_per_token


def _list_last_branches(model: ModelConfig) -> tuple[int, int]:
    """Return the last blocks with attention and with a feed-forward."""
    blocks = range(model.num_blocks)
    return (
        max(one for one in blocks if model.list_mixers(one)),
        max((one for one in blocks if model.has_feed_forward(one)), default=0),
    )


def _build_attention_kernel(
    model: ModelConfig,
    mixer: AttentionConfig | LinearAttentionConfig,
    last: int,
    device: DeviceProfile,
    sequences: int,
    length: int,
    tensor: int,
) -> LayerKernel:
    scores = mixer.build_score_shape(model, length, is_causal=model.family != "encoder")
    window = model.get_attention_window(last)
    pairs = sequences * count_visible_pairs(length, window, causal=scores.is_causal)
    flops = 2 * pairs * scores.heads * (scores.key_channels + scores.value_channels) / tensor
    if isinstance(mixer, PythonAttentionConfig):
        flops = 2 * sequences * count_measured_products(mixer, model, last, length, None)
    elif isinstance(mixer, BaseLinearAttentionConfig):
        products = mixer.count_products(model, last, length, None)
        flops = 2 * sequences * (products + mixer.count_solve_products(length))
    flops += 2 * sequences * mixer.count_plain_products(model, length)
    queries = scores.heads * (scores.key_channels + scores.value_channels)
    keys = scores.key_value_heads * (scores.key_channels + scores.value_channels)
    moved = VALUE_BYTES * sequences * length * (queries + keys) / tensor
    reached = min(1.0, device.efficiency.attention * device.efficiency.native_attention)
    return _build_kernel("attention (scores and sums)", flops, moved, device, reached)


def _build_kernel(
    name: str, flops: float, moved: float, device: DeviceProfile, reached: float
) -> LayerKernel:
    seconds = flops / (device.get_peak_flops("bf16") * reached)
    seconds += (
        moved / (device.memory_bandwidth * device.efficiency.memory)
        + device.efficiency.launch_seconds
    )
    return LayerKernel(name, flops, moved, seconds)

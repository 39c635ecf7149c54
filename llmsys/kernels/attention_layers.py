"""The traits of every attention layer of a config, for the decision table in
attention_kernel.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.attention_device import AttentionDevice, AttentionDtype
from llmsys.config.layer_types import LayerType
from llmsys.config.long_attention import LinformerAttentionConfig, LongformerAttentionConfig
from llmsys.config.lsh_attention import LshAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parametrization import MupConfig, StandardParametrizationConfig, UnitScaledConfig
from llmsys.config.position import RopeConfig, YarnRopeScalingConfig
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.run import RunConfig
from llmsys.config.segment_memory import SegmentMemoryAttentionConfig
from llmsys.kernels.attention_kernel import (
    AttentionTraits,
    BiasKind,
    KernelChoice,
    choose_attention_kernel,
    choose_ring_kernel,
)

BIASES: dict[str, BiasKind] = {"alibi": "alibi", "relative_bias": "relative"}


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one stack that attend alike.

    Attributes:
        stack: decoder or encoder.
        attention: Type of the layers, or cross_attention.
        layers: Their indices.
        traits: What the kernel is chosen by.
        choice: The kernel.
    """

    stack: str
    attention: str
    layers: tuple[int, ...]
    traits: AttentionTraits
    choice: KernelChoice


def describe_self_attention(
    model: ModelConfig,
    layer_type: LayerType,
    *,
    dtype: AttentionDtype,
    length: int,
    has_documents: bool,
    is_training: bool = True,
    is_cached: bool = False,
) -> AttentionTraits:
    """Return the traits of the self-attention layers of one type.

    Args:
        model: A model, or the encoder of one as `encoder_model`.
        layer_type: Type of the layers.
        dtype: Dtype of queries, keys and values.
        length: Positions of a sequence, cached ones included.
        has_documents: Whether rows hold several documents, or padding.
        is_training: Whether a backward pass follows and dropout is active.
        is_cached: Whether keys come from a cache.

    Returns:
        The traits.
    """
    window = model.sliding_window if layer_type == "sliding_attention" else None
    attention, head_dim, position = model.attention, model.head_dim, model.position.kind
    common = AttentionTraits(
        dtype, head_dim, head_dim, length,
        "bidirectional" if model.family == "encoder" else "causal",
        has_documents=has_documents,
        has_window=window is not None and window < length,
        bias=BIASES.get(position, "none"),
        has_distance_scores=position == "transformer_xl",
        drops_weights=is_training and model.dropout.attention > 0,
        is_cached=is_cached,
        is_training=is_training,
    )  # fmt: skip
    match attention:
        case MultiHeadAttentionConfig():
            return replace(
                common,
                has_softcap=attention.logit_softcap is not None,
                has_sinks=attention.sinks,
                has_usual_scale=_has_usual_scale(model, attention.scale, head_dim),
            )
        case LatentAttentionConfig():
            return _describe_latent_attention(model, attention, common)
        case LongformerAttentionConfig():
            return replace(common, length=3 * max(attention.windows), is_banded=True)
        case LinformerAttentionConfig():
            # Against the mixed keys, all of which every query sees.
            longest = max(common.length, attention.projected_length)
            return replace(common, length=longest, mask="cross", has_documents=False)
        case LshAttentionConfig():
            return replace(common, has_lsh=True)
        case PythonAttentionConfig():
            # It has kernels of its own; `list_attention_groups` leaves it out.
            return common
        case SegmentMemoryAttentionConfig():
            row = attention.fold_row(length)
            return replace(
                common, length=row.queries + row.earlier, has_documents=True, is_banded=True
            )
        case unreachable:
            assert_never(unreachable)


def describe_cross_attention(
    model: ModelConfig,
    *,
    dtype: AttentionDtype,
    length: int,
    has_documents: bool,
    is_training: bool = True,
    is_cached: bool = False,
) -> AttentionTraits:
    """Return the traits of the cross-attention of an encoder-decoder.

    Args:
        model: The model.
        dtype: Dtype of queries, keys and values.
        length: Positions of a source.
        has_documents: Whether sources hold several documents, or padding.
        is_training: Whether a backward pass follows and dropout is active.
        is_cached: Whether keys come from a cache.

    Returns:
        The traits.
    """
    attention = model.attention.cross_attention
    return AttentionTraits(
        dtype,
        model.head_dim,
        model.head_dim,
        length,
        "cross",
        has_documents=has_documents,
        has_softcap=attention.logit_softcap is not None,
        has_usual_scale=_has_usual_scale(model, attention.scale, model.head_dim),
        drops_weights=is_training and model.dropout.attention > 0,
        is_cached=is_cached,
        is_training=is_training,
    )


def list_attention_groups(run: RunConfig, device: AttentionDevice) -> list[AttentionGroup]:
    """List the groups of attention layers of a run's training, with the kernel of each.

    Args:
        run: The run; `train.precision=auto` is bf16 where the device has it (`has_native_bf16`),
            else fp32.
        device: The device that trains.

    Returns:
        Groups in the order of the stacks: encoder, decoder, cross-attention.
    """
    choose = choose_attention_kernel if run.layout.ring_size == 1 else choose_ring_kernel
    return [
        replace(group, choice=choose(device, group.traits)) for group in _iter_groups(run, device)
    ]


_UNDECIDED = KernelChoice("eager", "")


def _iter_groups(run: RunConfig, device: AttentionDevice) -> Iterator[AttentionGroup]:
    model, batch, precision = run.model, run.batch, run.train.precision
    if precision == "auto":
        precision = "bf16" if device.has_native_bf16 else "fp32"
    dtype: AttentionDtype = precision
    if model.family != "encoder_decoder":
        is_separate = run.objective.has_padding or batch.attention_scope == "document"
        yield from _iter_self_groups(model, model.family, dtype, batch.sequence_length, is_separate)
        return
    yield from _iter_self_groups(model.encoder_model, "encoder", dtype, batch.sequence_length, True)
    # Padding follows the targets, so causal attention needs no document numbers there.
    yield from _iter_self_groups(model, "decoder", dtype, batch.counted_sequence_length, False)
    crossed = describe_cross_attention(
        model, dtype=dtype, length=batch.sequence_length, has_documents=True
    )
    yield AttentionGroup(
        "decoder", "cross_attention", tuple(range(model.num_hidden_layers)), crossed, _UNDECIDED
    )


def _iter_self_groups(
    model: ModelConfig, stack: str, dtype: AttentionDtype, length: int, has_documents: bool
) -> Iterator[AttentionGroup]:
    if isinstance(model.attention, PythonAttentionConfig):
        return
    layers: dict[LayerType, list[int]] = {}
    for layer in range(model.num_hidden_layers):
        if not model.has_attention(layer):
            continue  # products and solves of linear attention have no kernel to choose
        layers.setdefault(model.get_layer_type(layer), []).append(layer)
    for layer_type, members in layers.items():
        traits = describe_self_attention(
            model, layer_type, dtype=dtype, length=length, has_documents=has_documents
        )
        yield AttentionGroup(stack, layer_type, tuple(members), traits, _UNDECIDED)


def _describe_latent_attention(
    model: ModelConfig, attention: LatentAttentionConfig, common: AttentionTraits
) -> AttentionTraits:
    width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    scaling = model.position.scaling if isinstance(model.position, RopeConfig) else None
    is_sharpened = isinstance(scaling, YarnRopeScalingConfig) and bool(scaling.mscale_all_dim)
    usual = _has_usual_scale(model, attention.scale, width) and not is_sharpened
    common = replace(common, selects_keys=attention.sparse is not None)
    # queries are projected into the latent space, see llmsys/model/latent_attention.py
    if common.is_cached:
        latent = attention.kv_lora_rank
        return replace(
            common,
            qk_width=latent + attention.qk_rope_head_dim,
            v_width=latent,
            has_usual_scale=False,
        )
    return replace(common, qk_width=width, v_width=attention.v_head_dim, has_usual_scale=usual)


def _has_usual_scale(model: ModelConfig, scale: float | None, width: int) -> bool:
    match model.parametrization:
        case StandardParametrizationConfig():
            return scale is None or abs(scale * width**0.5 - 1) < 1e-9
        case MupConfig(base_head_dim=base):
            return scale is None and base in (None, width)
        case UnitScaledConfig():
            return False
        case unreachable:
            assert_never(unreachable)

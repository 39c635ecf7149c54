"""Compare every attention kernel that the decision table chooses on a device with plain operations
on the CPU.

The mask of a case is built by the model's own builder, so a kernel gets what it gets in training.
The reference is plain attention with a table on the CPU, in float64 but for the softmax, of the
same rounded inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.attention_device import AttentionDtype
from llmsys.config.model import ModelConfig
from llmsys.config.position import RelativeBiasConfig
from llmsys.doctor.check_row import CheckRow, build_row
from llmsys.kernels.attention_kernel import choose_attention_kernel
from llmsys.kernels.attention_layers import describe_cross_attention, describe_self_attention
from llmsys.model import attention_device
from llmsys.model.attention_mask import AttentionMask, LayerMask, build_cross_attention_mask
from llmsys.model.document_lengths import build_document_lengths
from llmsys.model.embedding import RelativePositionBias
from llmsys.model.kv_cache import EncoderOutput
from llmsys.model.mask_builder import MaskBuilder, MaskInputs
from llmsys.model.scaled_dot_product import compute_attention, compute_eager_attention

# B rows, T query positions, H query heads, G key-value heads, K width of a head, V width of a value

ROWS, LENGTH = 2, 320  # two whole blocks of flex_attention and a cut one
DTYPES: dict[AttentionDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Relative limits of the output and of the gradients: some 4 times the rounding of plain operations
# in that dtype.
LIMITS: dict[AttentionDtype, tuple[float, float]] = {
    "bf16": (2e-2, 4e-2),
    "fp16": (3e-3, 6e-3),
    "fp32": (1e-4, 1e-4),
}

MODEL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}


@dataclass(frozen=True)
class AttentionCase:
    """An attention layer: a model that has it, and what the rows hold."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    has_documents: bool = True
    is_cross: bool = False

    @property
    def model(self) -> ModelConfig:
        """The model."""
        return ModelConfig.model_validate(MODEL | self.changes)


ENCODER = {"family": "encoder", "head": {"kind": "features"}}
LATENT = {
    "kind": "latent",
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}
# A case for each row of the table that training reaches; dropout and Transformer-XL are plain
# operations already.
CASES = (
    AttentionCase("causal", has_documents=False),
    AttentionCase("documents"),
    AttentionCase("documents, 256 channels", {"head_dim": 256}),
    AttentionCase("documents, window", {"sliding_window": 50}),
    AttentionCase("both directions", ENCODER),
    AttentionCase("both directions, window", {**ENCODER, "sliding_window": 50}),
    AttentionCase(
        "sinks, window", {"attention": {"kind": "multi_head", "sinks": True}, "sliding_window": 50}
    ),
    AttentionCase("soft cap", {"attention": {"kind": "multi_head", "logit_softcap": 2.0}}),
    AttentionCase("ALiBi", {"position": {"kind": "alibi"}}),
    AttentionCase("T5 bias", {"position": {"kind": "relative_bias"}}),
    AttentionCase(
        "latent, 192 and 128 channels",
        {"attention": LATENT | {"v_head_dim": 128}, "num_key_value_heads": 8},
    ),
    AttentionCase(
        "cross", {"family": "encoder_decoder", "position": {"kind": "sinusoidal"}}, is_cross=True
    ),
)


def check_attention(
    number: int, dtypes: tuple[AttentionDtype, ...], device: torch.device
) -> list[CheckRow]:
    """Compare one case in every dtype, forward and backward.

    Args:
        number: index in `CASES`.
        dtypes: dtypes of queries, keys and values.
        device: device of this rank.

    Returns:
        A row for each dtype; a kernel that raises is a row that failed.
    """
    return [_check_dtype(CASES[number], dtype, device) for dtype in dtypes]


def _check_dtype(case: AttentionCase, dtype: AttentionDtype, device: torch.device) -> CheckRow:
    traits = _describe_case(case, dtype)
    choice = choose_attention_kernel(attention_device.describe_device(device), traits)
    name = f"{case.name}, {dtype}"
    if choice.kernel == "flex" and device.type == "cuda":
        # It is compiled for each case, and torch compiles one function eight times at most.
        torch.compiler.reset()
    try:
        errors = list(_iter_errors(case, dtype, device))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return build_row(
            "attention", name, False, f"{choice.kernel}: {type(error).__name__}: {first}"
        )
    output, gradient = errors[0], max(errors[1:])
    limits = LIMITS[dtype]
    is_good = output < limits[0] and gradient < limits[1]  # False for NaN
    text = (
        f"{choice.kernel}: output off by {output:.1e} ({limits[0]:.0e}), gradients by "
        f"{gradient:.1e} ({limits[1]:.0e})"
    )
    return build_row(
        "attention", name, is_good, text, kernel=choice.kernel, output=output, gradient=gradient
    )


def _describe_case(case: AttentionCase, dtype: AttentionDtype) -> Any:
    model = case.model
    if case.is_cross:
        return describe_cross_attention(model, dtype=dtype, length=LENGTH, has_documents=True)
    kind = model.get_layer_type(0)
    return describe_self_attention(
        model, kind, dtype=dtype, length=LENGTH, has_documents=case.has_documents
    )


def _iter_errors(
    case: AttentionCase, dtype: AttentionDtype, device: torch.device
) -> Iterator[float]:
    """Yield the relative errors of the output and of each gradient."""
    inputs = _draw_inputs(case.model, DTYPES[dtype])
    found = _compute(case, [x.to(device) for x in inputs], is_reference=False)
    wanted = _compute(case, [x.double() for x in inputs], is_reference=True)
    for ours, plain in zip(found, wanted, strict=True):
        yield float((ours.double().cpu() - plain).norm() / plain.norm())


def _draw_inputs(model: ModelConfig, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values, the gradient of the output, sinks and a table of T5's
    biases.
    """
    heads, groups, attention = model.num_attention_heads, model.num_key_value_heads, model.attention
    qk_width = v_width = model.head_dim
    if isinstance(attention, LatentAttentionConfig):
        qk_width, v_width = (
            attention.qk_nope_head_dim + attention.qk_rope_head_dim,
            attention.v_head_dim,
        )
    buckets = model.position.buckets if isinstance(model.position, RelativeBiasConfig) else 1
    shapes = (heads, qk_width), (groups, qk_width), (groups, v_width), (heads, v_width)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(ROWS, LENGTH, *shape, generator=generator) for shape in shapes]
    drawn += [
        torch.randn(heads, generator=generator),
        torch.randn(buckets, heads, generator=generator),
    ]
    return [x.to(dtype) for x in drawn]


def _compute(case: AttentionCase, inputs: list[Tensor], *, is_reference: bool) -> list[Tensor]:
    """Return the output and the gradients of everything that the case reads."""
    model, attention = case.model, case.model.attention
    q, k, v, dout, sinks_H, biases = inputs
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table: RelativePositionBias | None = None
    if isinstance(model.position, RelativeBiasConfig):
        table = RelativePositionBias(model.position, model.num_attention_heads).to(q)
        table.weight.data.copy_(biases)
        leaves.append(table.weight)
    options: dict[str, Any] = {}
    if isinstance(attention, MultiHeadAttentionConfig):
        options["softcap"] = attention.logit_softcap
        if attention.sinks:
            options["sinks_H"] = sinks_H.requires_grad_()
            leaves.append(sinks_H)
    mask = _build_mask(case, q.detach().flatten(2), table, is_reference=is_reference)
    if is_reference:
        assert isinstance(mask, AttentionMask)
        out = compute_eager_attention(q, k, v, mask, **options)
    else:
        out = compute_attention(q, k, v, mask, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _build_mask(
    case: AttentionCase, like: Tensor, table: RelativePositionBias | None, *, is_reference: bool
) -> LayerMask:
    documents_BT = _number_documents() if case.has_documents else None
    builder, kind, lengths = MaskBuilder(case.model), case.model.get_layer_type(0), None
    if documents_BT is not None:
        lengths = build_document_lengths(documents_BT).map_tensors(lambda x: x.to(like.device))
        documents_BT = documents_BT.to(like.device)
    inputs = MaskInputs(LENGTH, like, slice(None), table, documents_BT, lengths, training=True)
    if case.is_cross:
        if is_reference:
            return build_cross_attention_mask(documents_BT, documents_BT, LENGTH, LENGTH)
        return builder.build_cross_mask(inputs, EncoderOutput(like, documents_BT))
    return (
        builder.build_tables(inputs, builder.windows)
        if is_reference
        else builder.build_self_masks(inputs)
    )[kind]


def _number_documents() -> Tensor:
    """Return documents whose borders are not those of blocks, and padding at the end of the
    second row.
    """
    borders = torch.tensor([[100, 131, 250, LENGTH], [7, 200, 300, 310]])
    numbers_BT = torch.searchsorted(
        borders, torch.arange(LENGTH).expand(ROWS, -1).contiguous(), right=True
    )
    return torch.where(numbers_BT < 4, numbers_BT, -1)

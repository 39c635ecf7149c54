"""Scaled dot-product attention by the cheapest kernel that computes it exactly.

Kernels: on accelerators flash attention over packed sequences and flex_attention, where the mask
was built for one of them; chunked products for bfloat16 on the CPU; torch's fused kernels without
mask, causal, with a boolean mask or with a bias; eager operations for what no kernel supports (on
the CPU soft cap and sinks) or the CPU's does slowly (dropout). llmsys/kernels/attention_kernel.py
holds the rules.
"""

import math
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model import cpu_attention
from llmsys.model.attention_mask import AttentionMask, DistributedMask, LayerMask
from llmsys.model.dropout import apply_dropout as drop
from llmsys.model.flex_attention import FlexMask, compute_flex_attention
from llmsys.model.varlen_attention import VarlenMask, compute_varlen_attention

# B rows, T query positions, S key positions, H query heads, G key-value heads, K width of a head, V
# width of a value


def compute_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: LayerMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(softcap(scale · q kᵀ) + bias) v, (B, T, H, V); H / G query heads share a
    key-value head.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys.
        v_BSGV: Values.
        mask: Visible keys, and the bias, in the form that the kernel takes.
        scale: Factor on the scores; None: 1 / sqrt(K).
        softcap: Scores become cap · tanh(score / cap) before the bias is added.
        sinks_H: An extra score per head that takes weight and has no value.
        dropout: Probability of dropping a weight; the caller passes 0 outside of training.

    Returns:
        The output, in the dtype of the values.

    Raises:
        ValueError: A mask that was built for a kernel without dropout or soft cap, and a request
            for them.
    """
    if not isinstance(mask, AttentionMask):
        if dropout or (softcap is not None and isinstance(mask, VarlenMask)):
            raise ValueError(
                f"{type(mask).__name__} with dropout={dropout} and softcap={softcap}: its kernel "
                "has neither a dropout nor, over packed sequences, a soft cap. Build the mask as "
                "choose_attention_kernel decides."
            )
        return _compute_without_table(q_BTHK, k_BSGK, v_BSGV, mask, scale, softcap, sinks_H)
    if softcap is not None or sinks_H is not None or (dropout and not q_BTHK.is_cuda):
        return compute_eager_attention(
            q_BTHK, k_BSGK, v_BSGV, mask, scale, softcap, sinks_H, dropout
        )
    if _can_use_chunked_attention(q_BTHK, k_BSGK, v_BSGV, mask, scale, dropout):
        return cpu_attention.compute_chunked_attention(
            q_BTHK, k_BSGK, v_BSGV, mask.visible_B1TS, causal=mask.causal
        )
    table = mask.visible_B1TS if mask.bias_BHTS is None else mask.bias_BHTS.to(q_BTHK.dtype)
    grouped = q_BTHK.shape[2] != k_BSGK.shape[2]
    if grouped and table is not None and q_BTHK.is_cuda:
        # On GPUs the only fused kernel that takes a mask does not know groups.
        k_BSGK, v_BSGV = (_repeat_kv(x, q_BTHK.shape[2]) for x in (k_BSGK, v_BSGV))
        grouped = False
    y_BHTV = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGV.transpose(1, 2),
        attn_mask=table,
        dropout_p=dropout,
        is_causal=mask.causal and table is None,  # torch takes a mask or is_causal, not both
        scale=scale,
        enable_gqa=grouped,
    )
    return y_BHTV.transpose(1, 2)


def _compute_without_table(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: VarlenMask | FlexMask | DistributedMask,
    scale: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    scale = 1 / math.sqrt(q_BTHK.shape[-1]) if scale is None else scale
    match mask:
        case VarlenMask():
            return compute_varlen_attention(
                q_BTHK, k_BSGK, v_BSGV, mask, scale=scale, sinks_H=sinks_H
            )
        case FlexMask():
            return compute_flex_attention(
                q_BTHK, k_BSGK, v_BSGV, mask, scale=scale, softcap=softcap, sinks_H=sinks_H
            )
        case DistributedMask():
            return mask.compute_attention(
                q_BTHK, k_BSGK, v_BSGV, scale=scale, softcap=softcap, sinks_H=sinks_H
            )
        case unreachable:
            assert_never(unreachable)


def compute_eager_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: AttentionMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the same as `compute_attention` by plain operations, with a softmax in float32.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys.
        v_BSGV: Values.
        mask: Visible keys and the bias, as a table at most.
        scale: Factor on the scores; None: 1 / sqrt(K).
        softcap: Cap of the scores.
        sinks_H: An extra score per head.
        dropout: Probability of dropping a weight.

    Returns:
        The output, (B, T, H, V), in the dtype of the values.
    """
    heads = q_BTHK.shape[2]
    k_BHSK, v_BHSV = (_repeat_kv(x, heads).transpose(1, 2) for x in (k_BSGK, v_BSGV))
    scores_BHTS = q_BTHK.transpose(1, 2) @ k_BHSK.transpose(2, 3)
    scores_BHTS = scores_BHTS * (1 / math.sqrt(q_BTHK.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    scores_BHTS = _mask_scores(scores_BHTS.float(), mask)
    if sinks_H is not None:
        # A sink takes a share of the weights and has no value.
        sinks_BHT1 = sinks_H.float()[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        weights_BHTS = torch.cat([scores_BHTS, sinks_BHT1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights_BHTS = scores_BHTS.softmax(dim=-1)
    weights_BHTS = drop(weights_BHTS.to(v_BHSV.dtype), dropout, training=True)
    return (weights_BHTS @ v_BHSV).transpose(1, 2)


def _mask_scores(scores_BHTS: Tensor, mask: AttentionMask) -> Tensor:
    if mask.bias_BHTS is not None:
        return scores_BHTS + mask.bias_BHTS
    if mask.visible_B1TS is not None:
        return scores_BHTS.masked_fill(~mask.visible_B1TS, -torch.inf)
    if mask.causal:
        later_TS = torch.ones(
            scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device
        ).triu_(1)
        return scores_BHTS.masked_fill(later_TS, -torch.inf)
    return scores_BHTS


def _can_use_chunked_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: AttentionMask,
    scale: float | None,
    dropout: float,
) -> bool:
    """Return whether the chunked path computes this, and is faster."""
    # The chunked operator has no other scale.
    usual = scale is None or math.isclose(scale, 1 / math.sqrt(q_BTHK.shape[-1]))
    plain = mask.bias_BHTS is None and not dropout and v_BSGV.shape == k_BSGK.shape
    return plain and usual and cpu_attention.is_cpu_attention_supported(q_BTHK, k_BSGK)


def _repeat_kv(x_BSGK: Tensor, heads: int) -> Tensor:
    shared_by = heads // x_BSGK.shape[2]
    return x_BSGK if shared_by == 1 else x_BSGK.repeat_interleave(shared_by, dim=2)

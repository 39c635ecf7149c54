"""The shapes of flex_attention for fake tensors, as in a dry run: an operator without values.

torch's eager operator makes scores of T × S on fake tensors too, and its compiled function cannot
run on them. This one allocates what the compiled kernels allocate: the output, the log-sum-exp, and
gradients.

`num_blocks`, int32 (B, 1, Q), holds the number of key blocks that each block of queries reads. A
counter takes 2 · FLEX_BLOCK² · (K + V) · H operations for each block in the forward pass from it.
"""

from typing import Any

import torch
from torch import Tensor

# B rows, T query positions, S key positions, H query heads, G key-value heads, K width of a head, V
# width of a value, R distances, Q blocks of queries


def run_fake_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, table_HR: Tensor | None, num_blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return fake results of flex_attention; gradients are fake too.

    Args:
        q: Fake queries, (B, H, T, K).
        k: Fake keys, (B, G, S, K).
        v: Fake values, (B, G, S, V).
        table_HR: Trained bias, or None.
        num_blocks: See above.

    Returns:
        The output, (B, H, T, V), and the log-sum-exp of the scores, float32 (B, H, T).
    """
    out, lse = _allocate_flex_outputs(q, k, v, table_HR, num_blocks)
    return out, lse


@torch.library.custom_op("llmsys::fake_flex_attention", mutates_args=())
def _allocate_flex_outputs(
    q: Tensor, k: Tensor, v: Tensor, table_HR: Tensor | None, num_blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of fake tensors."""
    raise RuntimeError(
        f"llmsys::fake_flex_attention has no values, and {q.device} tensors have. Call "
        "compute_flex_attention."
    )


@_allocate_flex_outputs.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, table_HR: Tensor | None, num_blocks: Tensor
) -> tuple[Tensor, Tensor]:
    rows, heads, length, _ = q.shape
    # The kernel writes its output in the order of the queries' strides: (B, T, H, V) in memory.
    out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(rows, heads, length, dtype=torch.float32)


@torch.library.custom_op("llmsys::fake_flex_attention_backward", mutates_args=())
def _allocate_flex_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table_HR: Tensor | None,
    num_blocks: Tensor,
) -> list[Tensor]:
    """Return the gradients of fake queries, keys, values and table."""
    raise RuntimeError(
        f"llmsys::fake_flex_attention_backward has no values, and {q.device} tensors have."
    )


@_allocate_flex_gradients.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table_HR: Tensor | None,
    *others: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, table_HR) if x is not None]


def _save_fake_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, table_HR, num_blocks = inputs
    ctx.save_for_backward(q, k, v, *output, table_HR, num_blocks)


def _run_fake_backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _allocate_flex_gradients(dout, *ctx.saved_tensors)
    return (*gradients, *([None] * (5 - len(gradients))))


_allocate_flex_outputs.register_autograd(_run_fake_backward, setup_context=_save_fake_inputs)

"""FLOPs of products and attention, by operation: torch's formulas, and those that torch lacks.

Invariants:
- Attention over packed documents is counted by document and the half that a causal mask leaves; attention by blocks is
  counted by the blocks that are read.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from llmsys.config.attention_kernel import FLEX_BLOCK
from llmsys.dryrun.known_values import get_known, leave_fake_mode

BACKWARD_PRODUCTS, FORWARD_PRODUCTS = 5, 2
"""Flash attention: scores and output in the forward; scores again and four gradients in the backward."""


def count_kernel_flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> int:
    """Return the FLOPs of one call, 0 for what is neither product nor attention.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its named arguments.
        outputs: its results.

    Returns:
        Multiplications and additions.
    """
    if count := OWN_FORMULAS.get(func._opname):
        return count(args, outputs)
    formula: Any = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def _count_grouped_products(args: tuple[Any, ...], outputs: Tensor) -> int:
    """2 · rows · in · out, where the rows are the ragged dim of grouped_mm."""
    left: Tensor = args[0]
    # (M, K) x (E, K, N) -> (M, N), or (K, M) x (M, N) -> (E, K, N).
    return 2 * left.shape[0] * left.shape[1] * outputs.shape[-1]


def _count_varlen_forward(args: tuple[Any, ...], outputs: Any) -> int:
    # (q, k, v, sinks, starts, longest, left, right, scale)
    return FORWARD_PRODUCTS * _count_packed_scores(args[0], args[2], args[4], (args[6], args[7]))


def _count_varlen_backward(args: tuple[Any, ...], outputs: Any) -> int:
    # (gradient, q, k, v, out, lse, starts, longest, left, right, scale)
    return BACKWARD_PRODUCTS * _count_packed_scores(args[1], args[3], args[6], (args[8], args[9]))


def _count_packed_scores(query: Tensor, value: Tensor, starts: Tensor, window: tuple[int, int]) -> int:
    """Return heads · (query width + value width) · pairs of positions that see each other, over all documents."""
    known = get_known(starts)
    with leave_fake_mode():
        lengths = [query.shape[0]] if known is None else known.diff().tolist()
    pairs = sum(_count_pairs(length, window) for length in lengths)
    return pairs * query.shape[1] * (query.shape[2] + value.shape[2])


def _count_flex_forward(args: tuple[Any, ...], outputs: Any) -> int:
    # (q, k, v, table, blocks)
    return FORWARD_PRODUCTS * _count_block_scores(args[0], args[2], args[1].shape[2], args[4])


def _count_flex_backward(args: tuple[Any, ...], outputs: Any) -> int:
    # (gradient, q, k, v, out, lse, table, blocks)
    return BACKWARD_PRODUCTS * _count_block_scores(args[1], args[3], args[2].shape[2], args[7])


def _count_block_scores(query: Tensor, value: Tensor, num_keys: int, blocks: Tensor) -> int:
    """Return heads · (query width + value width) · pairs of positions in the blocks that are read."""
    known = get_known(blocks)
    with leave_fake_mode():
        all_blocks = blocks.numel() * -(-num_keys // FLEX_BLOCK)
        num_blocks = all_blocks if known is None else int(known.sum())
    return num_blocks * FLEX_BLOCK**2 * query.shape[1] * (query.shape[3] + value.shape[3])


def _count_pairs(length: int, window: tuple[int, int]) -> int:
    left = length - 1 if window[0] < 0 else min(window[0], length - 1)
    right = length - 1 if window[1] < 0 else min(window[1], length - 1)
    # Positions near the ends see fewer keys.
    return length * (left + right + 1) - left * (left + 1) // 2 - right * (right + 1) // 2


OWN_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "_grouped_mm": _count_grouped_products,
    "varlen_attention": _count_varlen_forward,
    "varlen_attention_backward": _count_varlen_backward,
    "fake_flex_attention": _count_flex_forward,
    "fake_flex_attention_backward": _count_flex_backward,
}

"""FLOPs of products and attention, by operation: torch's formulas, and those that torch lacks.

Invariants:
- Causal attention over packed documents is counted by document, the half that it computes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

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
    # (query, key, value, starts, …, causal at 7, …, window at 9)
    return FORWARD_PRODUCTS * _count_packed_scores(args[0], args[2], args[3], args[7], _get_window(args, 9))


def _count_varlen_backward(args: tuple[Any, ...], outputs: Any) -> int:
    # (grad, query, key, value, out, lse, starts, …, causal at 10, …, window at 13)
    return BACKWARD_PRODUCTS * _count_packed_scores(args[1], args[3], args[6], args[10], _get_window(args, 13))


def _get_window(args: tuple[Any, ...], place: int) -> tuple[int, int]:
    left, right = args[place] if len(args) > place and args[place] is not None else (-1, -1)
    return left, right


def _count_packed_scores(query: Tensor, value: Tensor, starts: Tensor, causal: bool, window: tuple[int, int]) -> int:
    """Return heads · (query width + value width) · pairs of positions that see each other, over all documents."""
    known = get_known(starts)
    with leave_fake_mode():
        lengths = [query.shape[0]] if known is None else known.diff().tolist()
    pairs = sum(_count_pairs(length, causal, window) for length in lengths)
    return pairs * query.shape[1] * (query.shape[2] + value.shape[2])


def _count_pairs(length: int, causal: bool, window: tuple[int, int]) -> int:
    left = length - 1 if window[0] < 0 else min(window[0], length - 1)
    right = 0 if causal else length - 1 if window[1] < 0 else min(window[1], length - 1)
    # Positions near the ends see fewer keys.
    return length * (left + right + 1) - left * (left + 1) // 2 - right * (right + 1) // 2


OWN_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "_grouped_mm": _count_grouped_products,
    "_varlen_attn": _count_varlen_forward,
    "_varlen_attn_backward": _count_varlen_backward,
}

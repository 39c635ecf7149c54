"""Attention counted pair by pair, as slowly as one would by hand."""

from collections.abc import Sequence


def count_visible_pairs(
    length: int, window: int | None = None, documents: Sequence[int] = (), *, causal: bool = True
) -> int:
    """(query, key) pairs of one sequence in which the query sees the key.

    A query sees, itself included, its own document, with `causal` nothing later, and what is fewer
    than `window` away.
    """
    numbers: list[int] = []
    while len(numbers) < length:
        for one in documents or (length,):
            numbers += [numbers[-1] + 1 if numbers else 0] * one
    return sum(
        1
        for query in range(length)
        for key in range(length)
        if numbers[query] == numbers[key]
        and (key <= query or not causal)
        and (window is None or abs(query - key) < window)
    )

"""How many pairs of a query and a key attention really looks at: under causal masks, windows and packed documents."""

from collections.abc import Iterator, Sequence


def count_visible_pairs(length: int, window: int | None, *, causal: bool) -> int:
    """Pairs within one document of `length` tokens.

    A token sees itself and what came before, with a window at most `window` positions; without `causal` the same on
    both sides, |query − key| < window.
    """
    reach = length if window is None else min(window, length)
    one_side = reach * (reach + 1) // 2 + (length - reach) * reach  # the first tokens see fewer than the window
    return one_side if causal else 2 * one_side - length


def iter_document_lengths(length: int, documents: Sequence[int]) -> Iterator[int]:
    """Lengths of the documents in one window of `length` tokens.

    `documents` repeats until the window is full, and the last one is cut; without any, the window is one document.
    Raises ValueError for a document without tokens.
    """
    if any(one < 1 for one in documents):
        raise ValueError(f"A document of {min(documents)} tokens is none. Give lengths of 1 token or more.")
    used = 0
    while used < length:
        for one in documents or (length,):
            cut = min(one, length - used)
            if cut:
                yield cut
            used += cut

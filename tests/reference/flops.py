"""Attention counted pair by pair, as slowly as one would by hand."""


def visible_pairs(length: int) -> int:
    """(query, key) pairs of one causal window: every position sees itself and what came before."""
    return sum(1 for query in range(length) for key in range(length) if key <= query)

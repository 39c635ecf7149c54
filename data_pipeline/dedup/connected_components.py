"""Cluster pairs of documents into connected components, independently of the order of the pairs.

Invariants:
- Memory is about 60 bytes per linked document and pair. Spanning forests of partial pairs (the fewest pairs with the
  same components) are joined one by one, so that the pairs of one part at a time are in memory.
"""

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


def find_components(pairs: Indices) -> tuple[Indices, Indices]:
    """Find the connected components of pairs.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        The distinct documents (D,), sorted, and for each the smallest document of its component (D,).
    """
    from scipy.sparse import coo_array  # slow to import, and only clustering needs it
    from scipy.sparse.csgraph import connected_components

    documents, indices = np.unique(pairs, return_inverse=True)
    indices = indices.reshape(-1, 2)
    size = len(documents)
    links = coo_array((np.ones(len(indices), np.int8), (indices[:, 0], indices[:, 1])), shape=(size, size))
    _, labels = connected_components(links, directed=False)
    first = np.zeros(0 if not size else int(labels.max()) + 1, np.int64)
    first[labels[::-1]] = documents[::-1]  # the last write per label wins: the smallest document
    return documents.astype(np.int64), first[labels]


def build_spanning_forest(pairs: Indices) -> Indices:
    """Reduce pairs to the fewest with the same components.

    Args:
        pairs: (P, 2) document numbers, in any order.

    Returns:
        (F, 2) pairs of the smallest document of a component and another of its documents; at most one per document.
    """
    documents, first = find_components(pairs)
    linked = documents != first
    return np.stack([first[linked], documents[linked]], axis=1)


def list_clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, ordered by their first members."""
    documents, first = find_components(pairs)
    order = np.lexsort([documents, first])
    edges = np.flatnonzero(np.diff(first[order], prepend=-1))
    return [part.tolist() for part in np.split(documents[order], edges[1:])] if len(documents) else []

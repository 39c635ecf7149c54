"""Pairs of documents made into clusters: connected components, which do not depend on the order of the pairs.

Reads pairs of document numbers, gives forests (the fewest pairs with the same components) and cluster numbers. Memory
is about 60 bytes per linked document and pair at hand; forests of parts are joined one by one, so that never more than
one part's pairs are at hand.
"""

from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


def find_components(pairs: Indices) -> tuple[Indices, Indices]:
    """Return the documents of the pairs (P, 2), sorted, and the smallest document of each one's component."""
    from scipy.sparse import coo_array  # takes a while to import, and only clusters need it
    from scipy.sparse.csgraph import connected_components

    documents, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(-1, 2)
    size = len(documents)
    links = coo_array((np.ones(len(places), np.int8), (places[:, 0], places[:, 1])), shape=(size, size))
    _, labels = connected_components(links, directed=False)
    first = np.zeros(0 if not size else int(labels.max()) + 1, np.int64)
    first[labels[::-1]] = documents[::-1]  # of equal labels the last write, the smallest document, counts
    return documents.astype(np.int64), first[labels]


def build_spanning_forest(pairs: Indices) -> Indices:
    """Return at most one pair per document (F, 2), smallest of the component first, with the same components."""
    documents, first = find_components(pairs)
    linked = documents != first
    return np.stack([first[linked], documents[linked]], axis=1)


def list_clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, in the order of their first members."""
    documents, first = find_components(pairs)
    order = np.lexsort([documents, first])
    edges = np.flatnonzero(np.diff(first[order], prepend=-1))
    return [part.tolist() for part in np.split(documents[order], edges[1:])] if len(documents) else []

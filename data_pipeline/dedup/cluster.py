"""Pairs of equal documents made into clusters, and the one document of each cluster that stays.

Reads pairs of document indices, gives for every dropped document the one that stays in its place. Promises: clusters
are connected components whatever the order of the pairs, and the keep rule looks at the documents alone (longest, then
smallest id, then first in the crawl), so that the order of the input decides nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from data_pipeline.dedup.exact import Indices


def clusters(pairs: Indices) -> list[list[int]]:
    """Return the connected components of the pairs (P, 2), each sorted, in the order of their first members."""
    parent: dict[int, int] = {}
    for left, right in pairs.tolist():
        first, second = _root(parent, left), _root(parent, right)
        if first != second:
            parent[max(first, second)] = min(first, second)
    members: dict[int, list[int]] = {}
    for document in sorted(parent):
        members.setdefault(_root(parent, document), []).append(document)
    return [members[root] for root in sorted(members)]


def _root(parent: dict[int, int], document: int) -> int:
    """Follow the parents to the top, halving the path on the way (Tarjan 1984)."""
    parent.setdefault(document, document)
    while parent[document] != document:
        parent[document] = parent[parent[document]]
        document = parent[document]
    return document


def kept_of(
    members: Iterable[int], characters: np.ndarray[Any, np.dtype[np.int64]], identity: Callable[[int], str]
) -> int:
    """Return the member that stays: the longest, then the smallest id, then the smallest index (first in the crawl)."""
    return min(members, key=lambda document: (-int(characters[document]), identity(document), document))

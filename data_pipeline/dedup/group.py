"""Items with equal keys: who is the first of each group, and who are the others.

Reads key columns, gives, for every item that is not the first of its group, the item that is, and the size of the
group. Promises: the first is the one with the smallest (age, rank, tie, source, row, place), whatever order the items
come in.
"""

from typing import Any

import numpy as np

from data_pipeline.dedup.keys import Columns, take_rows

# From the most to the least important; `age` 0 is an earlier dataset, 1 is this one.
ORDER = ("age", "rank", "tie", "source", "row", "place")


def mask_repeated_keys(high: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
    """Return a mask of the keys that occur more than once."""
    order = np.argsort(high, kind="stable")
    equal = high[order][1:] == high[order][:-1]
    mask = np.zeros(len(high), np.bool_)
    mask[order[1:][equal]] = True
    mask[order[:-1][equal]] = True
    return mask


def find_later_items(items: Columns) -> tuple[Columns, Columns, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the items that come after the first of their group, the first of each of theirs, and the group's size.

    Items of earlier datasets (age 0) are never among the later ones, and count as one of their group.
    """
    items = take_rows(items, mask_repeated_keys(items["high"]))
    items = take_rows(items, np.lexsort([items[name] for name in (*reversed(ORDER), "low", "high")]))
    fresh = np.ones(len(items["high"]), np.bool_)
    fresh[1:] = (items["high"][1:] != items["high"][:-1]) | (items["low"][1:] != items["low"][:-1])
    starts = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    sizes = np.bincount(group, items["age"] == 1, len(starts)).astype(np.int64)
    sizes += (items["age"][starts] == 0).astype(np.int64)
    later = ~fresh & (items["age"] == 1)
    return take_rows(items, later), take_rows(items, starts[group[later]]), sizes[group[later]]

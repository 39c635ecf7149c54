"""Groups of equal keys: both halves of a hash count, and earlier datasets keep what they hold."""

import numpy as np

from llmsys.data_pipeline.dedup.keys import ITEM_SCHEMA, Columns, find_later_items
from llmsys.data_pipeline.stages.join_near_duplicates import _list_equal_pairs


def build_items(high: list[int], low: list[int], age: list[int]) -> Columns:
    """Items whose rows are their numbers, and equal in everything else."""
    items = {name: np.zeros(len(high), np.uint64) for name in (*ITEM_SCHEMA.names, "source")}
    rows = {"row": np.arange(len(high)), "age": np.array(age)}
    return items | rows | {"high": np.array(high, np.uint64), "low": np.array(low, np.uint64)}


def test_items_with_half_of_their_hash_in_common_are_not_equal() -> None:
    later, first, sizes = find_later_items(build_items([7, 7, 7, 8], [1, 2, 1, 1], [1, 1, 1, 1]))
    assert (later["row"].tolist(), first["row"].tolist(), sizes.tolist()) == ([2], [0], [2])


def test_items_of_earlier_datasets_come_first_count_as_one_and_are_never_later() -> None:
    later, first, sizes = find_later_items(build_items([7, 7, 7, 7], [1, 1, 1, 1], [1, 0, 0, 1]))
    assert (later["row"].tolist(), first["row"].tolist(), sizes.tolist()) == (
        [0, 3],
        [1, 1],
        [3, 3],
    )


def test_equal_keys_of_different_buckets_link_nothing() -> None:
    items = build_items([7, 7, 7, 8], [1, 2, 1, 1], [1, 1, 1, 1])
    assert _list_equal_pairs(items, items["row"]).tolist() == [[0, 2]]

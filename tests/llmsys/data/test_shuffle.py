"""Laws of permutations from a key: bijective, with an inverse, the same everywhere, and in no
visible pattern.
"""

import math

import numpy as np
import pytest

from llmsys.data import shuffle
from llmsys.data.shuffle import KeyedPermutation, build_permutation, derive_order_key


@pytest.mark.parametrize("stored", [True, False])
def test_every_value_has_one_place_and_the_inverse_finds_it(
    stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle, "MAX_STORED", 100_000 if stored else 0)
    for size in (*range(1, 70), 65_537):
        permutation = KeyedPermutation(size, 42)
        values = permutation.get_values(np.arange(size))
        assert (np.sort(values) == np.arange(size)).all(), size
        assert (permutation.find_places(values) == np.arange(size)).all(), size


def hash_plainly(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def map_plainly(size: int, key: int, number: int) -> int:
    """The network in Python's integers: rows of `width` numbers, of which six rounds move row
    and column in turn.
    """
    height = math.ceil(math.sqrt(size))
    width = -(-size // height)
    row, column = divmod(number, width)
    for turn in range(6):
        secret = hash_plainly((key + (turn + 1) * 0x9E3779B97F4A7C15) % 2**64)
        if turn % 2 == 0:
            row = (row + hash_plainly((column * 0x9E3779B97F4A7C15 + secret) % 2**64)) % height
        else:
            column = (column + hash_plainly((row * 0x9E3779B97F4A7C15 + secret) % 2**64)) % width
    mapped = row * width + column
    return mapped if mapped < size else map_plainly(size, key, mapped)


def test_a_small_one_is_the_array_shuffle_and_a_large_one_the_plain_network() -> None:
    key = derive_order_key("pinned", 1)
    assert (
        KeyedPermutation(5, key).get_values(np.arange(5)).tolist()
        == build_permutation(5, key).tolist()
    )
    places = [0, 1, 77_777, 1_999_999_999]
    values = KeyedPermutation(2_000_000_000, key).get_values(np.array(places)).tolist()
    assert values == [map_plainly(2_000_000_000, key, place) for place in places]
    assert values[0] == 1_936_694_529


def test_a_large_one_takes_no_memory_and_is_found_again_from_its_values() -> None:
    permutation = KeyedPermutation(10**12, 7)
    places = np.random.default_rng(0).integers(0, 10**12, 2_000)
    values = permutation.get_values(places)
    assert values.min() >= 0
    assert values.max() < 10**12
    assert (permutation.find_places(values) == places).all()
    assert permutation._stored is None


def test_values_are_spread_evenly_and_neighbours_go_apart() -> None:
    size = 200_000
    values = KeyedPermutation(size, 3).get_values(np.arange(size))
    counts = np.histogram2d(np.arange(size), values, 20)[0].ravel()
    # Chi-square of 400 cells: mean 361 at fixed margins, standard deviation 27.
    assert abs(((counts - 500) ** 2 / 500).sum() - 361) < 5 * 27
    assert (np.diff(values) == 1).sum() < 12
    assert (values == KeyedPermutation(size, 4).get_values(np.arange(size))).sum() < 12

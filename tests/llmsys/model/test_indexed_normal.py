"""Laws of numbers by index: any slice has the bits of the whole tensor, and the numbers are
standard normal.
"""

import math

import pytest
import torch

from llmsys.model import indexed_normal
from llmsys.model.indexed_normal import draw_normal

SHAPE = (6, 24, 35)


@pytest.mark.parametrize("block", [1 << 15, 37])
def test_any_slice_has_the_bits_of_the_whole_tensor(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = draw_normal(2**64 - 5, SHAPE, [(0, length) for length in SHAPE])
    monkeypatch.setattr(indexed_normal, "BLOCK", block)
    choose = torch.Generator().manual_seed(1)
    for _ in range(60):
        region, expected = [], whole
        for dim, length in enumerate(SHAPE):
            begin = int(torch.randint(0, length + 1, (1,), generator=choose))
            size = int(torch.randint(0, length - begin + 1, (1,), generator=choose))
            begin, size = (
                (0, length)
                if int(torch.randint(0, 3, (1,), generator=choose)) == 0
                else (begin, size)
            )
            region.append((begin, size))
            expected = expected.narrow(dim, begin, size)
        assert torch.equal(draw_normal(2**64 - 5, SHAPE, region), expected), region


def test_one_number_equals_the_formula() -> None:
    index, key, mask = 5, 2**63 + 11, 2**64 - 1
    bits = (index * 0x9E3779B97F4A7C15 + key) & mask
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & mask
    bits ^= bits >> 31
    radius = math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
    expected = radius * math.cos(2 * math.pi * (bits & 0xFFFFFFFF) / 2**32)
    found = draw_normal(key, (4, 3), [(1, 1), (2, 1)])
    assert found.shape == (1, 1)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_numbers_are_standard_normal_and_those_of_another_key_are_independent() -> None:
    size = 1 << 19
    one, other = (draw_normal(key, (size,), [(0, size)]).double() for key in (3, 4))
    deviation = size**-0.5
    assert abs(float(one.mean())) < 5 * deviation
    assert abs(float(one.var()) - 1) < 5 * deviation * math.sqrt(2)
    assert abs(float((one**4).mean()) - 3) < 5 * deviation * math.sqrt(96)
    for pair in ((one, other), (one[1:], one[:-1]), (one[4096:], one[:-4096])):
        assert abs(float((pair[0] * pair[1]).mean())) < 5 * deviation
    # Kolmogorov and Smirnov: the largest distance from the normal distribution, times the root of
    # the draws.
    places = torch.arange(1, size + 1) / size
    distance = (0.5 * (1 + torch.erf(one.sort().values / math.sqrt(2))) - places).abs().max()
    assert float(distance) * math.sqrt(size) < 1.9

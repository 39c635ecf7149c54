"""Normal random numbers by index: element i of a tensor is a function of (key, i) alone.

A rank draws its slice of a tensor and nothing else, whatever the slice is.

Invariants:
- Numbers are computed in float64 and rounded once, so that they do not depend on the size or the
  place of a slice.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that one thread computes at once: they stay in its cache.
BLOCK = 1 << 15


def draw_normal(key: int, shape: Sequence[int], region: Sequence[tuple[int, int]]) -> Tensor:
    """Draw a slice of a tensor of standard normal numbers.

    Two uniform numbers of 32 bits from splitmix64 (Steele, Lea, Flood 2014) of the index, then Box
    and Muller 1958.

    Args:
        key: Identifies the tensor, 64 bits.
        shape: Shape of the full tensor.
        region: (first index, size) of the slice in each dim.

    Returns:
        The slice, float32 on the CPU.
    """
    sizes = [size for _, size in region]
    drawn = torch.empty(sizes)
    flat = drawn.view(-1)
    total = drawn.numel()
    steps = _join_dims(shape, region)
    block = BLOCK * torch.get_num_threads()
    for begin in range(0, total, block):
        places = torch.arange(begin, min(begin + block, total))
        flat[begin : begin + block] = _compute_normal(_compute_indices(places, steps), key)
    return drawn


def _join_dims(
    shape: Sequence[int], region: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return (first index, size, stride) of the dims of a slice, last dim first; whole dims are
    joined to the next.
    """
    steps: list[tuple[int, int, int]] = []
    stride = 1
    is_whole = False
    for length, (begin, size) in zip(reversed(shape), reversed(region), strict=True):
        if is_whole:
            _, inner, inner_stride = steps.pop()
            steps.append((begin * inner, size * inner, inner_stride))
        else:
            steps.append((begin, size, stride))
        stride = stride * length
        is_whole = (begin, size) == (0, length)
    return steps


def _compute_indices(places: Tensor, steps: list[tuple[int, int, int]]) -> Tensor:
    """Return the index in the full tensor of each place in the slice. `steps` begin with the
    last dim.
    """
    if len(steps) == 1:
        return places + steps[0][0]
    indices = torch.zeros_like(places)
    rest = places
    for begin, size, stride in steps:
        indices += (rest % size + begin) * stride
        rest = rest // size
    return indices


def _compute_normal(indices: Tensor, key: int) -> Tensor:
    bits = _hash_splitmix64(indices, key)
    # Half a step above zero, whose logarithm is infinite.
    radius = _shift_right(bits, 32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = (bits & 0xFFFFFFFF).double().mul_(2 * math.pi * 2.0**-32)
    return radius.mul_(angle.cos_()).float()


def _hash_splitmix64(indices: Tensor, key: int) -> Tensor:
    """Return splitmix64's output number `indices`; int64 products wrap, as unsigned ones do."""
    bits = indices * _to_signed(0x9E3779B97F4A7C15) + _to_signed(key)
    for places, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shift_right(bits, places)).mul_(_to_signed(factor))
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift in zeros; torch shifts in the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number & (1 << 63) else number

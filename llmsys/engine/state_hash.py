"""A 128-bit hash of a training state: equal for equal bits, under any engine and layout.

Each rank hashes the slices it holds; only hashes are sent. The hash of a tensor is the sum, modulo
2⁶⁴, of each element's bits mixed with its index in the full tensor, twice with different mixing. A
sum does not depend on who adds which slice. It detects corruption, not adversaries.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.engine.engine import EngineState
from llmsys.errors import LlmsysError
from llmsys.parallel.process_group import get_world_size

# Elements hashed at a time: 512 KiB of 64-bit words, which stay in cache.
PIECE = 1 << 16

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Shape = tuple[int, ...]
# (offset, shape) of a slice in the full tensor.
SliceLocation = tuple[Shape, Shape]
Sums = tuple[int, int]


def hash_state(state: EngineState) -> str:
    """Hash all tensors of a state and its number of steps. Collective.

    Args:
        state: From `Engine.get_state`.

    Returns:
        32 hexadecimal digits, equal on every rank.

    Raises:
        LlmsysError: Two ranks hold the same slice of a tensor with different bits.
    """
    # Keys have all that is hashed: in a pipeline a rank does not hold the tensors of other stages.
    mine = {
        f"{name} {tuple(tensor.shape)} {tensor.dtype}": hash_slice(tensor)
        for name, tensor in state.tensors.items()
    }
    combined = hashlib.blake2b(f"steps {state.steps}".encode(), digest_size=16)
    for key, (first, second) in sorted(_sum_tensors(_gather_from_ranks(mine)).items()):
        combined.update(f"\n{key} {first:016x} {second:016x}".encode())
    return combined.hexdigest()


@torch.no_grad()
def hash_slice(tensor: Tensor) -> tuple[SliceLocation, Sums]:
    """Hash the part of a tensor that this rank holds.

    Args:
        tensor: A DTensor, or a plain tensor as its own full tensor; elements of one to eight bytes.

    Returns:
        The location of the slice in the full tensor, and the two sums over its elements.
    """
    local = tensor
    offset = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    words = local.contiguous().view(-1).view(WORDS[local.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE].long()
        indices = torch.arange(start, start + len(piece), device=piece.device)
        sums += _mix_words(
            piece,
            _compute_global_positions(
                indices, tuple(local.shape), tuple(offset), tuple(tensor.shape)
            ),
        )
    first, second = (number % 2**64 for number in sums.tolist())
    return (tuple(offset), tuple(local.shape)), (first, second)


def _mix_words(words: Tensor, indices: Tensor) -> Tensor:
    """Return two sums over elements of 64 well-mixed bits each; the finalizer of splitmix64
    (Steele 2014).
    """
    x = indices.mul_(-0x61C8864680B583EB).bitwise_xor_(words)  # constants as signed 64-bit integers
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x.bitwise_xor_(_shift_right(x, shift)).mul_(factor)
    first = x.bitwise_xor_(_shift_right(x, 31)).sum()
    second = (
        x.mul_(-0x395B586CA42E166B)
        .bitwise_xor_(_shift_right(x, 33))
        .mul_(-0x61C8864680B583EB)
        .sum()
    )
    return torch.stack([first, second])


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Return a logical right shift, which fills with zeros also for negative numbers."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _compute_global_positions(
    indices: Tensor, shape: Shape, offset: Shape, full_shape: Shape
) -> Tensor:
    """Convert row-major indices in a slice to indices in the full tensor."""
    if shape[1:] == full_shape[1:]:  # only rows are cut, or nothing
        return indices.add_(math.prod(full_shape[1:]) * sum(offset[:1]))
    global_indices = torch.zeros_like(indices)
    for dim in reversed(range(len(shape))):
        global_indices.add_(
            indices % shape[dim] + offset[dim], alpha=math.prod(full_shape[dim + 1 :])
        )
        indices = indices // shape[dim]
    return global_indices


def _gather_from_ranks(
    mine: dict[str, tuple[SliceLocation, Sums]],
) -> list[dict[str, tuple[SliceLocation, Sums]]]:
    by_rank = [mine] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(by_rank, mine)
    return by_rank


def _sum_tensors(by_rank: list[dict[str, tuple[SliceLocation, Sums]]]) -> dict[str, Sums]:
    """Return the sums of full tensors: each slice counts once, however many ranks hold it."""
    slices: dict[str, dict[int, tuple[SliceLocation, Sums]]] = defaultdict(dict)
    for rank, digests in enumerate(by_rank):
        for key, found in digests.items():
            slices[key][rank] = found
    return {key: _sum_slices(key.split()[0], found) for key, found in slices.items()}


def _sum_slices(name: str, slices: dict[int, tuple[SliceLocation, Sums]]) -> Sums:
    known: dict[SliceLocation, tuple[int, Sums]] = {}
    for rank, (location, sums) in slices.items():
        holder, expected = known.setdefault(location, (rank, sums))
        if sums != expected and 0 not in location[1]:  # empty slices have no bits to compare
            raise LlmsysError(
                f"{name}: ranks {holder} and {rank} hold the same shard with different bits, but "
                "replicas must be equal. Resume from the last checkpoint; if it happens again, "
                "check the memory of both machines."
            )
    return _add_sums(sums for _, sums in known.values())


def _add_sums(all_sums: Iterable[Sums]) -> Sums:
    columns: Iterator[tuple[int, ...]] = zip(*all_sums, strict=True)
    first, second = (sum(column) % 2**64 for column in columns)
    return first, second

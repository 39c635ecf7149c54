"""One number for a whole training state: equal for equal bits, whatever the engine, however tensors are shared out.

Each rank digests the slices it holds, where they lie; only the digests travel. The digest of a tensor is the sum,
modulo 2⁶⁴, of each element's bits mixed with its place in the whole tensor. A sum does not care who adds which part, so
a tensor has one digest under every layout. It finds accidents, not adversaries: two such sums are taken, 128 bits.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.engine.engine import EngineState
from llmsys.errors import LlmsysError
from llmsys.parallel.process_group import get_world_size

PIECE = 1 << 16
"""Elements that are mixed at a time: 512 KiB of 64-bit words, which stay in cache."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Shape = tuple[int, ...]
Place = tuple[Shape, Shape]
"""(offset, shape) of a slice in the whole tensor."""
Sums = tuple[int, int]


def hash_state(state: EngineState) -> str:
    """32 hexadecimal digits for all tensors of a state and its number of steps. Collective.

    Raises LlmsysError when two ranks hold the same slice of a tensor with different bits.
    """
    mine = {name: hash_slice(tensor) for name, tensor in state.tensors.items()}
    whole = hashlib.blake2b(f"steps {state.steps}".encode(), digest_size=16)
    for name, (first, second) in sorted(_sum_tensors(_gather_from_ranks(mine)).items()):
        tensor = state.tensors[name]
        whole.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype} {first:016x} {second:016x}".encode())
    return whole.hexdigest()


@torch.no_grad()
def hash_slice(tensor: Tensor) -> tuple[Place, Sums]:
    """Where this rank's slice of a tensor lies in the whole, and the two sums over its elements."""
    local, offset = tensor, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    words = local.contiguous().view(-1).view(WORDS[local.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE].long()
        places = torch.arange(start, start + len(piece), device=piece.device)
        sums += _mix_words(
            piece, _compute_global_positions(places, tuple(local.shape), tuple(offset), tuple(tensor.shape))
        )
    first, second = (number % 2**64 for number in sums.tolist())
    return (tuple(offset), tuple(local.shape)), (first, second)


def _mix_words(words: Tensor, places: Tensor) -> Tensor:
    """Two sums over elements of 64 well-mixed bits each; the finalizer of splitmix64 (Steele 2014)."""
    x = places.mul_(-0x61C8864680B583EB).bitwise_xor_(words)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x.bitwise_xor_(_shift_right(x, shift)).mul_(factor)
    first = x.bitwise_xor_(_shift_right(x, 31)).sum()
    second = x.mul_(-0x395B586CA42E166B).bitwise_xor_(_shift_right(x, 33)).mul_(-0x61C8864680B583EB).sum()
    return torch.stack([first, second])


def _shift_right(x: Tensor, by: int) -> Tensor:
    """A right shift that brings in zeros, also for numbers that count as negative."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _compute_global_positions(places: Tensor, shape: Shape, offset: Shape, whole: Shape) -> Tensor:
    """From places in a slice, counted row by row, to places in the whole tensor."""
    if shape[1:] == whole[1:]:  # only rows are cut, or nothing
        return places.add_(math.prod(whole[1:]) * sum(offset[:1]))
    found = torch.zeros_like(places)
    for dim in reversed(range(len(shape))):
        found.add_(places % shape[dim] + offset[dim], alpha=math.prod(whole[dim + 1 :]))
        places = places // shape[dim]
    return found


def _gather_from_ranks(mine: dict[str, tuple[Place, Sums]]) -> list[dict[str, tuple[Place, Sums]]]:
    found = [mine] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(found, mine)
    return found


def _sum_tensors(by_rank: list[dict[str, tuple[Place, Sums]]]) -> dict[str, Sums]:
    """The sums of whole tensors: each slice counts once, however many ranks hold it."""
    return {name: _sum_slices(name, [digests[name] for digests in by_rank]) for name in by_rank[0]}


def _sum_slices(name: str, slices: list[tuple[Place, Sums]]) -> Sums:
    known: dict[Place, tuple[int, Sums]] = {}
    for number, (place, sums) in enumerate(slices):
        holder, expected = known.setdefault(place, (number, sums))
        if sums != expected and 0 not in place[1]:
            raise LlmsysError(
                f"{name}: ranks {holder} and {number} hold the same part with different bits. Copies of one part must "
                f"be equal: resume from the last checkpoint, and check the memory of both machines if it happens again."
            )
    return _add_sums(sums for _, sums in known.values())


def _add_sums(all_sums: Iterable[Sums]) -> Sums:
    columns: Iterator[tuple[int, ...]] = zip(*all_sums, strict=True)
    first, second = (sum(column) % 2**64 for column in columns)
    return first, second

"""Functions of whole matrices over matrices that are split between ranks.

Reads local parts (DTensors), gives the same parts of the results. Rows split over R ranks are dealt: each matrix
travels to one rank, is worked on there and travels back, so no matrix is worked on twice and every rank receives about
as much as it holds. Two all-to-alls for a whole model, however many matrices it has.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llmsys.parallel.dtensor_slices import get_local_slice

Function = Callable[[Tensor], Tensor]

# R ranks of a shard axis, M rows of a matrix, N columns


def map_full_matrices(parts: Sequence[Tensor], function: Function) -> list[Tensor]:
    """`function` of each whole matrix; gives parts laid out as those that came. Collective.

    Stacks split along their first dim hold whole matrices and need nobody. Matrices split along two axes (tensor
    parallel and FSDP) are gathered on every rank, which repeats the work there.
    """
    results: list[Tensor | None] = [None] * len(parts)
    dealt: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        axis = _find_row_axis(part)
        if not isinstance(part, DTensor) or (axis is None and _has_full_matrices(part)):
            results[place] = _apply_locally(part, function)
        elif axis is not None:
            dealt[part.device_mesh, axis].append(place)
        else:
            results[place] = _to_dtensor_like(get_local_slice(function(part.full_tensor()), part), part)
    for (mesh, axis), places in dealt.items():
        members = [parts[place] for place in places]
        made = _apply_on_owners(members, function, mesh.get_group(axis))  # type: ignore[arg-type]
        for place, local, part in zip(places, made, members, strict=True):
            results[place] = _to_dtensor_like(local, part)
    return [result for result in results if result is not None]


def _has_full_matrices(part: Tensor) -> bool:
    """Whether the local part consists of whole matrices: nothing is split, or only the stack is."""
    assert isinstance(part, DTensor)
    return all(p.is_replicate() or (part.ndim > 2 and p.is_shard(0)) for p in part.placements)


def _find_row_axis(part: Tensor) -> int | None:
    """The mesh axis over which the rows of a matrix are split, if that is the only split."""
    if not isinstance(part, DTensor) or part.ndim != 2:
        return None
    split = [axis for axis, placement in enumerate(part.placements) if not placement.is_replicate()]
    plain = len(split) == 1 and type(part.placements[split[0]]) is Shard and part.placements[split[0]].is_shard(0)
    return split[0] if plain and part.device_mesh.size(split[0]) > 1 else None


def _apply_locally(part: Tensor, function: Function) -> Tensor:
    local = part.to_local() if isinstance(part, DTensor) else part
    made = function(local) if local.numel() else local
    return _to_dtensor_like(made, part)


def _to_dtensor_like(local: Tensor, part: Tensor) -> Tensor:
    if not isinstance(part, DTensor):
        return local
    return DTensor.from_local(
        local, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )


def _apply_on_owners(parts: Sequence[DTensor], function: Function, group: dist.ProcessGroup) -> list[Tensor]:
    """Each matrix goes to its owner and comes back; the local parts of the results, in the order of `parts`."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    owners = assign_matrices([part.shape for part in parts], ranks)
    mine = [place for place, owner in enumerate(owners) if owner == own]
    order = sorted(range(len(parts)), key=lambda place: (owners[place], place))
    locals_ = [part.to_local() for part in parts]
    send = [sum(locals_[place].numel() for place in order if owners[place] == r) for r in range(ranks)]
    rows_of = [[_count_rows(parts[place].shape[0], ranks, r) for place in mine] for r in range(ranks)]
    widths = [parts[place].shape[1] for place in mine]
    receive = [sum(m * n for m, n in zip(rows, widths, strict=True)) for rows in rows_of]
    leaving = torch.cat([locals_[place].reshape(-1) for place in order])
    arrived = leaving.new_empty(sum(receive))
    dist.all_to_all_single(arrived, leaving, receive, send, group=group)
    pieces_RK = [_split_block(block, rows, widths) for block, rows in zip(arrived.split(receive), rows_of, strict=True)]
    made = [function(torch.cat([pieces[k] for pieces in pieces_RK])) for k in range(len(mine))]
    cut_RK = zip(*(whole.split([rows[k] for rows in rows_of]) for k, whole in enumerate(made)), strict=True)
    back = [piece.reshape(-1) for pieces in cut_RK for piece in pieces]
    returned = torch.empty_like(leaving)
    dist.all_to_all_single(returned, torch.cat(back) if back else arrived, send, receive, group=group)
    results = returned.split([locals_[place].numel() for place in order])
    by_place = {place: result.view_as(locals_[place]) for place, result in zip(order, results, strict=True)}
    return [by_place[place] for place in range(len(parts))]


def _split_block(block: Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    sizes = [m * n for m, n in zip(rows, widths, strict=True)]
    return [piece.view(m, n) for piece, m, n in zip(block.split(sizes), rows, widths, strict=True)]


def _count_rows(total: int, ranks: int, rank: int) -> int:
    """Rows of a rank under Shard(0): equal parts rounded up, the last ones shorter or empty."""
    per_rank = -(-total // ranks)
    return max(0, min(total, (rank + 1) * per_rank) - rank * per_rank)


def assign_matrices(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """The owner of each matrix: the largest first, each to the rank with the least work; the same on every rank."""
    work = [0] * ranks
    owners = [0] * len(shapes)
    cost = [min(shape) ** 2 * max(shape) for shape in shapes]
    for place in sorted(range(len(shapes)), key=lambda place: (-cost[place], place)):
        owner = min(range(ranks), key=lambda r: (work[r], r))
        owners[place], work[owner] = owner, work[owner] + cost[place]
    return owners

"""Functions of full matrices over matrices that are sharded by rows.

Reads and writes local shards (DTensors). Each matrix is sent to one rank, processed there and sent back, so that no
work is repeated and every rank receives about as much as it holds: two all-to-alls for a whole model.
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
    """Apply `function` to each full matrix. Collective.

    Stacks sharded along their first dim hold full matrices and need no communication. Matrices sharded over two axes
    (tensor parallel and FSDP) are gathered on every rank, which repeats the work there.

    Args:
        parts: Shards of matrices: DTensors, or plain full matrices.
        function: Maps a full matrix, or a stack of them, to one of the same shape.

    Returns:
        The results, sharded as the inputs.
    """
    results: list[Tensor | None] = [None] * len(parts)
    by_axis: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        axis = _find_row_axis(part)
        if not isinstance(part, DTensor) or (axis is None and _has_full_matrices(part)):
            results[index] = _apply_locally(part, function)
        elif axis is not None:
            by_axis[part.device_mesh, axis].append(index)
        else:
            results[index] = _to_dtensor_like(get_local_slice(function(part.full_tensor()), part), part)
    for (mesh, axis), indices in by_axis.items():
        members = [parts[index] for index in indices]
        locals_ = _apply_on_owners(members, function, mesh.get_group(axis))  # type: ignore[arg-type]
        for index, local, part in zip(indices, locals_, members, strict=True):
            results[index] = _to_dtensor_like(local, part)
    return [result for result in results if result is not None]


def _has_full_matrices(part: Tensor) -> bool:
    """Return whether the local shard consists of full matrices: nothing is sharded, or only the stack is."""
    assert isinstance(part, DTensor)
    return all(p.is_replicate() or (part.ndim > 2 and p.is_shard(0)) for p in part.placements)


def _find_row_axis(part: Tensor) -> int | None:
    """Return the mesh axis that shards the rows of a matrix, if nothing else is sharded."""
    if not isinstance(part, DTensor) or part.ndim != 2:
        return None
    split = [axis for axis, placement in enumerate(part.placements) if not placement.is_replicate()]
    plain = len(split) == 1 and type(part.placements[split[0]]) is Shard and part.placements[split[0]].is_shard(0)
    return split[0] if plain and part.device_mesh.size(split[0]) > 1 else None


def _apply_locally(part: Tensor, function: Function) -> Tensor:
    local = part.to_local() if isinstance(part, DTensor) else part
    return _to_dtensor_like(function(local) if local.numel() else local, part)


def _to_dtensor_like(local: Tensor, part: Tensor) -> Tensor:
    if not isinstance(part, DTensor):
        return local
    return DTensor.from_local(
        local, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )


def _apply_on_owners(parts: Sequence[DTensor], function: Function, group: dist.ProcessGroup) -> list[Tensor]:
    """Send each matrix to its owner and back; return the local shards of the results, in the order of `parts`."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    owners = assign_matrices([part.shape for part in parts], ranks)
    mine = [index for index, owner in enumerate(owners) if owner == own]
    order = sorted(range(len(parts)), key=lambda index: (owners[index], index))
    locals_ = [part.to_local() for part in parts]
    send = [sum(locals_[index].numel() for index in order if owners[index] == r) for r in range(ranks)]
    rows_by_rank = [[_count_rows(parts[index].shape[0], ranks, r) for index in mine] for r in range(ranks)]
    widths = [parts[index].shape[1] for index in mine]
    receive = [sum(m * n for m, n in zip(rows, widths, strict=True)) for rows in rows_by_rank]
    sent = torch.cat([locals_[index].reshape(-1) for index in order])
    received = sent.new_empty(sum(receive))
    dist.all_to_all_single(received, sent, receive, send, group=group)
    blocks = zip(received.split(receive), rows_by_rank, strict=True)
    pieces_RK = [_split_block(block, rows, widths) for block, rows in blocks]
    full = [function(torch.cat([pieces[k] for pieces in pieces_RK])) for k in range(len(mine))]
    cut_RK = zip(*(matrix.split([rows[k] for rows in rows_by_rank]) for k, matrix in enumerate(full)), strict=True)
    back = [piece.reshape(-1) for pieces in cut_RK for piece in pieces]
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, torch.cat(back) if back else received, send, receive, group=group)
    results = returned.split([locals_[index].numel() for index in order])
    by_index = {index: result.view_as(locals_[index]) for index, result in zip(order, results, strict=True)}
    return [by_index[index] for index in range(len(parts))]


def _split_block(block: Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    sizes = [m * n for m, n in zip(rows, widths, strict=True)]
    return [piece.view(m, n) for piece, m, n in zip(block.split(sizes), rows, widths, strict=True)]


def _count_rows(total: int, ranks: int, rank: int) -> int:
    """Count the rows of a rank under Shard(0): equal shards rounded up, the last ones shorter or empty."""
    per_rank = -(-total // ranks)
    return max(0, min(total, (rank + 1) * per_rank) - rank * per_rank)


def assign_matrices(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Assign each matrix to a rank: the largest first, each to the rank with the least work; the same on every rank."""
    work = [0] * ranks
    owners = [0] * len(shapes)
    # FLOPs of a Newton-Schulz step, up to a factor.
    cost = [min(shape) ** 2 * max(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: (-cost[index], index)):
        owner = min(range(ranks), key=lambda r: (work[r], r))
        owners[index], work[owner] = owner, work[owner] + cost[index]
    return owners

"""Functions of full matrices over matrices that are sharded by rows or columns.

Reads and writes local shards (DTensors). Each matrix is sent to one rank, processed there and sent
back, so that no work is repeated and every rank receives about as much as it holds: two all-to-alls
for a whole model.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llmsys.parallel.dtensor_slices import get_local_slice, has_full_matrices, is_stack_divided

Function = Callable[[Tensor], Tensor]

# R ranks of a shard axis, M rows of a matrix, N columns


class _RowShard(NamedTuple):
    """This rank's rows of one matrix of `num_rows` rows."""

    local: Tensor
    num_rows: int


def map_full_matrices(parts: Sequence[Tensor], function: Function) -> list[Tensor]:
    """Apply `function` to each full matrix. Collective.

    Stacks sharded along their first dim hold full matrices and need no communication. Matrices
    sharded over two axes (tensor parallel and FSDP) are gathered on every rank, which repeats the
    work there.

    Args:
        parts: Shards of matrices: DTensors, or plain full matrices.
        function: Maps a full matrix, or a stack of them, to one of the same shape; commutes with
            transposition.

    Returns:
        The results, sharded as the inputs.
    """
    results: list[Tensor | None] = [None] * len(parts)
    by_axis: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        axis = _find_split_axis(part)
        if not isinstance(part, DTensor) or (axis is None and has_full_matrices(part)):
            results[index] = _apply_locally(part, function)
        elif axis is not None:
            by_axis[part.device_mesh, axis].append(index)
        else:
            # Copied: a view would keep every full result until the last one is there.
            results[index] = _to_dtensor_like(
                get_local_slice(function(part.full_tensor()), part).clone(), part
            )
    for (mesh, axis), indices in by_axis.items():
        members = [parts[index] for index in indices]
        shards = [_list_row_shards(part, axis) for part in members]  # type: ignore[arg-type]
        # One exchange for all matrices of an axis: latency counts, and owners are balanced over all
        # of them.
        mapped = iter(
            _apply_on_owners(
                [shard for each in shards for shard in each], function, mesh.get_group(axis)
            )
        )
        for index, part, each in zip(indices, members, shards, strict=True):
            locals_ = [next(mapped) for _ in each]
            results[index] = _to_dtensor_like(_join_row_shards(locals_, part, axis), part)  # type: ignore[arg-type]
    return [result for result in results if result is not None]


def _find_split_axis(part: Tensor) -> int | None:
    """Return the mesh axis that splits matrices: a matrix by rows, or every matrix of a stack. None
    if there are more.

    An axis that shards the stack leaves its matrices full.
    """
    if not isinstance(part, DTensor):
        return None
    split = [
        axis
        for axis, placement in enumerate(part.placements)
        if not placement.is_replicate() and not (part.ndim == 3 and is_stack_divided(placement))
    ]
    # A `_StridedShard` holds rows that are not adjacent.
    plain = len(split) == 1 and type(part.placements[split[0]]) is Shard
    if not plain or part.device_mesh.size(split[0]) == 1:
        return None
    return (
        split[0]
        if part.ndim == 3 or (part.ndim == 2 and part.placements[split[0]].is_shard(0))
        else None
    )


def _list_row_shards(part: DTensor, axis: int) -> list[_RowShard]:
    """List this rank's rows of each matrix; columns, where those are split, as rows of the
    transposed matrix.
    """
    local = part.to_local()
    placement = part.placements[axis]
    stack = local if local.ndim == 3 else local[None]
    by_columns = placement.is_shard(2)
    num_rows = part.shape[-1] if by_columns else part.shape[-2]
    return [_RowShard(matrix.T if by_columns else matrix, num_rows) for matrix in stack.unbind()]


def _join_row_shards(locals_: list[Tensor], part: DTensor, axis: int) -> Tensor:
    """Invert `_list_row_shards`."""
    if part.ndim == 2:
        return locals_[0]
    # torch.stack rejects an empty list, of a rank whose shard of the stack is empty.
    stack = torch.stack(locals_) if locals_ else part.to_local().clone()
    return stack.mT.contiguous() if part.placements[axis].is_shard(2) else stack


def _apply_locally(part: Tensor, function: Function) -> Tensor:
    local = part.to_local() if isinstance(part, DTensor) else part
    # Uneven shards leave some ranks without rows.
    return _to_dtensor_like(function(local) if local.numel() else local, part)


def _to_dtensor_like(local: Tensor, part: Tensor) -> Tensor:
    if not isinstance(part, DTensor):
        return local
    # With the shape: torch would compute it from a local shard, as if all were equal.
    return DTensor.from_local(
        local,
        part.device_mesh,
        part.placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )


def _apply_on_owners(
    parts: Sequence[_RowShard], function: Function, group: dist.ProcessGroup
) -> list[Tensor]:
    """Send each matrix to its owner and back; return the local shards of the results, in the
    order of `parts`.
    """
    ranks = dist.get_world_size(group)
    own = dist.get_rank(group)
    columns = [part.local.shape[1] for part in parts]
    owners = assign_matrices(
        [torch.Size((part.num_rows, n)) for part, n in zip(parts, columns, strict=True)], ranks
    )
    mine = [index for index, owner in enumerate(owners) if owner == own]
    # An all-to-all takes its input in the order of the receivers.
    order = sorted(range(len(parts)), key=lambda index: (owners[index], index))
    locals_ = [part.local for part in parts]
    send = [
        sum(locals_[index].numel() for index in order if owners[index] == r) for r in range(ranks)
    ]
    rows_by_rank = [
        [_count_rows(parts[index].num_rows, ranks, r) for index in mine] for r in range(ranks)
    ]
    widths = [columns[index] for index in mine]
    receive = [sum(m * n for m, n in zip(rows, widths, strict=True)) for rows in rows_by_rank]
    sent = torch.cat([locals_[index].reshape(-1) for index in order])
    received = sent.new_empty(sum(receive))
    dist.all_to_all_single(received, sent, receive, send, group=group)
    blocks = zip(received.split(receive), rows_by_rank, strict=True)
    pieces_RK = [_split_block(block, rows, widths) for block, rows in blocks]
    full = [function(torch.cat([pieces[k] for pieces in pieces_RK])) for k in range(len(mine))]
    cut_RK = zip(
        *(matrix.split([rows[k] for rows in rows_by_rank]) for k, matrix in enumerate(full)),
        strict=True,
    )
    back = [piece.reshape(-1) for pieces in cut_RK for piece in pieces]
    returned = torch.empty_like(sent)
    # A rank that owns no matrix sends and keeps nothing, but takes part.
    dist.all_to_all_single(
        returned, torch.cat(back) if back else received, send, receive, group=group
    )
    results = returned.split([locals_[index].numel() for index in order])
    by_index = {
        index: result.view_as(locals_[index]) for index, result in zip(order, results, strict=True)
    }
    return [by_index[index] for index in range(len(parts))]


def _split_block(block: Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    sizes = [m * n for m, n in zip(rows, widths, strict=True)]
    return [piece.view(m, n) for piece, m, n in zip(block.split(sizes), rows, widths, strict=True)]


def _count_rows(total: int, ranks: int, rank: int) -> int:
    """Count the rows of a rank under Shard(0): equal shards rounded up, the last ones shorter or
    empty.
    """
    per_rank = -(-total // ranks)
    return max(0, min(total, (rank + 1) * per_rank) - rank * per_rank)


def assign_matrices(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Assign the orthogonalization of each matrix to a rank.

    The largest comes first, each to the rank with the least work so far. The cost of a matrix of
    M × N is min(M, N)² · max(M, N), the FLOPs of a Newton-Schulz step up to a factor.

    Args:
        shapes: Shape of each matrix.
        ranks: Number of ranks.

    Returns:
        The rank of each matrix, the same on every rank.
    """
    work = [0] * ranks
    owners = [0] * len(shapes)
    # FLOPs of a Newton-Schulz step, up to a factor.
    cost = [min(shape) ** 2 * max(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: (-cost[index], index)):
        owner = min(range(ranks), key=lambda r: (work[r], r))
        owners[index] = owner
        work[owner] = work[owner] + cost[index]
    return owners

"""Plan a save by many ranks: each rank plans for itself, and ranks agree who writes what several of
them hold.

torch.distributed.checkpoint gathers the plans of all ranks on rank 0 at every save. Here ranks
exchange 8 bytes per chunk, once, and keep the answer for later saves.

Invariants:
- Every chunk is written by one rank; chunks that several ranks hold are spread over them.
- A plan is a function of names, shapes and layout. It never holds values.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from llmsys.errors import CheckpointError
from llmsys.parallel.control_group import ControlGroup
from llmsys.parallel.process_group import get_rank, get_world_size

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
# Hashes that a rank receives at once: 8 MiB.
CHUNKS_AT_ONCE = 1 << 20
# Weak, so that an answer ends with the group of its saver.
_OWNED: "WeakKeyDictionary[ControlGroup, tuple[bytes, Mask]]" = WeakKeyDictionary()


class RankPlanner(DefaultSavePlanner):
    """Plans the chunks that this rank writes, without other ranks' plans. Construction is
    collective.
    """

    def __init__(self, tensors: dict[str, Tensor], control_group: ControlGroup) -> None:
        """Choose the chunks of `tensors` that this rank writes.

        Raises:
            CheckpointError: the chunks of all ranks do not fill the tensors.
        """
        super().__init__(flatten_state_dict=False)
        items = create_default_local_save_plan(dict(tensors), False).items
        items = [item for item in items if _has_values(item)]
        self._items = [
            item for item, own in zip(items, _find_owned(items, control_group), strict=True) if own
        ]
        _require_full_tensors(self._items, control_group)

    def create_local_plan(self) -> SavePlan:
        """Return the items of this rank."""
        self.plan = SavePlan(self._items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan as it is, and the metadata of this rank alone."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, metadata


def _has_values(item: WriteItem) -> bool:
    """Return whether a chunk is worth an entry. Some ranks hold nothing of a tensor with few
    rows.
    """
    data = item.tensor_data
    return data is None or data.chunk.sizes.numel() > 0 or data.size.numel() == 0


def _find_owned(items: list[WriteItem], control_group: ControlGroup) -> Mask:
    """Return which items this rank writes. Collective; later saves of equal structure reuse the
    answer.
    """
    # NUL separates, because no name has one.
    names = (f"{item.index.fqn}\0{list(item.index.offset or ())}" for item in items)
    hashes = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
    structure = hashes.tobytes()
    known, mask = _OWNED.get(control_group, (b"", np.zeros(0, np.bool_)))
    # All ranks reuse the answer or none does, since the exchange is collective.
    if _reduce_numbers(
        [int(known == structure and len(mask) == len(items))], dist.ReduceOp.MIN, control_group
    )[0]:
        return mask
    owned = np.zeros(len(items), np.bool_)
    most = _reduce_numbers([len(items)], dist.ReduceOp.MAX, control_group)[0]
    # bounds the memory of the exchange
    slices = max(1, -(-most * get_world_size() // CHUNKS_AT_ONCE))
    for number in range(slices):
        rows = np.flatnonzero(hashes % np.uint64(slices) == number)
        gathered = _gather_hashes(hashes[rows], control_group)
        owned[rows] = select_owned(hashes[rows], gathered, get_rank())
    _OWNED[control_group] = structure, owned
    return owned


def select_owned(hashes: Hashes, gathered: list[Hashes], rank: int) -> Mask:
    """Choose one of the ranks that hold a chunk.

    Args:
        hashes: (N,) chunks of this rank.
        gathered: Chunks of every rank, by rank.
        rank: This rank, whose own chunks are among `gathered`.

    Returns:
        (N,) mask of the chunks that this rank writes.
    """
    every = np.concatenate(gathered)
    ranks = np.repeat(np.arange(len(gathered)), [len(each) for each in gathered])
    order = np.argsort(every, kind="stable")  # holders of a chunk stay in the order of ranks
    every = every[order]
    ranks = ranks[order]
    first = np.searchsorted(every, hashes)
    holders = np.searchsorted(every, hashes, side="right") - first
    # The upper half of the hash: the lower bits choose the slice.
    chosen = first + ((hashes >> np.uint64(32)) % holders.astype(np.uint64)).astype(np.int64)
    mask: Mask = ranks[chosen] == rank
    return mask


def _gather_hashes(hashes: Hashes, control_group: ControlGroup) -> list[Hashes]:
    longest = _reduce_numbers([len(hashes)], dist.ReduceOp.MAX, control_group)[0]
    # Collectives take equal sizes, so the number of hashes comes first.
    padded = torch.zeros(longest + 1, dtype=torch.int64)
    padded[0] = len(hashes)
    padded[1 : len(hashes) + 1] = torch.from_numpy(hashes.view(np.int64))
    found = [torch.empty_like(padded) for _ in range(get_world_size())]
    dist.all_gather(found, padded, group=control_group.group)
    return [one[1 : int(one[0]) + 1].numpy().view(np.uint64) for one in found]


def _require_full_tensors(items: list[WriteItem], control_group: ControlGroup) -> None:
    """Raise CheckpointError on every rank if the chunks of all ranks do not fill the tensors.
    Collective.
    """
    chunks = [item.tensor_data for item in items if item.tensor_data is not None]
    written = sum(data.chunk.sizes.numel() for data in chunks)
    # A tensor is counted by the writer of its first chunk.
    whole = sum(data.size.numel() for data in chunks if not any(data.chunk.offsets))
    written, whole = _reduce_numbers([written, whole], dist.ReduceOp.SUM, control_group)
    if written != whole:
        raise CheckpointError(
            f"the ranks hold {written} numbers of tensors with {whole}. Report this with the "
            "layout of the run: a checkpoint of these ranks would not be complete."
        )


def _reduce_numbers(numbers: list[int], operation: Any, control_group: ControlGroup) -> list[int]:
    found = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(found, operation, group=control_group.group)
    return [int(number) for number in found.tolist()]

"""Memory of the pretended device as a log of events: one for each storage that appears, grows,
shrinks or is freed.

Peak, composition and timeline are replays of the log, so that recording costs the same for any
number of tensors.

Invariants:
- The bytes of a storage are rounded up to blocks of 512 as CUDA's caching allocator does.
- A storage is counted once, whatever number of tensors view it.
"""

import weakref
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 512


class Allocation(NamedTuple):
    """A kind of storage.

    Attributes:
        category: what it is for, such as `gathered weights`.
        owner: the module, phase or operation that made it.
        tensor: number type and shape of the first tensor.
    """

    category: str
    owner: str
    tensor: str


class _LiveStorage:
    """Bytes of a storage, its kind, and its events in the log."""

    __slots__ = ("bytes", "events", "kind")

    def __init__(self, kind: int) -> None:
        self.bytes = 0
        self.kind = kind
        self.events = array("q")


class MemoryTracker:
    """The event log of one device."""

    def __init__(self) -> None:
        self._changes = array("q")
        self._kinds = array("i")
        self._allocations: list[Allocation] = []
        self._numbers: dict[Allocation, int] = {}
        self._live: dict[int, _LiveStorage] = {}
        self.marks: list[tuple[int, str]] = []
        """(number of events before it, phase) of each phase, in order."""
        self.is_closed = False
        """Set where the log has ended: nothing is recorded any more."""

    @property
    def num_events(self) -> int:
        """Events so far."""
        return len(self._changes)

    @property
    def live_bytes(self) -> int:
        """Bytes in use now."""
        return sum(one.bytes for one in self._live.values())

    def mark_phase(self, phase: str) -> None:
        """Begin a phase of the timeline."""
        self.marks.append((len(self._changes), phase))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is in the log with its present size."""
        storage = tensor.untyped_storage()
        live = self._live.get(storage._cdata)
        return live is not None and live.bytes == _round_bytes(storage.nbytes())

    def record(self, tensor: Tensor, category: str, owner: str) -> None:
        """Record the storage of a tensor, if it is new or has another size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        live = self._live.get(key)
        if live is None:
            shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            live = self._live[key] = _LiveStorage(self._number(Allocation(category, owner, shape)))
            # At the end of the process nobody reads the log any more.
            weakref.finalize(storage, self._drop_storage, key).atexit = False
        self._record_size(live, _round_bytes(storage.nbytes()))

    def record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage that was resized in place, as FSDP does with gathered
        weights.
        """
        live = self._live.get(storage._cdata)
        if live is not None:
            self._record_size(live, _round_bytes(storage.nbytes()))

    def set_category(self, tensors: Iterable[Tensor], category: str, owner: str = "") -> None:
        """Give storages another category from their first event on; an empty owner keeps theirs."""
        for tensor in tensors:
            if live := self._live.get(tensor.untyped_storage()._cdata):
                self._change_kind(live, category, owner)

    def set_live_category(self, first_event: int, old_category: str, category: str) -> None:
        """Give another category to storages that are in use.

        Args:
            first_event: Only storages that appeared at or after this event.
            old_category: Only storages of this category.
            category: Their new category.
        """
        for live in self._live.values():
            old = self._allocations[live.kind]
            if old.category == old_category and live.events and live.events[0] >= first_event:
                self._change_kind(live, category, "")

    def list_live(self, categories: Collection[str]) -> list[Allocation]:
        """List the kinds of storages that are in use now.

        Args:
            categories: Of these categories alone.

        Returns:
            One entry for each storage.
        """
        kinds = (self._allocations[one.kind] for one in self._live.values() if one.bytes)
        return [kind for kind in kinds if kind.category in categories]

    def find_peak(self, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """Return the largest total in bytes after an event in [first, last), and the number of
        the last such event.
        """
        total = sum(self._changes[:first])
        peak = total
        at = max(first - 1, 0)
        for event in range(first, len(self._changes) if last is None else last):
            total += self._changes[event]
            if total >= peak:
                peak = total
                at = event
        return peak, at

    def find_share(self, first: int, last: int, category: str, share: float) -> int:
        """Return the event in [first, last) at which a category falls to a share of its bytes
        before `first`.
        """
        numbers = {
            number for number, one in enumerate(self._allocations) if one.category == category
        }
        changes = list(zip(self._changes[:last], self._kinds[:last], strict=True))
        size = sum(change for change, kind in changes[:first] if kind in numbers)
        goal = share * size
        for event in range(first, last):
            change, kind = changes[event]
            size += change if kind in numbers else 0
            if size <= goal:
                return event
        return last

    def compute_composition(self, event: int) -> Counter[Allocation]:
        """Return the bytes in use after an event, by kind of storage."""
        sums: Counter[int] = Counter()
        for change, kind in zip(self._changes[: event + 1], self._kinds[: event + 1], strict=True):
            sums[kind] += change
        return Counter({self._allocations[kind]: bytes for kind, bytes in sums.items() if bytes})

    def build_timeline(self, max_points: int) -> list[tuple[int, dict[str, int]]]:
        """Return (event, bytes by category) at the fullest event of each of `max_points` equal
        parts of the log.
        """
        if not self._changes:
            return []
        stride = -(-len(self._changes) // max_points)
        categories = [one.category for one in self._allocations]
        points: list[tuple[int, dict[str, int]]] = []
        sums: Counter[str] = Counter()
        total = 0
        best = -1
        for event, (change, kind) in enumerate(zip(self._changes, self._kinds, strict=True)):
            sums[categories[kind]] += change
            total += change
            if event % stride == 0:
                best = -1
                points.append((event, {}))
            if total > best:
                best = total
                points[-1] = (event, {name: size for name, size in sums.items() if size})
        return points

    def get_phase(self, event: int) -> str:
        """Return the phase of an event."""
        return next((name for start, name in reversed(self.marks) if start <= event), "")

    def _record_size(self, live: _LiveStorage, size: int) -> None:
        if size != live.bytes and not self.is_closed:
            live.events.append(len(self._changes))
            self._changes.append(size - live.bytes)
            self._kinds.append(live.kind)
            live.bytes = size

    def _drop_storage(self, key: int) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            self._record_size(live, 0)

    def _number(self, allocation: Allocation) -> int:
        if (number := self._numbers.get(allocation)) is None:
            number = self._numbers[allocation] = len(self._allocations)
            self._allocations.append(allocation)
        return number

    def _change_kind(self, live: _LiveStorage, category: str, owner: str) -> None:
        old = self._allocations[live.kind]
        live.kind = self._number(Allocation(category, owner or old.owner, old.tensor))
        for event in live.events:
            self._kinds[event] = live.kind


def _round_bytes(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES

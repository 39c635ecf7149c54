"""Place documents into windows of one length so that few are cut: best fit and first fit.

Best fit takes documents by decreasing length, and the fullest window that has room (Ding 2024,
"Fewer Truncations Improve Language Modeling", arXiv:2404.10830). First fit takes them in their
order, and the first window that has room.

Invariants:
- The result is a function of the sizes, their order and the number of windows.
- Where no window has room, the one with most of it takes the begin of the document, and the rest is
  cropped.
"""

from typing import Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

Packing = Literal["best_fit", "first_fit"]


class Placement(NamedTuple):
    """Window and kept tokens of each document, both (N,) int64; a document of which nothing is
    kept has window -1.
    """

    windows: NDArray[np.int64]
    kept: NDArray[np.int64]


def pack_documents(
    sizes: NDArray[np.int64], length: int, num_windows: int, packing: Packing
) -> Placement:
    """Place documents into windows.

    Args:
        sizes: Tokens of each document, 1 to `length`, (N,).
        length: Tokens of a window.
        num_windows: Number of windows.
        packing: The rule.

    Returns:
        The placement.
    """
    match packing:
        case "best_fit":
            return _pack_best_fit(sizes, length, num_windows)
        case "first_fit":
            return _pack_first_fit(sizes, length, num_windows)
        case unreachable:
            assert_never(unreachable)


def _pack_best_fit(sizes: NDArray[np.int64], length: int, num_windows: int) -> Placement:
    order = np.argsort(-sizes, kind="stable")
    windows = [-1] * len(sizes)
    kept = sizes[order].tolist()
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r is set where a window that is not empty has room for r more tokens
    opened = 0
    for number, size in enumerate(kept):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
        elif opened < num_windows:
            room = length
            by_room[room].append(opened)
            opened += 1
        elif rooms:
            kept[number] = size = room = rooms.bit_length() - 1
        else:
            kept[number] = 0
            continue
        same = by_room[room]
        windows[number] = window = same.pop()
        if not same and room < length:
            rooms ^= 1 << room
        if left := room - size:
            if not by_room[left]:
                rooms |= 1 << left
            by_room[left].append(window)
    placement = Placement(np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64))
    placement.windows[order] = windows
    placement.kept[order] = kept
    return placement


def _pack_first_fit(sizes: NDArray[np.int64], length: int, num_windows: int) -> Placement:
    # A tournament tree: node n has the largest room of its children 2n and 2n + 1; leaves are
    # windows.
    leaves = 1 << (num_windows - 1).bit_length()
    rooms = [0] * leaves + [length] * num_windows + [0] * (leaves - num_windows)
    for node in range(leaves - 1, 0, -1):
        rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    windows = [-1] * len(sizes)
    kept = sizes.tolist()
    for number, size in enumerate(kept):
        kept[number] = size = min(size, rooms[1])
        if not size:
            continue
        node = 1
        while node < leaves:
            node = 2 * node + (rooms[2 * node] < size)
        windows[number] = node - leaves
        rooms[node] -= size
        while node := node >> 1:
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return Placement(np.array(windows, np.int64).reshape(-1), np.array(kept, np.int64).reshape(-1))

"""The split of wide keys in llmsys/model/varlen_kernel.py: two parts whose widths are powers of
two.

Without torch and triton, for the decision table and for the count of FLOPs.
"""

# Queries and keys of a tile; on sm_80 the backward takes 32 queries.
FORWARD_TILE, BACKWARD_TILE = (128, 64), (64, 64)
# On sm_80, where products hold their operands in registers: the whole tile spills 1.4 KiB a thread.
AMPERE_BACKWARD_TILE = (BACKWARD_TILE[0] // 2, BACKWARD_TILE[1])
# Channels of the narrowest matrix that tensor cores multiply, and of the widest head that fits
# shared memory.
MIN_WIDTH, MAX_WIDTH = 16, 256


def split_width(width: int) -> tuple[int, int]:
    """Return the parts of the channels of a key that are multiplied one after the other.

    Args:
        width: Channels of a key, at least 1.

    Returns:
        The largest power of two, and the rest.
    """
    largest = 1 << (width.bit_length() - 1)
    return largest, width - largest


def can_split_keys(qk_width: int, v_width: int) -> bool:
    """Return whether the kernel takes keys of one width and values of another.

    Args:
        qk_width: Channels of a query and of a key.
        v_width: Channels of a value.

    Returns:
        True where the widths differ, keys are a power of two or the sum of two, and values are a
        power of two.
    """
    if qk_width == v_width:  # torch's flash attention
        return False
    parts = [part for part in (*split_width(qk_width), v_width) if part]
    return max(qk_width, v_width) <= MAX_WIDTH and all(
        part >= MIN_WIDTH and part & (part - 1) == 0 for part in parts
    )


def choose_backward_tile(capability: tuple[int, int] | None) -> tuple[int, int]:
    """Return the queries and keys of a tile of the backward.

    Args:
        capability: CUDA compute capability; None on a CPU, by Triton's interpreter.

    Returns:
        Two powers of two.
    """
    return AMPERE_BACKWARD_TILE if capability is not None and capability < (9, 0) else BACKWARD_TILE


def choose_options(capability: tuple[int, int] | None, *, is_backward: bool) -> dict[str, int]:
    """Return the warps of a tile and the tiles that are in shared memory at a time.

    Args:
        capability: CUDA compute capability; None on a CPU, by Triton's interpreter.
        is_backward: Whether the options are those of the backward.

    Returns:
        Options of a Triton kernel. On an H100 a third tile makes the forward 1.30 and the backward
        1.07 times as fast. It does not fit shared memory before sm_90, nor the backward's on
        sm_100.
    """
    fits = capability is not None and (
        capability == (9, 0) if is_backward else capability >= (9, 0)
    )
    return {"num_warps": 8, "num_stages": 3 if fits else 2}

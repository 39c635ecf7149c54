"""The split of wide keys in llmsys/model/varlen_kernel.py: two parts whose widths are powers of two.

Without torch and triton, for the decision table and for the count of FLOPs.
"""

# Queries and keys of a tile; on sm_80 the backward takes 32 queries.
FORWARD_TILE, BACKWARD_TILE = (128, 64), (64, 64)
# Channels of the narrowest matrix that tensor cores multiply, and of the widest head that fits shared memory.
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
        True where the widths differ, keys are a power of two or the sum of two, and values are a power of two.
    """
    if qk_width == v_width:  # torch's flash attention
        return False
    parts = [part for part in (*split_width(qk_width), v_width) if part]
    return max(qk_width, v_width) <= MAX_WIDTH and all(part >= MIN_WIDTH and part & (part - 1) == 0 for part in parts)

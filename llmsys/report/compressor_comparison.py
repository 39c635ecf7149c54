"""Describe the amount of held-out text in a comparison of a model with compressors."""

# With fewer bytes, compressors have not adapted to the text, and a single document dominates.
MIN_HELDOUT_BYTES = 50_000


def is_heldout_too_small(heldout_bytes: float) -> bool:
    """Return True when the held-out text is too short to compare a model with compressors.

    Args:
        heldout_bytes: UTF-8 bytes of the held-out text.

    Returns:
        True below `MIN_HELDOUT_BYTES`.
    """
    return heldout_bytes < MIN_HELDOUT_BYTES


def describe_heldout_bytes(heldout_bytes: float | None) -> str:
    """Return the number of bytes compared, with a remark when they are too few.

    Args:
        heldout_bytes: UTF-8 bytes of the held-out text. None when the number is unknown.

    Returns:
        A phrase such as `on 80,000 held-out bytes`.
    """
    if heldout_bytes is None:
        return "on an unknown number of held-out bytes"
    few = (
        f", too few for a comparison (less than {MIN_HELDOUT_BYTES:,})"
        if is_heldout_too_small(heldout_bytes)
        else ""
    )
    return f"on {int(heldout_bytes):,} held-out bytes{few}"

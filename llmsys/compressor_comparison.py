"""How much held-back text a comparison with a compressor was made on, said the same way wherever one is printed."""

MIN_HELDOUT_BYTES = 50_000
"""With less, a compressor has hardly begun to learn the text, and one document decides."""


def is_heldout_too_small(heldout_bytes: float) -> bool:
    """Whether the held-back text is too short to compare a model with compressors."""
    return heldout_bytes < MIN_HELDOUT_BYTES


def describe_heldout_bytes(heldout_bytes: float | None) -> str:
    """Return the number of bytes compared, and that they are too few where they are."""
    if heldout_bytes is None:
        return "on an unknown number of held-back bytes"
    few = f", too few to compare (less than {MIN_HELDOUT_BYTES:,})" if is_heldout_too_small(heldout_bytes) else ""
    return f"on {int(heldout_bytes):,} held-back bytes{few}"

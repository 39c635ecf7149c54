"""Whether a record is what its WARC header says: block and payload digests (ISO 28500, 5.8 and 5.9).

Reads the bytes of a record, gives "" or what differs. A digest of an algorithm or a form that nobody knows proves
nothing and passes. Writers disagree about what the payload of a coded HTTP body is, so that its digest may be that of
the body as stored, without its transfer coding, or without both codings.
"""

import hashlib
from collections.abc import Iterable

_KNOWN = {"sha1": "sha1", "sha-1": "sha1", "md5": "md5", "sha256": "sha256", "sha-256": "sha256", "sha512": "sha512"}
_SIZES = {"sha1": 20, "md5": 16, "sha256": 32, "sha512": 64}  # bytes
_BASE32 = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789abcdefghijklmnopqrstuv", "0189")


def find_block_mismatch(said: str | None, block: bytes) -> str:
    """What is wrong with the block of a record."""
    return _find_digest_mismatch("WARC-Block-Digest", said, [block])


def find_payload_mismatch(said: str | None, forms: Iterable[bytes | memoryview]) -> str:
    """What is wrong with the payload of a record, which may have been digested in any of some forms."""
    return _find_digest_mismatch("WARC-Payload-Digest", said, forms)


def _find_digest_mismatch(name: str, said: str | None, forms: Iterable[bytes | memoryview]) -> str:
    algorithm, wanted = _parse_digest(said or "")
    if not wanted or any(hashlib.new(algorithm, form, usedforsecurity=False).digest() == wanted for form in forms):
        return ""
    return f"{name} differs"


def _parse_digest(said: str) -> tuple[str, bytes]:
    """The algorithm and the digest of `sha1:BASE32` or `sha1:hex`, nothing when it is neither."""
    label, _, value = said.strip().partition(":")
    algorithm = _KNOWN.get(label.strip().lower(), "")
    if not algorithm:
        return "", b""
    size, value = _SIZES[algorithm], value.strip()
    try:
        if len(value) == size * 2:
            return algorithm, bytes.fromhex(value)
        digits = value.rstrip("=").upper()
        number = int(digits.translate(_BASE32), 32)  # many times faster than base64.b32decode
        return algorithm, (number >> (len(digits) * 5 - size * 8)).to_bytes(size, "big")
    except (OverflowError, ValueError):
        return "", b""

"""Whether a record is what its WARC header says: block and payload digests (ISO 28500, 5.8 and 5.9).

Reads the bytes of a record, gives "" or what differs. A digest of an algorithm or a form that nobody knows proves
nothing and passes. Writers disagree about what the payload of a coded HTTP body is, so that its digest may be that of
the body as stored, without its transfer coding, or without both codings.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable

_KNOWN = {"sha1": "sha1", "sha-1": "sha1", "md5": "md5", "sha256": "sha256", "sha-256": "sha256", "sha512": "sha512"}


def block_problem(said: str | None, block: bytes) -> str:
    """What is wrong with the block of a record."""
    return _problem("WARC-Block-Digest", said, [block])


def payload_problem(said: str | None, forms: Iterable[bytes]) -> str:
    """What is wrong with the payload of a record, which may have been digested in any of some forms."""
    return _problem("WARC-Payload-Digest", said, forms)


def _problem(name: str, said: str | None, forms: Iterable[bytes]) -> str:
    algorithm, wanted = _parsed(said or "")
    if not wanted or any(hashlib.new(algorithm, form, usedforsecurity=False).digest() == wanted for form in forms):
        return ""
    return f"{name} differs"


def _parsed(said: str) -> tuple[str, bytes]:
    """The algorithm and the digest of `sha1:BASE32` or `sha1:hex`, nothing when it is neither."""
    label, _, value = said.strip().partition(":")
    algorithm = _KNOWN.get(label.strip().lower(), "")
    if not algorithm:
        return "", b""
    size, value = hashlib.new(algorithm, usedforsecurity=False).digest_size, value.strip()
    try:
        if len(value) == size * 2:
            return algorithm, bytes.fromhex(value)
        padded = value.upper() + "=" * (-len(value) % 8)
        digest = base64.b32decode(padded)
    except (binascii.Error, ValueError):
        return "", b""
    return (algorithm, digest) if len(digest) == size else ("", b"")

"""Texts in, texts without personal data out, and how much of each kind was replaced.

A replacement follows from the seed and the match (and, when asked, the document's id), so that it does not matter who
replaced what before. Reserved replacements are addresses and numbers that belong to nobody: example.com and example.org
(RFC 2606), the documentation networks (RFC 5737, RFC 3849), telephone numbers 555-0100 to 555-0199.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.pii.find import Span, find_emails, find_ips, find_phones
from llmsys.config.pii import PiiKind, PiiReplacementConfig

Counts = dict[PiiKind, np.ndarray[tuple[int], np.dtype[np.int64]]]

_FIND: dict[PiiKind, Callable[[str], Iterator[Span]]] = {
    "email": find_emails, "ip": find_ips, "phone": find_phones,
}  # fmt: skip
# What a text must hold to be searched at all; asked of all texts at once.
_NEEDS: dict[PiiKind, str] = {
    "email": "@",
    "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]|64:[fF][fF]9[bB]:",
    "phone": r"\+[1-9]|[0-9][ .)-]{1,2}[2-9][0-9]{2}[ .-]",
}  # fmt: skip
_TOKEN: dict[PiiKind, str] = {"email": "<EMAIL>", "ip": "<IP>", "phone": "<PHONE>"}
_EMAILS = ("email@example.com", "firstname.lastname@example.org")
_NETWORKS = ("192.0.2", "198.51.100", "203.0.113")


def replace_pii(texts: pa.Array, ids: Sequence[str], config: PiiReplacementConfig) -> tuple[pa.Array, Counts]:
    """Return the texts with each match replaced, and per kind how many matches each text had."""
    counts: Counts = {}
    for kind in config.find:
        counts[kind] = np.zeros(len(texts), np.int64)
        suspects = np.flatnonzero(pc.match_substring_regex(texts, _NEEDS[kind]).to_numpy(zero_copy_only=False))
        if not len(suspects):
            continue
        changed = texts.to_pylist()
        for row in suspects.tolist():
            name = ids[row] if config.same == "document" else ""
            changed[row], counts[kind][row] = _replace_matches(changed[row], kind, name, config)
        texts = pa.array(changed, texts.type)
    return texts, counts


def _replace_matches(text: str, kind: PiiKind, name: str, config: PiiReplacementConfig) -> tuple[str, int]:
    pieces, position, count = [], 0, 0
    for begin, end in _FIND[kind](text):
        pieces += [text[position:begin], choose_replacement(kind, text[begin:end], name, config)]
        position, count = end, count + 1
    return ("".join([*pieces, text[position:]]), count) if count else (text, 0)


def choose_replacement(kind: PiiKind, match: str, name: str, config: PiiReplacementConfig) -> str:
    """Return what stands for a match; `name` is the document's id, or "" when equal matches are equal everywhere."""
    if config.replace_with == "token":
        return _TOKEN[kind]
    data = f"{kind}\0{name}\0{match}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=str(config.seed).encode()).digest()
    number = int.from_bytes(digest, "big")
    match kind:
        case "email":
            return _EMAILS[number % len(_EMAILS)]
        case "ip" if ":" in match:
            return f"2001:db8::{number % 0xFFFF + 1:x}:{number // 0xFFFF % 0xFFFF + 1:x}"
        case "ip":
            return f"{_NETWORKS[number % len(_NETWORKS)]}.{number // len(_NETWORKS) % 254 + 1}"
        case "phone":
            return f"+1 {200 + number % 800}-555-01{number // 800 % 100:02d}"


def sum_counts(counts: Counts, kinds: Iterable[PiiKind]) -> dict[str, int]:
    """Return how many matches of each kind all texts had, for the funnel."""
    return {f"{kind} replaced": int(counts[kind].sum()) for kind in kinds}

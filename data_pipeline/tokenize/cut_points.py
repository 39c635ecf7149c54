"""Find the positions where a text can be cut so that its parts have the tokens of the whole.

A tokenizer.json: these tokenizers split a text into words first, and search pieces within words
only. For each of the word splitters listed here, no word crosses the position before a space that
follows a character other than white space: only white space looks ahead, and nothing looks back.

Reads the parsed tokenizer.json; returns cuts, or the reason why a text cannot be cut.

SentencePiece: both BPE and unigram build every token from neighbouring characters of one piece. So
a token always ends between two characters that are adjacent in no piece, and the text before that
position does not influence the tokens after it.

Reads the pieces of a vocabulary; positions are in UTF-8 bytes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.vocabulary.special_tokens import BYTE_PIECES

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

SPACE = 0x20
NEWLINE = 0x0A
ESCAPED_SPACE = "\u2581"  # a space in pieces; texts here have U+0020 instead
BLOCK = 1 << 20  # characters
_CODE_POINTS = 0x110000
# odd, from the golden ratio and from MurmurHash3
_LEFT = np.uint32(0x9E3779B1)
_RIGHT = np.uint32(0x85EBCA6B)


class CutPointFinder:
    """The cuts that a vocabulary allows.

    Args:
        pieces: all pieces that represent text, spaces written as U+0020.
        byte_fallback: whether unknown characters become bytes. If not, adjacent unknown characters
            are one unknown token, and no cut may separate them.

    Attributes:
        problem: the reason why no cut between words is allowed; None if cuts are allowed.
    """

    def __init__(self, pieces: Iterable[str], byte_fallback: bool) -> None:
        texts = list(pieces)
        codes = decode_code_points("".join(texts).encode())
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        inner = np.ones(len(codes), np.bool_)
        # Pairs within pieces only: the first character of a piece has no neighbour before it.
        inner[np.cumsum(lengths)[:-1]] = False
        inner[:1] = False
        left, right = codes[:-1][inner[1:]], codes[1:][inner[1:]]
        # At least 32 slots for each pair keep collisions rare.
        self._shift = np.uint32(32 - max(16, (32 * len(left)).bit_length()))
        self._joined = np.zeros(1 << (32 - int(self._shift)), np.bool_)
        self._joined[self._hash_pairs(left, right)] = True
        self._known = (
            None
            if byte_fallback
            else _build_membership(codes[(np.cumsum(lengths) - lengths)[lengths == 1]])
        )
        # Safe unless a piece joins a newline to another character.
        self._cuts_newlines = not (
            ((left == NEWLINE) != (right == NEWLINE)).any() or self._is_unknown(NEWLINE)
        )
        self.problem = self._find_problem(left, right)

    def _find_problem(
        self, left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]
    ) -> str | None:
        if ((right == SPACE) & (left != SPACE)).any():
            return "it has pieces with a space after another character"
        return "it has no piece for a space" if self._is_unknown(SPACE) else None

    def _is_unknown(self, code: int) -> bool:
        return self._known is not None and not self._known[code]

    def _hash_pairs(self, left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> Any:
        """Return the slots of pairs in the table; a collision costs a cut, never a token."""
        return (left * _LEFT ^ right * _RIGHT) * _LEFT >> self._shift

    def find_coarse_cuts(self, data: Bytes, _: Places) -> Flags:
        """Mark the bytes that begin a run of spaces or newlines, or the text after newlines.
        (len(data) + 1,) flags.

        Faster than `find_fine_cuts`, which looks up every pair of characters.
        """
        cuts = np.zeros(len(data) + 1, np.bool_)
        spaces = data == SPACE
        np.greater(spaces[1:], spaces[:-1], out=cuts[1:-1])
        if self._cuts_newlines:
            newlines = data == NEWLINE
            cuts[1:-1] |= newlines[1:] != newlines[:-1]
        return cuts

    def find_fine_cuts(self, data: Bytes, _: Places) -> Flags:
        """Mark the bytes that begin a character that no piece joins to the one before.
        (len(data) + 1,) flags.
        """
        codes = decode_code_points(data.tobytes())
        cuts = np.zeros(len(data) + 1, np.bool_)
        joined = np.zeros(len(codes) - 1, np.bool_)
        for start in range(0, len(joined), BLOCK):  # blocks bound the memory for a long text
            block = codes[start : start + BLOCK + 1]
            joined[start : start + BLOCK] = self._joined[self._hash_pairs(block[:-1], block[1:])]
        if self._known is not None:
            unknown = ~self._known[codes]
            # The library makes one unknown token of neighbouring unknown characters.
            joined |= unknown[1:] & unknown[:-1]
        # Continuation bytes of UTF-8 are 10xxxxxx; all others begin a character.
        cuts[np.flatnonzero((data & 0xC0) != 0x80)[1:]] = ~joined
        return cuts


def decode_code_points(text: bytes) -> npt.NDArray[np.uint32]:
    """Return the code points of a text in UTF-8.

    Raises:
        UnicodeDecodeError: if it is not valid UTF-8.
    """
    return np.frombuffer(text.decode().encode("utf-32-le"), np.uint32)


def _build_membership(codes: npt.NDArray[np.uint32]) -> Flags:
    known = np.zeros(_CODE_POINTS, np.bool_)
    known[codes] = True
    return known


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_LONG = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_OLD = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_EXPRESSIONS = {
    _GPT2,
    _GPT2_LONG,
    *(
        words + digits + _REST
        for words in (_WORDS, _WORDS_OLD)
        for digits in (r"|\p{N}{1,3}", r"|\p{N}", r"|\p{N}+")
    ),
}
# Normalizers that change a character independently of others, or of all but the marks after it.
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_SPACE_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}

# Non-ASCII white space, of the current or an older Unicode, as integers of its two or three bytes
# of UTF-8.
_WHITE_SPACE = "\u0085\u00a0\u1680\u180e\u200b\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_LAST_TWO = np.array(
    sorted(int.from_bytes(c.encode()) for c in _WHITE_SPACE if len(c.encode()) == 2)
)
_LAST_THREE = np.array(
    sorted(int.from_bytes(c.encode()) for c in _WHITE_SPACE if len(c.encode()) == 3)
)


def find_cut_problem(values: dict[str, Any]) -> str | None:
    """Find why texts cannot be cut at spaces before a tokenizer.

    Args:
        values: The JSON of tokenizer.json.

    Returns:
        The reason; None if they can.
    """
    if values["model"].get("dropout"):
        return "its segmentation is sampled at random"
    normalizers = _list_steps(values.get("normalizer"), "normalizers")
    byte_level = is_byte_level(values)
    if not byte_level and not _is_split_at_spaces(values.get("pre_tokenizer")):
        return "its pre_tokenizer is not known to cut texts at spaces"
    for step in normalizers:
        if step["type"] not in ({"NFC"} if byte_level else _LOCAL_NORMALIZERS):
            return f"its normalizer {step['type']} is not known to preserve spaces"
    for token in values.get("added_tokens", ()):
        if token["special"]:
            continue  # not searched for in texts
        if (
            token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or " " in token["content"].lstrip(" ")
        ):
            return f"its added token {token['content']!r} depends on the surrounding text"
        if token["normalized"] and not {step["type"] for step in normalizers} <= {"NFC"}:
            return f"its added token {token['content']!r} is matched in normalized text"
    return None


def _list_steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre_tokenizer as the list of its steps."""
    if step is None:
        return []
    steps: list[dict[str, Any]] = step[name] if step["type"] == "Sequence" else [step]
    return steps


def _is_split_at_spaces(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether words end at spaces, which are removed, or become ▁ before the next word."""
    match _list_steps(pre_tokenizer, "pretokenizers"):
        case [{"type": kind}]:
            return kind in _SPACE_SPLITTERS or _is_metaspace(pre_tokenizer or {})
        case [{"type": "WhitespaceSplit"}, meta]:
            return _is_metaspace(meta)
    return False


def _is_metaspace(step: dict[str, Any]) -> bool:
    # ▁ is put before texts that do not begin with one; every part but the first does.
    return step["type"] == "Metaspace" and bool(step.get("split", True))


def is_sentencepiece_bpe(values: dict[str, Any]) -> bool:
    """Return whether it is SentencePiece's BPE as in Llama 2: no words, spaces written ▁, bytes for
    unknown characters.

    Then a text is one word for the model, which joins pieces as SentencePiece does, and
    `CutPointFinder` finds its cuts.
    """
    model = values["model"]
    added = list_added_tokens(values)
    if (
        model["type"] != "BPE"
        or not model.get("byte_fallback")
        or values.get("pre_tokenizer")
        or added
    ):
        return False
    if any(
        model.get(name)
        for name in ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return False
    if any(piece in BYTE_PIECES for pair in model["merges"] for piece in pair):
        return False  # a merge of bytes is not text
    *first, last = _list_steps(values.get("normalizer"), "normalizers") or [{}]
    escapes = last.get("pattern") == {"String": " "} and last.get("content") == ESCAPED_SPACE
    prefix = first in ([], [{"type": "Prepend", "prepend": ESCAPED_SPACE}])
    return escapes and prefix and model["vocab"].keys() >= set(BYTE_PIECES)


def has_prepend_normalizer(values: dict[str, Any]) -> bool:
    """Return whether a space is put before every text."""
    return any(
        step["type"] == "Prepend" for step in _list_steps(values.get("normalizer"), "normalizers")
    )


def is_byte_level(values: dict[str, Any]) -> bool:
    """Return whether words are split by an expression of GPT-2 or a successor, and written byte
    by byte.
    """
    match _list_steps(values.get("pre_tokenizer"), "pretokenizers"):
        case [{"type": "ByteLevel"} as level]:
            return bool(level.get("use_regex", True))
        case [{"type": "Split"} as split, {"type": "ByteLevel"} as level]:
            plain = (
                split["behavior"] == "Isolated"
                and not split["invert"]
                and not level["add_prefix_space"]
            )
            return (
                plain
                and not level.get("use_regex", True)
                and split["pattern"].get("Regex") in _EXPRESSIONS
            )
    return False


def uses_prefix_space(values: dict[str, Any]) -> bool:
    """Return whether a text that does not begin with a space gets one."""
    return any(
        step.get("add_prefix_space")
        for step in _list_steps(values.get("pre_tokenizer"), "pretokenizers")
    )


def is_gpt2(values: dict[str, Any]) -> bool:
    """Return whether the expression of a byte-level BPE is GPT-2's own: only a space can precede
    letters in a word.
    """
    steps = _list_steps(values.get("pre_tokenizer"), "pretokenizers")
    return steps[0]["type"] == "ByteLevel" or steps[0]["pattern"].get("Regex") in (
        _GPT2,
        _GPT2_LONG,
    )


def is_bert(values: dict[str, Any]) -> bool:
    """Return whether words are split as BERT's: at white space and around punctuation and
    Chinese characters.
    """
    kinds = [(values.get(name) or {}).get("type") for name in ("normalizer", "pre_tokenizer")]
    return kinds == ["BertNormalizer", "BertPreTokenizer"] and all(
        values["normalizer"][rule] for rule in ("clean_text", "handle_chinese_chars")
    )


def list_added_tokens(values: dict[str, Any]) -> list[str]:
    """Return the added tokens that are searched for in texts."""
    return [token["content"] for token in values.get("added_tokens", ()) if not token["special"]]


def find_cuts_before_spaces(data: Bytes, _: Places) -> Flags:
    """Mark the bytes that are a space after a character other than white space. (len(data) + 1,)
    flags.
    """
    cuts = np.zeros(len(data) + 1, np.bool_)
    before = data[:-1]
    # ASCII white space of the expressions is 9 to 13 and 28 to 32; non-ASCII white space is tested
    # below.
    solid = (before > SPACE) | (before < 9) | ((before > 13) & (before < 28))
    cuts[1:-1] = (data[1:] == SPACE) & solid
    beyond = np.flatnonzero(cuts[1:-1] & (before >= 0x80)) + 1
    cuts[beyond] = ~_is_white_space(data, beyond)
    return cuts


def _is_white_space(data: Bytes, places: Any) -> Any:
    """Return whether the non-ASCII character that ends before each position is white space."""
    last, second, third = (
        data[np.maximum(places - back, 0)].astype(np.int64) for back in (1, 2, 3)
    )
    two = second << 8 | last
    return np.isin(two, _LAST_TWO) | np.isin(third << 16 | two, _LAST_THREE)

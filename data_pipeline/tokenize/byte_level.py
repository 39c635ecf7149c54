"""Where a text can be cut before a tokenizer.json of byte-level BPE, so that its parts have the tokens of the whole.

Reads the values of a tokenizer.json; gives the reason why it cannot be cut, and the places of cuts. These tokenizers
divide a text by a regular expression first, and merge bytes within its parts alone. The expressions of GPT-2 and its
heirs, named here one by one, let no part reach over the place in front of a space that follows something else than
white space: only parts of white space look at what comes behind them, and none looks back.
"""

from typing import Any

import numpy as np

from data_pipeline.tokenize.cuts import SPACE, Bytes, Flags

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_LONG = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_OLD = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_EXPRESSIONS = {
    _GPT2,
    _GPT2_LONG,
    *(words + digits + _REST for words in (_WORDS, _WORDS_OLD) for digits in (r"|\p{N}{1,3}", r"|\p{N}", r"|\p{N}+")),
}

# White space beyond ASCII, now or in an older Unicode, as numbers of its two or three bytes of UTF-8.
_WHITE_SPACE = "\u0085\u00a0\u1680\u180e\u200b\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_LAST_TWO = np.array(sorted(int.from_bytes(c.encode()) for c in _WHITE_SPACE if len(c.encode()) == 2))
_LAST_THREE = np.array(sorted(int.from_bytes(c.encode()) for c in _WHITE_SPACE if len(c.encode()) == 3))


def cut_problem(values: dict[str, Any]) -> str | None:
    """Why texts cannot be cut at spaces before this tokenizer; None when they can."""
    model, normalizer = values["model"], values.get("normalizer")
    if model.get("type", "BPE") != "BPE" or model.get("dropout"):
        return "it is not a plain BPE"
    if normalizer is not None and normalizer["type"] != "NFC":
        return f"its normalizer {normalizer['type']} is not known to leave spaces alone"
    if not _is_known(values.get("pre_tokenizer")):
        return "its pre_tokenizer is not known to cut texts at spaces"
    for token in values.get("added_tokens", ()):
        if token["special"]:
            continue  # not looked for in texts
        if token["lstrip"] or token["rstrip"] or token["single_word"] or " " in token["content"].lstrip(" "):
            return f"its added token {token['content']!r} looks at what stands around it"
    return None


def _is_known(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "ByteLevel":
        return bool(pre_tokenizer.get("use_regex", True)) and not pre_tokenizer["add_prefix_space"]
    steps = pre_tokenizer.get("pretokenizers", [])
    if pre_tokenizer["type"] != "Sequence" or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, level = steps
    plain = split["behavior"] == "Isolated" and not split["invert"] and not level["add_prefix_space"]
    return plain and not level.get("use_regex", True) and split["pattern"].get("Regex") in _EXPRESSIONS


def before_spaces(data: Bytes) -> Flags:
    """Which bytes are a space that follows a character other than white space. (len(data) + 1,) flags."""
    cuts = np.zeros(len(data) + 1, np.bool_)
    before = data[:-1]
    # ASCII white space for the expressions is 9 to 13 and 28 to 32; what lies beyond ASCII is looked at below.
    solid = (before > SPACE) | (before < 9) | ((before > 13) & (before < 28))
    cuts[1:-1] = (data[1:] == SPACE) & solid
    beyond = np.flatnonzero(cuts[1:-1] & (before >= 0x80)) + 1
    cuts[beyond] = ~_is_white_space(data, beyond)
    return cuts


def _is_white_space(data: Bytes, places: Any) -> Any:
    """Whether the character that ends before each place, one beyond ASCII, is white space."""
    last, second, third = (data[np.maximum(places - back, 0)].astype(np.int64) for back in (1, 2, 3))
    two = second << 8 | last
    return np.isin(two, _LAST_TWO) | np.isin(third << 16 | two, _LAST_THREE)

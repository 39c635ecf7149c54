"""Encode with gigatoken, a library in Rust that encodes byte-level BPE several times as fast as the
encoder by words.

Invariants:
- The ids are those of the tokenizer's own library. A tokenizer is taken only if hard texts have the
  same ids, and one document in 256 is compared later, as for every encoder.
- Texts that name a special token go to the other encoder: gigatoken reads the name as the token,
  and in a document it is text. So do long texts, some of which take it quadratic time.
- Its cache of words, which it never clears, is bounded.
"""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.data_pipeline.tokenize.cut_points import is_byte_level, list_added_tokens
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.dataset.token_shards import choose_token_dtype

if TYPE_CHECKING:
    from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer

# A text of 100 kB without any word border takes it 20 ms, one of 1 MB half a second.
LONGEST_BYTES = 200_000
# The backend is built anew when the process has grown by so much, and has encoded so much, since.
MAX_GROWTH_BYTES = 400_000_000
FEWEST_BYTES = 32_000_000

# What tokenizers of this kind disagree about: contractions, runs of digits, ends of lines, white
# space, marks that combine, characters that NFC turns into ASCII, scripts without spaces, controls.
PROBES = (
    "", " ", "  ", "\n", "\n\n", " \n", "\t\n ", "x" * 300, " " * 60, "\n" * 40,
    "It's we'll I'VE 'd", "1234567 12 3.14", "a1b2 c_d-e", "(a) ((b)) [c]", "!\n\n?\r\n",
    "e\u0301 \u1100\u1161 \u212a\u037e", "Ünïcödé ß İ ı ς", "привет мир", "猫が好きです。",
    "한국어 텍스트", "हिन्दी ने", "العربية ١٢٣", "👩‍👩‍👧 🦊🇩🇪", 
    "\u00a0\u3000\u2028\x85", "\0 \x1c \x7f",
    "…—“”‘’", "http://a.org/b?c=d#e", "def f(x):\n    return x", "\ufeff\u200b", "ABC Def gHI",
    "'s", " 's", "a  b   c\n   d",
)  # fmt: skip


class GigatokenEncoder:
    """Encoder of a byte-level tokenizer.json.

    Args:
        values: Its tokenizer.json.
        tokenizer: The tokenizer, which the ids are compared with.
        other: Encoder of the texts that gigatoken does not encode.

    Raises:
        ValueError: gigatoken cannot load it, or has other ids.
    """

    reason: str | None = None

    def __init__(
        self,
        values: dict[str, Any],
        tokenizer: "HuggingFaceTokenizer",
        other: Any,
    ) -> None:
        self._dtype = np.dtype(choose_token_dtype(tokenizer.vocab_size))
        self._text = json.dumps(values)
        self._other = other
        special = [token["content"] for token in values["added_tokens"] if token["special"]]
        self._special = "|".join(map(re.escape, special))
        self._process = psutil.Process()
        self._encoded_bytes = self._bytes_before = 0
        self._build_backend()
        probes = list(_iter_probes(values))
        expected = tokenizer.encode_batch(probes)
        for probe, ids in zip(probes, expected, strict=True):
            if self._encode(probe.encode()).tolist() != ids:
                raise ValueError(f"gigatoken has other ids for {probe!r}")

    def encode(self, texts: pa.Array) -> RaggedTokens:
        """Return the tokens of each text of a large_string column, without begin and end ids."""
        texts = texts.cast(pa.large_string())
        left = np.asarray(
            pc.greater(pc.binary_length(texts), LONGEST_BYTES).to_numpy(zero_copy_only=False)
        )
        if self._special:
            named = pc.match_substring_regex(texts, self._special)
            left = left | named.to_numpy(zero_copy_only=False)
        rows: list[Any] = [
            None if is_left else self._encode(text)
            for text, is_left in zip(
                texts.cast(pa.large_binary()).to_pylist(), left.tolist(), strict=True
            )
        ]
        if left.any():
            self._add_other_rows(texts, np.flatnonzero(left), rows)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        values = np.concatenate([np.zeros(0, np.uint32), *rows])
        return RaggedTokens(values.astype(self._dtype, copy=False), lengths)

    def _add_other_rows(self, texts: pa.Array, numbers: Any, rows: list[Any]) -> None:
        found = self._other.encode(texts.take(pa.array(numbers)))
        parts = np.split(found.values, np.cumsum(found.lengths)[:-1])
        for number, ids in zip(numbers.tolist(), parts, strict=True):
            rows[number] = ids

    def _encode(self, text: bytes) -> Any:
        """Return the ids of a text in UTF-8, uint32."""
        if self._encoded_bytes > FEWEST_BYTES:
            grown = self._process.memory_info().rss - self._bytes_before
            if grown > MAX_GROWTH_BYTES:
                self._build_backend()
            self._encoded_bytes = 0
        self._encoded_bytes += len(text)
        return self._backend.encode(text)

    def _build_backend(self) -> None:
        self._backend: Any = None  # its memory is freed first
        self._backend = import_module("gigatoken.gigatoken_rs").load_hf_json(self._text)
        self._bytes_before = self._process.memory_info().rss
        self._encoded_bytes = 0


def find_gigatoken_problem(values: dict[str, Any]) -> str | None:
    """Find why a tokenizer is not given to gigatoken.

    Args:
        values: The JSON of tokenizer.json.

    Returns:
        The reason; None if it may be asked.
    """
    if not is_byte_level(values):
        return "it is no byte-level BPE"
    model = values["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return "it is no byte-level BPE"
    for token in values["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return f"its added token {token['content']!r} depends on the surrounding text"
    try:
        import_module("gigatoken.gigatoken_rs")
    except ImportError:
        return "gigatoken is not installed"
    return None


def _iter_probes(values: dict[str, Any]) -> Iterator[str]:
    """Yield hard texts, among them the added tokens that are searched for in texts."""
    yield from PROBES
    for token in list_added_tokens(values):
        yield from (token, f"a{token}b", f" {token} ", token + token, f"{token}\n{token[:-1]}")

"""Load a Hugging Face tokenizer.json (byte-level BPE, WordPiece, Unigram, …).

Reads: tokenizer.json and the configuration files in its folder.

Invariants:
- The ids are those of the library `tokenizers`.
- No text becomes a control token, not even one that spells it (`<|endoftext|>` in a web page is
  text).
- Padding and truncation of the file are disabled. Everything runs on the calling thread.
- Text survives as far as the file's normalizer and decoder allow: byte-level BPE keeps it, NFC and
  lower-casing do not.

Only this file and data_pipeline/tokenize/train_wordpiece.py import the library, when they need it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

# Its thread pool would not survive a fork, and processes are the unit of parallel work. Read at
# every call.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from llmsys.errors import DataError
from llmsys.vocabulary.special_tokens import (
    BYTE_PIECES,
    CONFIG_NAME,
    EncodedSpans,
    read_json_object,
    read_special_tokens,
)

JSON_NAME = "tokenizer.json"
NOWHERE = "\uffff"  # a noncharacter: no vocabulary has a piece for it
NONE = -1
# GPT-2's table: bytes that print stand for themselves, the others, in their order, for the
# characters from U+0100 on.
_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(0x100) if byte not in _PRINTED]
_BYTE_PIECES = {byte: chr(0x100 + place) for place, byte in enumerate(_HIDDEN)}


class HuggingFaceTokenizer:
    """A tokenizer.json with the tokens that begin and end a text.

    The end token is `eos_token`, else the one in the configuration files of its folder, else the
    one that the post-processor appends to a text ([SEP], </s>). The begin token is found in the
    same way, and is -1 when there is none.
    """

    def __init__(self, file: Path, eos_token: str | None = None) -> None:
        """Read the file, and find the tokens that begin and end a text.

        Args:
            file: A tokenizer.json. Configuration files next to it are read, too.
            eos_token: The piece that ends a document. Default: None, it is found as the class says.

        Raises:
            OSError: The file cannot be read.
            DataError: It is no tokenizer, or nothing ends a document.
        """
        data = file.read_bytes()
        self._library = _load_library(file, data)
        self.fingerprint = hashlib.blake2b(data, digest_size=16).hexdigest()
        self.special = read_special_tokens(
            file.parent, self.find_piece_id, self._library.id_to_token
        )
        before, behind = self._get_surrounding_pieces()
        self.opening: tuple[str, ...] = before
        """The pieces that the file itself puts before a text, as transformers does: ("<s>",) or
        none.
        """
        if before:
            self.special.setdefault("bos", before[0])
        self.special["eos"] = self._choose_eos_piece(file, eos_token, behind)
        self.bos_id, self.eos_id = (
            self._get_piece_id(self.special.get(role)) for role in ("bos", "eos")
        )
        # A piece that ends documents is no text, whether or not the file says so.
        self._library.add_special_tokens(
            [AddedToken(self.special[role]) for role in ("bos", "eos") if role in self.special]
        )
        # the library then takes "</s>" in a text for text
        self._library.encode_special_tokens = True
        # ids may have gaps, so the number of pieces is no bound
        self.vocab_size: int = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self._spelled = dict(self._iter_spellings())

    def find_piece_id(self, piece: str) -> int | None:
        """Find the id of a piece.

        Args:
            piece: The piece as the vocabulary spells it, such as [MASK].

        Returns:
            Its id; None when the vocabulary has none of that name.
        """
        return self._library.token_to_id(piece)

    @property
    def unknown_ids(self) -> frozenset[int]:
        """The ids that stand for text which no piece holds; empty where every text has pieces."""
        # With byte fallback, bytes stand for the noncharacter, and nothing is unknown.
        found = {token.id for token in self._library.model.tokenize(NOWHERE)}
        return frozenset(found - {self.find_piece_id(name) for name in BYTE_PIECES})

    def get_text_pieces(self) -> dict[int, str]:
        """Return {id: piece} of the pieces that stand for text, written as the file writes them."""
        special = {
            number
            for number, token in self._library.get_added_tokens_decoder().items()
            if token.special
        }
        left_out = special | self.unknown_ids | {self.find_piece_id(name) for name in BYTE_PIECES}
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        return {number: piece for piece, number in vocabulary.items() if number not in left_out}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of tokenizer.json, as it is used here."""
        values: dict[str, Any] = json.loads(self._library.to_str())
        return values

    def encode(self, text: str) -> list[int]:
        """Implement `Tokenizer.encode`.

        Args:
            text: Any text; control tokens that are spelled in it are encoded as text.

        Returns:
            The ids, without begin or end ids.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Implement `Tokenizer.encode_batch`, on the calling thread alone.

        Args:
            texts: The texts; control tokens that are spelled in one are encoded as text.

        Returns:
            The ids of each text, without begin or end ids.
        """
        found: list[list[int]] = [
            encoding.ids
            for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        return [
            ids if self._spelled.keys().isdisjoint(ids) else self._spell_control_ids(ids)
            for ids in found
        ]

    def encode_controls(self, text: str) -> EncodedSpans:
        """Return the ids of a text in which control tokens are spelled, as transformers does for
        a chat.
        """
        self._library.encode_special_tokens = False
        try:
            encoding = self._library.encode(text, add_special_tokens=False)
        finally:
            self._library.encode_special_tokens = True
        return EncodedSpans(
            encoding.ids,
            [begin for begin, _ in encoding.offsets],
            [end for _, end in encoding.offsets],
        )

    def get_control_pieces(self) -> dict[str, int]:
        """Return {piece: id} of the special tokens of the file, which no text produces."""
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Encode words by the model alone, without normalizing and splitting them.

        Args:
            words: Words as normalizer and pre-tokenizer would return them: of byte-level BPE a
                character for each byte, see `encode_bytes_as_pieces`.

        Returns:
            The ids of each word.
        """
        tokenize = self._library.model.tokenize
        found = [[token.id for token in tokenize(word)] for word in words]
        if self._spelled.keys().isdisjoint(chain.from_iterable(found)):
            return found
        return [self._spell_control_ids(ids) for ids in found]

    def normalize(self, text: str) -> str:
        """Apply the normalizer, before texts are split into words.

        Args:
            text: Any text.

        Returns:
            The normalized text; the text itself where the file has no normalizer.
        """
        normalizer = self._library.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def is_one_word(self, text: str) -> bool:
        """Return whether the pre-tokenizer leaves a text in one piece.

        Args:
            text: A normalized text.

        Returns:
            True for one piece, and where the file has no pre-tokenizer.
        """
        pre_tokenizer = self._library.pre_tokenizer
        return pre_tokenizer is None or len(pre_tokenizer.pre_tokenize_str(text)) == 1

    def encode_bytes_as_pieces(self, words: Sequence[str]) -> list[str]:
        """Write words as byte-level BPE does: a character for each byte of their UTF-8.

        Args:
            words: Words without a line feed.

        Returns:
            The written words, in order.
        """
        if not words:
            return []
        mapped = "\n".join(words).encode().decode("latin-1").translate(_BYTE_PIECES)
        return mapped.split(_BYTE_PIECES[ord("\n")])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; control tokens give nothing, bytes of an incomplete character
        give �.
        """
        return self._library.decode([int(token) for token in ids], skip_special_tokens=True)

    def _get_piece_id(self, piece: str | None) -> int:
        found = None if piece is None else self.find_piece_id(piece)
        return NONE if found is None else found

    def _get_surrounding_pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tokens that the post-processor puts before and after a text."""
        # only the post-processor knows what it adds, so a letter is encoded to see it
        encoding = self._library.encode("a")
        marks = encoding.special_tokens_mask
        if 0 not in marks:
            return (), ()
        first, last = marks.index(0), len(marks) - marks[::-1].index(0)
        return tuple(encoding.tokens[:first]), tuple(encoding.tokens[last:])

    def _choose_eos_piece(self, file: Path, asked: str | None, behind: tuple[str, ...]) -> str:
        if asked is not None and self.find_piece_id(asked) is None:
            raise DataError(
                f"tokenizer.eos_token={asked} is not a token of {file}. {self._format_candidates()}"
            )
        end = asked or self.special.get("eos") or (behind[-1] if behind else None)
        if end is None:
            raise DataError(
                f"{file} does not name an end-of-sequence token, and neither does a {CONFIG_NAME}, "
                "special_tokens_map.json, generation_config.json or config.json in its folder. "
                f"{self._format_candidates()}"
            )
        return end

    def _format_candidates(self) -> str:
        added = self._library.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special][:8]
        return f"Set tokenizer.eos_token; special tokens: {', '.join(special) or 'none'}."

    def _iter_spellings(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (control id, ids of its letters): some models encode "</s>" in a text as the
        control token.
        """
        model = self._library.model
        unknown = {token.id for token in model.tokenize(NOWHERE)}
        for number, token in self._library.get_added_tokens_decoder().items():
            if (
                token.special
                and number not in unknown
                and model.token_to_id(token.content) == number
            ):
                # given as a whole, the model would return the control token again
                head, tail = token.content[:1], token.content[1:]
                yield (
                    number,
                    [one.id for part in (head, tail) if part for one in model.tokenize(part)],
                )

    def _spell_control_ids(self, ids: list[int]) -> list[int]:
        return [one for token in ids for one in self._spelled.get(token, (token,))]


def build_tokenizer_files(file: Path, eos_token: str | None) -> dict[str, bytes]:
    """Return the files that load as the same tokenizer from another folder, also in transformers.

    Args:
        file: The tokenizer.json.
        eos_token: The token that ends documents. None finds it as `HuggingFaceTokenizer` does.

    Returns:
        {name: content}. tokenizer_config.json is the one in the folder of `file`, completed with
        the special tokens that were found elsewhere.

    Raises:
        DataError: The file is not a tokenizer, or no token ends a document.
    """
    tokenizer = HuggingFaceTokenizer(file, eos_token)
    values = {"tokenizer_class": "PreTrainedTokenizerFast"} | read_json_object(
        file.parent / CONFIG_NAME
    )
    values |= {f"{role}_token": piece for role, piece in tokenizer.special.items()}
    config = json.dumps(values, ensure_ascii=False, indent=1) + "\n"
    return {JSON_NAME: file.read_bytes(), CONFIG_NAME: config.encode()}


def is_tokenizer_json(file: Path) -> bool:
    """Return whether a file holds a tokenizer of the library `tokenizers`.

    Args:
        file: A file called tokenizer.json; other programs use the same name.

    Returns:
        True for a JSON object with a model; also for a damaged file, which is better named than
        passed over.
    """
    try:
        return "model" in read_json_object(file)
    except DataError:
        return True  # damaged, and better named than passed over


def _load_library(file: Path, data: bytes) -> Library:
    try:
        library = Library.from_str(data.decode())
    except Exception as error:  # the library raises nothing more precise
        raise DataError(
            f"{file} is not a tokenizer.json of the library `tokenizers` ({error}). Download it "
            "again, or name another with tokenizer.kind=file tokenizer.path=FILE."
        ) from None
    # a file may carry the limit of its model, and documents are longer
    library.no_truncation()
    library.no_padding()
    return library

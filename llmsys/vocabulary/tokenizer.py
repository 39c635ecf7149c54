"""Convert text to token ids and back with SentencePiece or a tokenizer.json.

Reads: tokenizer.model or tokenizer.json.

Invariants:
- The ids are the library's own. No text becomes a control token. The fingerprint changes with the
  file.
- Text survives as far as the tokenizer's own rules allow. A SentencePiece model without
  normalization returns all of it except U+2581, its sign for a space, which becomes a space.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmsys.errors import DataError
from llmsys.vocabulary.special_tokens import EncodedSpans

ProtobufValue = int | memoryview
_EIGHT_BYTES = 1

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CODE_NAME = "tokenizer_code.json"
"""File of a dataset folder that names the class of a tokenizer of the user's own code."""


class Tokenizer(Protocol):
    """The interface of all tokenizers, for preparation, training and generation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller."""

    @property
    def bos_id(self) -> int:
        """Id that may begin a text; -1 when there is none."""

    @property
    def eos_id(self) -> int:
        """Id that ends every document."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the bytes of the file."""

    @property
    def unknown_ids(self) -> frozenset[int]:
        """The ids that stand for text which no piece holds; empty where every text has pieces."""

    def find_piece_id(self, piece: str) -> int | None:
        """Find the id of a piece.

        Args:
            piece: A piece such as <mask>.

        Returns:
            Its id; None when the vocabulary has none of that name.
        """

    def get_text_pieces(self) -> dict[int, str]:
        """Return {id: piece} of the pieces that stand for text: no control, unknown or byte
        pieces.
        """

    def encode(self, text: str) -> list[int]:
        """Encode one text.

        Args:
            text: Any text; spelled control tokens are encoded as text.

        Returns:
            The ids, without begin or end ids.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on the calling thread alone: workers are processes, and more threads
        would compete for their cores.

        Args:
            texts: The texts.

        Returns:
            The ids of each, as `encode` gives them.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text.

        Args:
            ids: Token ids.

        Returns:
            The text; begin and end ids give nothing.
        """


class TextTokenizer(Tokenizer, Protocol):
    """The interface of tokenizers that are files."""

    @property
    def special(self) -> dict[str, str]:
        """The pieces of the roles `bos`, `eos` and so on that the tokenizer has."""

    def encode_controls(self, text: str) -> EncodedSpans:
        """Encode a text in which control tokens are spelled, such as a rendered chat.

        Args:
            text: The text; the parts between control tokens are encoded alone.

        Returns:
            Ids, and the first and the last character of each in the text.
        """

    def get_control_pieces(self) -> dict[str, int]:
        """Return {piece: id} of the control tokens, which no text produces."""


class SentencePieceTokenizer:
    """A trained SentencePiece model (BPE or unigram)."""

    def __init__(self, model: bytes) -> None:
        """Load a trained model.

        Args:
            model: The serialized model: the bytes of a .model file.

        Raises:
            RuntimeError: It is not one.
        """
        import sentencepiece  # slow to import

        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        self.model = model
        self.fingerprint = hashlib.blake2b(model, digest_size=16).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()

    def find_piece_id(self, piece: str) -> int | None:
        """Return the id of a piece such as <mask>; None when the vocabulary has none of that
        name.
        """
        found: int = self._processor.piece_to_id(piece)
        # SentencePiece gives the unknown id for a piece that it does not have
        return None if found == self._processor.unk_id() else found

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without begin or end ids."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, on the calling thread alone: processes are the unit of
        parallel work.
        """
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def encode_controls(self, text: str) -> EncodedSpans:
        """Implement `TextTokenizer.encode_controls`.

        A character may be several byte pieces. SentencePiece gives the first of them no width;
        here they end where the last one does, so that every id has a span.
        """
        controls = self.get_control_pieces()
        rows: list[tuple[int, int, int]] = []
        at = 0
        for part in (
            re.split("(" + "|".join(map(re.escape, controls)) + ")", text) if controls else [text]
        ):
            if part in controls:
                rows.append((controls[part], at, at + len(part)))
            elif part:
                found = self._processor.encode(part, return_type="offset_mapping")
                pairs = zip(found["ids"], found["offsets"], strict=True)
                rows += [(token, at + begin, at + end) for token, (begin, end) in pairs]
            at += len(part)
        # The first bytes of a character have no width; they end where its last byte does.
        for number in range(len(rows) - 2, -1, -1):
            token, begin, end = rows[number]
            rows[number] = token, begin, end if end > begin else rows[number + 1][2]
        return (
            EncodedSpans(*(list(column) for column in zip(*rows, strict=True)))
            if rows
            else EncodedSpans([], [], [])
        )

    @property
    def special(self) -> dict[str, str]:
        """The pieces of the roles `bos`, `eos`, `unk` and `pad` that the model has."""
        library = self._processor
        ids = {role: getattr(library, f"{role}_id")() for role in ("bos", "eos", "unk", "pad")}
        return {role: library.id_to_piece(token) for role, token in ids.items() if token >= 0}

    def get_control_pieces(self) -> dict[str, int]:
        """Return {piece: id} of the control pieces, which no text produces."""
        library = self._processor
        return {library.id_to_piece(i): i for i in range(self.vocab_size) if library.is_control(i)}

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Encode many texts into arrays: Python integers cost a third of the time of a long text.

        Args:
            texts: The texts.

        Returns:
            The ids of `encode_batch`, int32.
        """
        ids: list[npt.NDArray[np.int32]] = self._processor.encode(
            list(texts), num_threads=1, return_type="numpy"
        )
        return ids

    def normalize(self, texts: Sequence[str]) -> list[str]:
        """Return texts as the model sees them.

        Args:
            texts: The texts.

        Returns:
            The normalized texts, spaces written as U+2581.
        """
        normal: list[str] = self._processor.normalize(list(texts))
        return normal

    def get_text_pieces(self) -> dict[int, str]:
        """Return {id: piece} of the pieces that stand for text, spaces written as U+0020."""
        library = self._processor
        ids = [
            i
            for i in range(self.vocab_size)
            if not (library.is_control(i) or library.is_unknown(i))
        ]
        return {
            i: library.id_to_piece(i).replace("\u2581", " ") for i in ids if not library.is_byte(i)
        }

    @property
    def unknown_ids(self) -> frozenset[int]:
        """The ids that stand for text which no piece holds."""
        return frozenset([self._processor.unk_id()])

    @property
    def has_unused_pieces(self) -> bool:
        """True when some pieces are disabled, as in a restricted vocabulary."""
        return any(map(self._processor.is_unused, range(self.vocab_size)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; begin and end ids give nothing."""
        text: str = self._processor.decode([int(token) for token in ids])
        return text


def load_tokenizer(path: Path | str, eos_token: str | None = None) -> TextTokenizer:
    """Load a tokenizer.

    Args:
        path: The file of the tokenizer, or the folder that holds it.
        eos_token: The token that ends documents, for a tokenizer.json that names none or another.
            None keeps the file's.

    Returns:
        A SentencePiece or Hugging Face tokenizer.

    Raises:
        DataError: The file is missing, is not a tokenizer, or names one of the user's own code.
    """
    file = find_model_file(path)
    if file.name == CODE_NAME:
        raise DataError(
            f"{file} names a tokenizer of your own code, which only commands with its dataset "
            "run. In Python use "
            "llmsys.data_pipeline.tokenize.tokenizer_files.load_dataset_tokenizer."
        )
    try:
        if file.suffix == ".json":
            from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer

            return HuggingFaceTokenizer(file, eos_token)
        model = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}): the dataset has no tokenizer yet. Train "
            "one with: llmsys tokenizer CONFIG, or name an existing one with tokenizer.kind=file "
            "tokenizer.path=FILE."
        ) from None
    if eos_token is not None:
        raise DataError(
            f"tokenizer.eos_token={eos_token} applies to tokenizer.json only; {file} defines its "
            "own. Leave it out."
        )
    try:
        return SentencePieceTokenizer(model)
    # the message about a damaged piece may hold its bytes
    except (RuntimeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} is not a SentencePiece model ({error}). Train one with: llmsys tokenizer "
            "CONFIG (delete a corrupt one first), or name one with tokenizer.kind=file "
            "tokenizer.path=FILE."
        ) from None


def find_model_file(path: Path | str) -> Path:
    """Return the tokenizer file for a path.

    Args:
        path: The file itself, or the folder that holds it.

    Returns:
        The file, which may be missing. A tokenizer.json precedes a tokenizer.model, as in
        transformers, unless it is another program's file.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    if (path / JSON_NAME).is_file():
        from llmsys.vocabulary.hugging_face_tokenizer import is_tokenizer_json

        if not (path / MODEL_NAME).is_file() or is_tokenizer_json(path / JSON_NAME):
            return path / JSON_NAME
    code = path / CODE_NAME
    return code if code.is_file() and not (path / MODEL_NAME).is_file() else path / MODEL_NAME


def iter_protobuf_fields(data: memoryview) -> Iterator[tuple[int, ProtobufValue]]:
    """Yield the fields of a protocol buffer, as SentencePiece models are.

    Args:
        data: the message. Fields of four and of eight bytes are skipped.

    Yields:
        Number and value of a field: an int, or the bytes of a text or message.

    Raises:
        IndexError: the message is cut.
    """
    position = 0
    while position < len(data):
        key, position = _parse_varint(data, position)
        # A key is the field number, with the type of the value in its lower 3 bits.
        match key & 7:
            case 0:
                value, position = _parse_varint(data, position)
                yield key >> 3, value
            case 2:
                size, position = _parse_varint(data, position)
                yield key >> 3, data[position : position + size]
                position += size
            case wire:
                position += 8 if wire == _EIGHT_BYTES else 4


def _parse_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position = position + 1
        shift = shift + 7
        if byte < 0x80:
            return value, position

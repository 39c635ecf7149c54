"""Tokenizers of the user's own code: the class to extend, its place among the tokenizers, and a
test kit.

    class Characters(PythonTokenizer):
        alphabet: str = "abc "

        @property
        def vocab_size(self):
            return len(self.alphabet) + 1

        @property
        def eos_id(self):
            return len(self.alphabet)

        def encode(self, text):
            return [self.alphabet.index(one) for one in text if one in self.alphabet]

        def decode(self, ids):
            return "".join(self.alphabet[one] for one in ids)

Reads and writes: tokenizer_code.json of a dataset folder, which has the path, options and digest of
the code.

Invariants:
- A dataset folder has no code. Code that is not the one that prepared the dataset is rejected.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.python_code import compute_code_digest
from llmsys.config.section import Section
from llmsys.config.tokenizer import PythonTokenizerConfig
from llmsys.errors import ConfigError, DataError

Result = TypeVar("Result")

_SHOWN = 60
_PROBE = "A probe, 42 words: naïve Ünïcode 漢字 🙂\n\tend"


class PythonTokenizer(Section):
    """Base class of a tokenizer: fields are options."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller."""

    @property
    @abstractmethod
    def eos_id(self) -> int:
        """Id that ends every document; no text is encoded to it."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode a text, without begin and end ids.

        Args:
            text: Any text, the empty one included.

        Returns:
            Ids from 0 to `vocab_size` - 1, none of them `eos_id`; anything else ends the command
            with an error.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text.

        Args:
            ids: Ids that a model may generate, in any order. Begin and end ids have been removed.

        Returns:
            The text.
        """

    @property
    def bos_id(self) -> int:
        """Id that may begin a text; -1 when there is none."""
        return -1

    @property
    def unknown_ids(self) -> frozenset[int]:
        """Ids for text that no other id holds."""
        return frozenset()

    @property
    def special_pieces(self) -> dict[str, int]:
        """Ids of pieces that no text is encoded to, such as {"<mask>": 5}."""
        return {}

    def get_text_pieces(self) -> dict[int, str]:
        """Return {id: piece} of the pieces that stand for text; none where pieces have no text
        of their own.
        """
        return {}


class LoadedPythonTokenizer:
    """The tokenizer of a section with `kind: python`."""

    def __init__(self, config: PythonTokenizerConfig) -> None:
        self._config = config
        self._own = load_python_object(config, PythonTokenizer, "tokenizer")  # type: ignore[type-abstract]
        options = json.dumps(config.options, sort_keys=True, default=str)
        code = f"{config.class_name} {options} {compute_code_digest(config)}"
        self.fingerprint = hashlib.blake2b(code.encode(), digest_size=16).hexdigest()
        self.vocab_size = self._own.vocab_size
        self.eos_id = self._own.eos_id
        self.bos_id = self._own.bos_id
        self.unknown_ids = self._own.unknown_ids
        self._special = {self.eos_id, self.bos_id}

    def find_piece_id(self, piece: str) -> int | None:
        """Find the id of a piece.

        Args:
            piece: A key of the class's `special_pieces`, such as <mask>.

        Returns:
            Its id; None when the class names no such piece.
        """
        return self._own.special_pieces.get(piece)

    def get_text_pieces(self) -> dict[int, str]:
        """Return {id: piece} of the pieces that stand for text."""
        return self._own.get_text_pieces()

    def encode(self, text: str) -> list[int]:
        """Encode a text by the user's code.

        Args:
            text: Any text.

        Returns:
            The ids, without begin or end ids.

        Raises:
            DataError: The code fails, or returns anything but ids of the vocabulary, or the end id.
        """
        ids = self._call(lambda: list(self._own.encode(text)), f"the text {text[:_SHOWN]!r}")
        if wrong := [
            one for one in ids if not isinstance(one, int) or not 0 <= one < self.vocab_size
        ]:
            raise DataError(
                f"{self._config.path} gave the id {wrong[0]!r} for the text {text[:_SHOWN]!r}, "
                f"but ids are integers from 0 to {self.vocab_size - 1} "
                f"(vocab_size={self.vocab_size}). Correct encode or vocab_size."
            )
        if self.eos_id in ids:
            raise DataError(
                f"{self._config.path} gave eos_id={self.eos_id} for the text {text[:_SHOWN]!r}, "
                "but that id ends documents and no text may have it. Use a separate id."
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids by the user's code.

        Args:
            ids: Any ids of the vocabulary; begin and end ids give nothing.

        Returns:
            The text.

        Raises:
            DataError: The code fails.
        """
        own = [int(one) for one in ids if int(one) not in self._special]
        return self._call(lambda: self._own.decode(own), f"the ids {own[:20]}")

    def _call(self, function: Callable[[], Result], what: str) -> Result:
        try:
            return function()
        except Exception as error:
            raise DataError(
                f"{self._config.path} failed on {what}: "
                f"{describe_error(error, self._config.files[0])}. Correct the code."
            ) from error


def load_python_tokenizer(config: PythonTokenizerConfig) -> LoadedPythonTokenizer:
    """Run the user's code and build the tokenizer.

    Args:
        config: the `tokenizer:` section.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: the class is missing or wrong, or an option or one of its properties is.
    """
    tokenizer = LoadedPythonTokenizer(config)
    size = tokenizer.vocab_size
    end = tokenizer.eos_id
    if not (isinstance(size, int) and isinstance(end, int) and 0 <= end < size):
        raise ConfigError(
            f"tokenizer: {config.path} has vocab_size={size!r} and eos_id={end!r}, but eos_id is "
            "an id from 0 to vocab_size - 1. Correct the properties."
        )
    try:
        text = tokenizer.decode(tokenizer.encode(_PROBE))
    except DataError as error:
        raise ConfigError(f"tokenizer: {error}") from error
    if not isinstance(text, str):
        raise ConfigError(
            f"tokenizer: {config.path}: decode returned {type(text).__name__}. Return the text of "
            "the ids."
        )
    return tokenizer


def serialize_python_tokenizer(config: PythonTokenizerConfig) -> bytes:
    """Return the contents of tokenizer_code.json.

    Args:
        config: the `tokenizer:` section.

    Returns:
        JSON: the section, and the digest of its source.
    """
    values: dict[str, Any] = config.model_dump(mode="json") | {
        "digest": compute_code_digest(config)
    }
    return (json.dumps(values, indent=1) + "\n").encode()


def read_python_tokenizer(file: Path) -> LoadedPythonTokenizer:
    """Load the tokenizer of a dataset folder.

    Args:
        file: its tokenizer_code.json.

    Returns:
        The tokenizer.

    Raises:
        DataError: the file is damaged, or the code is not the one that prepared the dataset.
        ConfigError: the code cannot be used.
    """
    try:
        values = json.loads(file.read_bytes())
        digest = values.pop("digest")
        config = PythonTokenizerConfig.model_validate(values)
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        raise DataError(
            f"{file} does not name a tokenizer ({error}). Prepare the dataset again."
        ) from None
    if compute_code_digest(config) != digest:
        raise DataError(
            f"{config.path} is not the code that prepared {file.parent.parent} (its digest is not "
            f"{digest[:8]}…). Restore it, or prepare the dataset again: llmsys prepare CONFIG"
        )
    return load_python_tokenizer(config)


def check_python_tokenizer(
    tokenizer: PythonTokenizer, texts: Sequence[str], *, lossless: bool = True
) -> None:
    """Test a tokenizer on some texts.

    Args:
        tokenizer: the user's object.
        texts: texts to encode.
        lossless: whether decoding must give the text again.

    Raises:
        ConfigError: an id is outside of the vocabulary or is eos_id, ids change when a text is
            encoded again, or the text of the ids is another one.
    """
    name = type(tokenizer).__name__
    for text in texts:
        ids = list(tokenizer.encode(text))
        if any(not 0 <= one < tokenizer.vocab_size or one == tokenizer.eos_id for one in ids):
            raise ConfigError(
                f"{name} encodes {text[:_SHOWN]!r} as {ids[:20]}, but ids are 0 to "
                f"{tokenizer.vocab_size - 1} without eos_id={tokenizer.eos_id}. Correct encode."
            )
        if list(tokenizer.encode(text)) != ids:
            raise ConfigError(
                f"{name} encodes {text[:_SHOWN]!r} otherwise the second time. Keep nothing "
                "between texts."
            )
        if lossless and (found := tokenizer.decode(ids)) != text:
            raise ConfigError(
                f"{name} returns {found[:_SHOWN]!r} for the ids of {text[:_SHOWN]!r}. Correct "
                "decode."
            )

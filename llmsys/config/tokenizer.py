"""Tokenizer sections: train a SentencePiece or WordPiece model, or use a file. Defines the union
`TokenizerConfig`.

Option names are those of SentencePiece where it has the option.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.python_code import PythonCode
from llmsys.config.section import LocalPath, Section, raise_violations
from llmsys.errors import Violation

# Options of every tokenizer that is trained.
_SAMPLE_BYTES: Any = Field(
    100_000_000,
    ge=1,
    description="UTF-8 bytes of the training sample; documents are selected by the hash of their "
    "id.",
)
_LANGUAGE_WEIGHTS: Any = Field(
    {},
    description="Shares of the sample by language (ISO 639-1). Other languages are excluded; a "
    "language with less text than its share is used in full. Default: no shares.",
)


class SentencePieceConfig(Section):
    """A SentencePiece model trained on a reproducible sample of the kept training documents
    (Kudo 2018).
    """

    kind: Literal["sentencepiece"] = "sentencepiece"
    model_type: Literal["bpe", "unigram"] = Field("bpe", description="Training algorithm.")
    vocab_size: int = Field(
        8_192, ge=300, le=1 << 20, description="Vocabulary size, including byte and control pieces."
    )
    byte_fallback: bool = Field(
        True,
        description="Encode characters outside the vocabulary as bytes instead of the unknown id.",
    )
    character_coverage: float = Field(
        0.9995,
        ge=0.98,
        le=1,
        description="Share of the sample's characters covered by single-character pieces.",
    )
    split_digits: bool = Field(False, description="Split numbers into single digits.")
    normalization: Literal["identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"] = Field(
        "identity",
        description="SentencePiece normalization; only identity is lossless. nmt_: also replace "
        "newlines and tabs by spaces. _cf: case folding.",
    )
    remove_extra_whitespaces: bool = Field(
        False, description="Strip leading and trailing spaces and collapse runs of spaces."
    )
    add_dummy_prefix: bool = Field(
        False,
        description="Prepend a space to the text, so that its first word is encoded like the "
        "others.",
    )
    allow_whitespace_only_pieces: bool = Field(
        True, description="Allow runs of spaces as pieces, which shortens indented code."
    )
    whitespace_symbols: Literal["bytes", "pieces"] = Field(
        "bytes",
        description="Encode newline, double newline and tab as bytes (unknown without "
        "byte_fallback), or as pieces.",
    )
    control_symbols: tuple[str, ...] = Field(
        (),
        description="Control pieces, which no text produces, such as <mask> for masked language "
        "models.",
    )
    user_defined_symbols: tuple[str, ...] = Field(
        (), description="User-defined pieces, which are never split, such as <|user|>."
    )
    sample_bytes: int = _SAMPLE_BYTES
    language_weights: dict[str, Annotated[float, Field(gt=0)]] = _LANGUAGE_WEIGHTS

    @model_validator(mode="after")
    def _check_symbols(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        symbols = [(symbol, "control_symbols") for symbol in self.control_symbols]
        symbols += [(symbol, "user_defined_symbols") for symbol in self.user_defined_symbols]
        for number, (symbol, field) in enumerate(symbols):
            if symbol in ("<unk>", "<s>", "</s>"):
                yield Violation(field, f"{symbol} is already a piece of every model. Leave it out.")
            elif not symbol or "\u2581" in symbol:
                yield Violation(
                    field, f"{symbol!r} cannot be a piece: U+2581 represents spaces. Write a space."
                )
            elif symbol in [earlier for earlier, _ in symbols[:number]]:
                yield Violation(
                    field,
                    f"{symbol!r} is given twice: a piece is either control or user-defined. List "
                    "it once.",
                )


WORDPIECE_SYMBOLS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""First pieces of every trained WordPiece vocabulary, in BERT's order. [SEP] ends documents."""


class WordPieceConfig(Section):
    """A WordPiece vocabulary in BERT's format, trained by the library `tokenizers` on the kept
    training documents.

    Words are split at spaces and punctuation, and Chinese characters are words. Text is not
    restored exactly.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_size: int = Field(
        30_522,
        ge=32,
        le=1 << 20,
        description="Vocabulary size, including special tokens and characters.",
    )
    lowercase: bool = Field(
        True, description="Lower all letters and strip their accents (BERT uncased)."
    )
    min_frequency: int = Field(
        2, ge=1, description="Least count of a pair of pieces that becomes a piece."
    )
    limit_alphabet: int = Field(
        1_000,
        ge=1,
        description="Number of characters in the vocabulary; words with others are unknown.",
    )
    special_tokens: tuple[str, ...] = Field(
        (), description="Special tokens after [PAD], [UNK], [CLS], [SEP] and [MASK]."
    )
    sample_bytes: int = _SAMPLE_BYTES
    language_weights: dict[str, Annotated[float, Field(gt=0)]] = _LANGUAGE_WEIGHTS


TrainedTokenizerConfig = SentencePieceConfig | WordPieceConfig


class FileTokenizerConfig(Section):
    """An existing SentencePiece model or tokenizer.json. It is copied into the dataset folder."""

    kind: Literal["file"] = "file"
    path: LocalPath = Field(
        description="A tokenizer.json, a SentencePiece model, or a folder with one of them "
        "(tokenizer.json is preferred)."
    )
    eos_token: str | None = Field(
        None,
        min_length=1,
        description="Token that ends documents. Default: the one of tokenizer_config.json or the "
        "other files in the folder.",
    )


class PythonTokenizerConfig(PythonCode):
    """A tokenizer of your own: a class that extends
    `llmsys.vocabulary.python_tokenizer.PythonTokenizer`.

    The dataset folder holds the path and the digest of the code, not the code: it must be at the
    same path wherever the dataset is used.
    """

    kind: Literal["python"] = "python"

    __hash__ = PythonCode.__hash__


class NoTokenizer(Section):
    """No tokenizer: images have no text."""

    kind: Literal["none"] = "none"


TokenizerConfig = Annotated[
    SentencePieceConfig
    | WordPieceConfig
    | FileTokenizerConfig
    | PythonTokenizerConfig
    | NoTokenizer,
    Field(discriminator="kind"),
]

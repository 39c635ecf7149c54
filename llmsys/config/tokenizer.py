"""Tokenizer sections: train a SentencePiece model or use a file. Defines the tagged union `TokenizerConfig`.

Option names are those of SentencePiece where it has the option.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import LocalPath, Section, Violation, raise_violations


class SentencePieceConfig(Section):
    """A SentencePiece model trained on a reproducible sample of the kept training documents (Kudo 2018)."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    model_type: Literal["bpe", "unigram"] = Field("bpe", description="Algorithm that chooses the pieces.")
    vocab_size: int = Field(8_192, ge=300, le=1 << 20, description="Number of pieces, bytes and control ids included.")
    byte_fallback: bool = Field(True, description="Characters outside the vocabulary become bytes, never unknowns.")
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1, description="Share of the sample's characters that get a piece of their own."
    )
    split_digits: bool = Field(False, description="Every digit is a piece of its own.")
    normalization: Literal["identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"] = Field(
        "identity",
        description="What becomes of characters; identity alone gives texts back. nmt_ also makes newlines and tabs "
        "spaces, _cf folds case.",
    )
    remove_extra_whitespaces: bool = Field(False, description="Spaces at both ends go, and runs of them become one.")
    add_dummy_prefix: bool = Field(False, description="A space is put before a text: its first word is one as others.")
    allow_whitespace_only_pieces: bool = Field(
        True, description="Runs of spaces may be pieces: indented code is short."
    )
    whitespace_symbols: Literal["bytes", "pieces"] = Field(
        "bytes", description="Newline, two newlines and tab become bytes (or unknown without byte_fallback), or pieces."
    )
    control_symbols: tuple[str, ...] = Field(
        (), description="Pieces that no text produces, such as <mask> for masked language models."
    )
    user_defined_symbols: tuple[str, ...] = Field(
        (), description="Pieces that always stay whole where a text has them, such as <|user|>."
    )
    sample_bytes: int = Field(
        100_000_000, ge=1, description="UTF-8 bytes of text to train on; documents are drawn by the hash of their id."
    )
    language_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Shares of the sample by language (ISO 639-1); no other language is drawn, and one that has less "
        "than its share gives all it has. Left out: documents as they come.",
    )

    @model_validator(mode="after")
    def _check_symbols(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        symbols = [(symbol, "control_symbols") for symbol in self.control_symbols]
        symbols += [(symbol, "user_defined_symbols") for symbol in self.user_defined_symbols]
        for number, (symbol, field) in enumerate(symbols):
            if symbol in ("<unk>", "<s>", "</s>"):
                yield Violation(field, f"{symbol} is a piece of every model already. Leave it out.")
            elif not symbol or "\u2581" in symbol:
                yield Violation(
                    field, f"{symbol!r} cannot be a piece: U+2581 is how spaces are written. Write a space."
                )
            elif symbol in [earlier for earlier, _ in symbols[:number]]:
                yield Violation(field, f"{symbol!r} is given twice, and a piece is one or the other. Give it once.")


class FileTokenizerConfig(Section):
    """An existing SentencePiece model or tokenizer.json. It is copied into the dataset folder."""

    kind: Literal["file"] = "file"
    path: LocalPath = Field(
        description="A tokenizer.json or SentencePiece model, or the folder that holds one; tokenizer.json goes first."
    )
    eos_token: str | None = Field(
        None,
        min_length=1,
        description="Piece that ends documents. Left out: what tokenizer_config.json and others beside the file say.",
    )


def find_weight_violations(tokenizer: "TokenizerConfig", data: str) -> Iterator[Violation]:
    """Yield a violation if language weights are set for data without language labels."""
    if isinstance(tokenizer, SentencePieceConfig) and tokenizer.language_weights and data in ("pairs", "labelled"):
        message = f"the texts of data.kind={data} are not told apart by language. Leave the weights out."
        yield Violation("tokenizer.language_weights", message)


TokenizerConfig = Annotated[SentencePieceConfig | FileTokenizerConfig, Field(discriminator="kind")]

"""What a YAML file can say about the tokenizer: train a SentencePiece model on the documents, or use a file.

Reads nothing, gives the tagged union `TokenizerConfig`. Option names follow SentencePiece's where it has one.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section


class SentencePieceConfig(Section):
    """A SentencePiece model trained on a reproducible sample of the kept training documents (Kudo 2018)."""

    kind: Literal["sentencepiece"] = "sentencepiece"
    model_type: Literal["bpe", "unigram"] = Field("bpe", description="Algorithm that chooses the pieces.")
    vocab_size: int = Field(8_192, ge=300, le=1 << 20, description="Number of pieces, bytes and control ids included.")
    byte_fallback: bool = Field(True, description="Characters outside the vocabulary become bytes, never unknowns.")
    character_coverage: float = Field(
        0.9995, gt=0.9, le=1, description="Share of the sample's characters that get a piece of their own."
    )
    split_digits: bool = Field(False, description="Every digit is a piece of its own.")
    control_symbols: tuple[str, ...] = Field(
        (), description="Pieces that no text produces, such as <mask> for masked language models."
    )
    sample_bytes: int = Field(
        100_000_000, ge=1, description="UTF-8 bytes of text to train on; documents are drawn by the hash of their id."
    )


class FileTokenizerConfig(Section):
    """A tokenizer that exists already, SentencePiece's or a tokenizer.json; it is copied into the dataset folder."""

    kind: Literal["file"] = "file"
    path: Path = Field(
        description="A tokenizer.json or SentencePiece model, or the folder that holds one; tokenizer.json goes first."
    )
    eos_token: str | None = Field(
        None,
        min_length=1,
        description="Piece that ends documents. Left out: what tokenizer_config.json and others beside the file say.",
    )


TokenizerConfig = Annotated[SentencePieceConfig | FileTokenizerConfig, Field(discriminator="kind")]

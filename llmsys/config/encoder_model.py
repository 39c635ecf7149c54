"""Configuration of an encoder of Hugging Face: a local folder, and how its model reads texts."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from llmsys.config.section import LocalPath, Section

_MODEL_FILES = frozenset({".json", ".safetensors", ".bin", ".model", ".txt"})


class EncoderModelConfig(Section):
    """A folder with config.json, weights and tokenizer, and how its model reads texts."""

    model: LocalPath = Field(
        description="Folder of the model; relative paths start in the working directory."
    )
    max_tokens: int = Field(
        512, ge=2, description="Tokens of a text that are read, from its start, with special ones."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto: on a GPU where the process sees one."
    )
    batch_size: int = Field(
        32, ge=1, description="Texts at a time on a GPU. On a CPU each text is read alone."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the model that decide what it computes, sorted; config.json if there is none."""
        found = sorted(
            path
            for path in (self.model.iterdir() if self.model.is_dir() else ())
            if path.is_file() and (path.suffix in _MODEL_FILES or path.name == "merges.txt")
        )
        return tuple(found) or (self.model / "config.json",)

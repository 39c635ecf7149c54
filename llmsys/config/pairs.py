"""Sections for line-based datasets: translation pairs and labelled texts.

Both are stored as pairs of token sequences. The target of a labelled text is the index of its label.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.executor import ExecutorConfig, LocalExecutorConfig
from llmsys.config.local_path import LocalPath
from llmsys.config.section import Section
from llmsys.config.violation import Violation, raise_violations


class PairsConfig(Section):
    """Parallel text files: line n of a target file is the translation of line n of its source file.

    Files are UTF-8, plain or .gz. A pair with an empty or unreadable side is dropped and counted. Training pairs longer
    than `max_tokens` are also dropped and counted. Held-out pairs are never dropped for length,
    because scores are compared over the full test set.
    """

    kind: Literal["pairs"] = "pairs"
    name: str = Field("pairs", min_length=1, description="Name of the dataset, for people.")
    folder: LocalPath = Field(Path("runs/pairs"), description="Folder that `prepare` writes and `train` reads.")
    source: tuple[LocalPath, ...] = Field((), description="Files to translate from, one sentence per line.")
    target: tuple[LocalPath, ...] = Field((), description="Their translations, a file for each source file.")
    heldout_source: tuple[LocalPath, ...] = Field((), description="Source files kept for evaluation.")
    heldout_target: tuple[LocalPath, ...] = Field((), description="Their reference translations.")
    max_tokens: int = Field(256, ge=2, description="Longest side of a training pair, closing token included.")
    shard_pairs: int = Field(500_000, ge=1, description="Pairs per token file, about.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Who does the work.")

    @model_validator(mode="after")
    def _check_file_pairs(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        for name, sources, targets in (
            ("target", self.source, self.target),
            ("heldout_target", self.heldout_source, self.heldout_target),
        ):
            if len(sources) != len(targets):
                yield Violation(
                    name,
                    f"{len(targets)} target files for {len(sources)} source files. Give one for each, in their order.",
                )


class LabelledTextConfig(Section):
    """Labelled texts for classification: .tsv lines `label<TAB>text`, or .jsonl with `text` and `label`.

    Plain or .gz. Texts longer than `max_tokens` are cut and counted.
    """

    kind: Literal["labelled"] = "labelled"
    name: str = Field("labelled", min_length=1, description="Name of the dataset, for people.")
    folder: LocalPath = Field(Path("runs/labelled"), description="Folder that `prepare` writes and `train` reads.")
    inputs: tuple[LocalPath, ...] = Field((), description="Files to train on: .tsv or .jsonl, plain or .gz.")
    heldout_inputs: tuple[LocalPath, ...] = Field((), description="Files kept for evaluation.")
    labels: tuple[str, ...] = Field((), description="Labels in the order of their numbers; empty: as found, sorted.")
    max_tokens: int = Field(256, ge=2, description="Tokens of a text that are kept, closing token included.")
    shard_pairs: int = Field(500_000, ge=1, description="Texts per token file, about.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Who does the work.")

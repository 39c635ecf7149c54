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
    name: str = Field("pairs", min_length=1, description="Display name of the dataset.")
    folder: LocalPath = Field(
        Path("runs/pairs"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    source: tuple[LocalPath, ...] = Field((), description="Source files, one sentence per line.")
    target: tuple[LocalPath, ...] = Field((), description="Target files, one for each source file.")
    heldout_source: tuple[LocalPath, ...] = Field((), description="Held-out source files.")
    heldout_target: tuple[LocalPath, ...] = Field(
        (), description="Reference translations of the held-out source files."
    )
    max_tokens: int = Field(
        256,
        ge=2,
        description="Maximum tokens of either side of a training pair, including the end token; longer pairs are "
        "dropped.",
    )
    shard_pairs: int = Field(500_000, ge=1, description="Approximate number of pairs per token file.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Executor that runs the tasks.")

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
    name: str = Field("labelled", min_length=1, description="Display name of the dataset.")
    folder: LocalPath = Field(
        Path("runs/labelled"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    inputs: tuple[LocalPath, ...] = Field((), description="Training files: .tsv or .jsonl; .gz is decompressed.")
    heldout_inputs: tuple[LocalPath, ...] = Field((), description="Held-out files.")
    labels: tuple[str, ...] = Field(
        (), description="Labels in order of their ids. Empty: the labels of the files, sorted."
    )
    max_tokens: int = Field(
        256, ge=2, description="Maximum tokens of a text, including the end token; longer texts are truncated."
    )
    shard_pairs: int = Field(500_000, ge=1, description="Approximate number of texts per token file.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Executor that runs the tasks.")

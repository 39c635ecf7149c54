"""Keep or drop documents by the score of an encoder classifier, or score them alone.

A score is computed once for each text and model: `keep_scores` gives a task the file in which those
of its block are.

Reads and writes work/scores/MODEL/BLOCK.arrow of a dataset folder: xxh3_128 of texts, and scores.

Invariants:
    - A stored score is the one that the model would give: its file is named by the model's files,
      label and settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.data_pipeline.core.journal import compute_json_digest
from llmsys.data_pipeline.rules.encoder_folder import list_score_limits, read_encoder_folder
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    RuleVerdicts,
    apply_thresholds,
)
from llmsys.dataset.token_shards import compute_file_digest
from llmsys.errors import DataError
from llmsys.storage.arrow_file import ArrowFileWriter, read_batches

if TYPE_CHECKING:
    from llmsys.data_pipeline.rules.encoder_model import EncoderModel

_SCHEMA = pa.schema([("text", pa.binary(16)), ("score", pa.float32())])


class ScoreFiles:
    """The stored scores of one block, by model."""

    def __init__(self, folder: Path, block: str) -> None:
        """Name the files of a block; nothing is read yet.

        Args:
            folder: Folder of the scores of a dataset.
            block: Name of the block.
        """
        self._folder = folder
        self._block = block
        self._known = dict[str, dict[bytes, float]]()
        self._changed = set[str]()

    def read_scores(self, model: str) -> dict[bytes, float]:
        """Return the scores that a model gave, by hash of the text."""
        if model not in self._known:
            self._known[model] = {}
            path = self._get_path(model)
            if path.exists():
                try:
                    for batch in read_batches(path):
                        columns = (batch.column(name).to_pylist() for name in _SCHEMA.names)
                        self._known[model].update(zip(*columns, strict=True))
                except DataError:
                    self._known[model].clear()  # damaged: computed again
        return self._known[model]

    def add_scores(self, model: str, scores: dict[bytes, float]) -> None:
        """Add scores of a model, for the end of the task."""
        self.read_scores(model).update(scores)
        self._changed.add(model)

    def write_changes(self) -> None:
        """Write what was added."""
        for model in sorted(self._changed):
            with ArrowFileWriter(self._get_path(model), _SCHEMA) as writer:
                known = sorted(self._known[model].items())
                columns = [list(column) for column in zip(*known, strict=True)]
                writer.write(pa.record_batch(columns, schema=_SCHEMA))
        self._changed.clear()

    def _get_path(self, model: str) -> Path:
        return self._folder / model / f"{self._block}.arrow"


_open: list[ScoreFiles] = []


@contextmanager
def keep_scores(files: ScoreFiles) -> Iterator[None]:
    """Take known scores from files, and add new ones, in the `with` block. They are written even
    where it ends with an error: a score cost more than the rest.

    Args:
        files: The files of a block.

    Yields:
        Nothing: the rules of this process find them.
    """
    _open.append(files)
    try:
        yield
    finally:
        _open.remove(files)
        files.write_changes()


class EncoderClassifierRule:
    """A rule that scores documents by a model, and drops those beyond its limits."""

    kind = "encoder_classifier"

    def __init__(self, config: EncoderClassifierConfig) -> None:
        self._config = config
        self._folder = read_encoder_folder(config)
        self.limits = list_score_limits(config)

    @cached_property
    def _key(self) -> str:
        """Name of the folder of its scores."""
        config = self._config
        settings = config.model_dump(mode="json", include={"label", "max_tokens", "device"})
        digests = [[path.name, compute_file_digest(path)] for path in config.files]
        return compute_json_digest(settings, digests)

    @cached_property
    def _model(self) -> "EncoderModel":
        from llmsys.data_pipeline.rules.encoder_model import EncoderModel  # imports torch

        return EncoderModel(self._config, self._folder)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts by score."""
        scores = self._score_texts(batch.texts).astype(np.float64)
        return apply_thresholds(self.limits, {"score": scores}, len(batch))

    def _score_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        if not _open:
            return self._model.score_texts(texts) if texts else np.zeros(0, np.float32)
        files = _open[-1]
        names = [xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass")) for text in texts]
        known = files.read_scores(self._key) if names else {}
        missing = {name: text for name, text in zip(names, texts, strict=True) if name not in known}
        if missing:
            found = self._model.score_texts(list(missing.values()))
            files.add_scores(self._key, dict(zip(missing, found.tolist(), strict=True)))
        return np.array([known[name] for name in names], np.float32)

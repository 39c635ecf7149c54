"""Documents kept or dropped by the score that a classifier of the user's gives to one label.

Reads texts, asks a fastText model or a linear model of ours, gives the score as a statistic. A fastText model sees the
text as one line, as in datatrove and DCLM; its library is an extra.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.classify.linear import LinearScorer, load_linear
from data_pipeline.rules.batch import TextBatch
from data_pipeline.rules.verdict import Limit, Verdicts, first_broken
from llmsys.config.custom_rules import FasttextClassifierConfig, LinearClassifierConfig
from llmsys.errors import DataError

_PREFIX = "__label__"


class Classifier:
    """Drops documents by the score of a label."""

    def __init__(self, config: FasttextClassifierConfig | LinearClassifierConfig) -> None:
        self.kind = config.kind
        self._model: _Fasttext | _Linear
        self._model = _Linear(config) if isinstance(config, LinearClassifierConfig) else _Fasttext(config)
        self.limits = classifier_limits(config)

    def judge(self, batch: TextBatch) -> Verdicts:
        """Verdicts by the score."""
        return first_broken(self.limits, {"score": self._model.scores(batch.texts)}, len(batch))


def classifier_limits(config: FasttextClassifierConfig | LinearClassifierConfig) -> list[Limit]:
    """The scores between which a document stays."""
    return [
        Limit(f"score of {config.label}", "score", "below", config.min_score),
        Limit(f"score of {config.label}", "score", "above", config.max_score),
    ]


class _Linear:
    def __init__(self, config: LinearClassifierConfig) -> None:
        self._scorer = LinearScorer(load_linear(config.model))
        self._column = _position(config.label, self._scorer.model.labels, config.model)

    def scores(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        return self._scorer.scores(texts)[:, self._column]


class _Fasttext:
    def __init__(self, config: FasttextClassifierConfig) -> None:
        self._model = _load(config.model)
        labels = [label.removeprefix(_PREFIX) for label in _predict(self._model, "")]
        _position(config.label, labels, config.model)
        self._label = _PREFIX + config.label

    def scores(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        found = (_predict(self._model, text).get(self._label, 0.0) for text in texts)
        return np.fromiter(found, np.float64, len(texts)).clip(0.0, 1.0)  # its probabilities may be 1.00001


def _load(path: Path) -> Any:
    import fasttext  # an extra; side_files says so when it is missing

    try:
        return fasttext.load_model(str(path))
    except ValueError as error:
        raise DataError(f"{path} cannot be used as a fastText model: {error}. Name a .bin or .ftz file.") from None


def _predict(model: Any, text: str) -> dict[str, float]:
    labels, scores = model.predict(text.strip().replace("\n", " "), k=-1, threshold=0.0)
    return dict(zip(labels, map(float, scores), strict=True))


def _position(label: str, labels: Sequence[str], model: Path) -> int:
    if label not in labels:
        raise DataError(
            f"{model} has no label {label!r}; its labels are {', '.join(labels)}. Set label to one of them."
        )
    return list(labels).index(label)

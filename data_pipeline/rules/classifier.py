"""Keep or drop documents by the score that a user's classifier gives to one label.

The classifier is a fastText model (an optional dependency) or a linear model of `data_pipeline.classify`. fastText gets
the text as one line, as in datatrove and DCLM. The score is a statistic of the rule.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.classify.linear_model import LinearScorer, load_linear_model
from data_pipeline.rules.document_batch import DocumentBatch
from data_pipeline.rules.verdict import RuleVerdicts, ThresholdTest, apply_thresholds
from llmsys.config.custom_rules import FastTextClassifierConfig, LinearClassifierConfig
from llmsys.errors import DataError

_PREFIX = "__label__"


class ClassifierRule:
    """A rule that drops documents by the score of a label."""

    def __init__(self, config: FastTextClassifierConfig | LinearClassifierConfig) -> None:
        self.kind = config.kind
        self._model: _FasttextModel | _LinearModel
        self._model = _LinearModel(config) if isinstance(config, LinearClassifierConfig) else _FasttextModel(config)
        self.limits = list_classifier_thresholds(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts by score."""
        return apply_thresholds(self.limits, {"score": self._model.predict_scores(batch.texts)}, len(batch))


def list_classifier_thresholds(config: FastTextClassifierConfig | LinearClassifierConfig) -> list[ThresholdTest]:
    """Return the minimum and maximum score of a kept document."""
    return [
        ThresholdTest(f"score of {config.label}", "score", "below", config.min_score),
        ThresholdTest(f"score of {config.label}", "score", "above", config.max_score),
    ]


class _LinearModel:
    def __init__(self, config: LinearClassifierConfig) -> None:
        self._scorer = LinearScorer(load_linear_model(config.model))
        self._column = _get_label_index(config.label, self._scorer.model.labels, config.model)

    def predict_scores(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        return self._scorer.predict_probabilities(texts)[:, self._column]


class _FasttextModel:
    def __init__(self, config: FastTextClassifierConfig) -> None:
        self._model = _load_fasttext(config.model)
        labels = [label.removeprefix(_PREFIX) for label in _predict_label_scores(self._model, "")]
        _get_label_index(config.label, labels, config.model)
        self._label = _PREFIX + config.label

    def predict_scores(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        found = (_predict_label_scores(self._model, text).get(self._label, 0.0) for text in texts)
        return np.fromiter(found, np.float64, len(texts)).clip(0.0, 1.0)  # fastText's probabilities may be 1.00001


def _load_fasttext(path: Path) -> Any:
    import fasttext  # an extra; its absence is reported before, with the install command

    try:
        return fasttext.load_model(str(path))
    except ValueError as error:
        raise DataError(f"{path} is not a valid fastText model: {error}. Give a .bin or .ftz file.") from None


def _predict_label_scores(model: Any, text: str) -> dict[str, float]:
    labels, scores = model.predict(text.strip().replace("\n", " "), k=-1, threshold=0.0)
    return dict(zip(labels, map(float, scores), strict=True))


def _get_label_index(label: str, labels: Sequence[str], model: Path) -> int:
    if label not in labels:
        raise DataError(
            f"{model} has no label {label!r}; its labels are {', '.join(labels)}. Set label to one of them."
        )
    return list(labels).index(label)

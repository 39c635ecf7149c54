"""Keep or drop documents by the score that a user's classifier gives to one label.

The classifier is a fastText model (an optional dependency) or a linear model. fastText gets
the text as one line, as in datatrove and DCLM. The score is a statistic of the rule.

`LinearModel` is multinomial logistic regression over hashed features.

Reads and writes one .npz file with `weights` (float32, 2^bits x labels), `bias` (float32, labels)
and `header`: JSON as bytes with format, version, labels and features. A score is softmax(bias + EMA
of the weights of the text's features). Training minimizes the loss with an L2 penalty by L-BFGS.

Invariants:
- The length of a text does not matter: each of its features counts 1 / their number.
- Equal texts give an equal model on the same machine.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.config.custom_rules import FastTextClassifierConfig, LinearClassifierConfig
from llmsys.data_pipeline.rules.hashed_features import FeatureConfig, FeatureHasher
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
)
from llmsys.errors import DataError

FORMAT = "llmsys-linear"
VERSION = 1
_MAX_BITS = 28


@dataclass(frozen=True)
class LinearModel:
    """Weights of a model, its labels and its features."""

    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    features: FeatureConfig

    def save(self, path: Path) -> None:
        """Write the model; equal models give equal bytes."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "labels": self.labels,
            **self.features._asdict(),
        }
        coded = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez_compressed(file, weights=self.weights, bias=self.bias, header=coded)


def load_linear_model(path: Path) -> LinearModel:
    """Load a model.

    Args:
        path: a file that `LinearModel.save` wrote.

    Returns:
        The model.

    Raises:
        DataError: if the file is not a linear model, or is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:  # a pickle could execute code
            weights = file["weights"]
            bias = file["bias"]
            coded = file["header"]
        header: dict[str, Any] = json.loads(coded.tobytes())
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise ValueError(f"it is {header['format']} version {header['version']}")
        shortest, longest = header["char_ngrams"]
        features = FeatureConfig(
            int(header["bits"]), int(header["word_ngrams"]), (int(shortest), int(longest))
        )
        labels = tuple(map(str, header["labels"]))
        if not 1 <= features.bits <= _MAX_BITS or weights.shape != (
            1 << features.bits,
            len(labels),
        ):
            raise ValueError(f"its weights have shape {weights.shape}")
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            f"{path} is not a valid linear model: {error}. Train one with: python "
            f"tools/train_classifier.py LABELLED... --output {path}"
        ) from None
    return LinearModel(weights.astype(np.float32), bias.astype(np.float32), labels, features)


class LinearScorer:
    """Scorer of texts. Keep one per process."""

    def __init__(self, model: LinearModel) -> None:
        self.model = model
        self._features = FeatureHasher(model.features)

    def predict_probabilities(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return the probabilities (N, labels); each row depends on its text alone."""
        features = self._features.extract_features(texts)
        counts = np.maximum(np.bincount(features.documents, minlength=len(texts)), 1)
        columns = [
            np.bincount(features.documents, self.model.weights[features.numbers, label], len(texts))
            / counts
            for label in range(len(self.model.labels))
        ]
        logits = np.stack(columns, axis=1) + self.model.bias
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


_SLICE_TEXTS = 1_000


def train_linear_model(
    texts: Sequence[str],
    labels: Sequence[str],
    features: FeatureConfig,
    penalty: float = 1e-6,
    steps: int = 200,
) -> LinearModel:
    """Train a model.

    Args:
        texts: the training texts.
        labels: a label per text; at least two distinct ones.
        features: the features of the model.
        penalty: weight of the sum of squared weights, relative to the mean loss of a text.
        steps: maximum iterations of L-BFGS.
    """
    from scipy.optimize import minimize

    names = tuple(sorted(set(labels)))
    targets = np.array([names.index(label) for label in labels])
    matrix, used = _build_feature_matrix(texts, features)
    wanted = np.eye(len(names))[targets]

    def compute_loss_and_gradient(
        flat: npt.NDArray[np.float64],
    ) -> tuple[float, npt.NDArray[np.float64]]:
        weights = flat.reshape(-1, len(names))
        logits = matrix @ weights
        logits -= logits.max(axis=1, keepdims=True)  # keeps exp finite
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        slope = matrix.T @ (np.exp(logs) - wanted) / len(targets) + 2 * penalty * weights
        value = -(logs * wanted).sum() / len(targets) + penalty * float((weights**2).sum())
        return value, np.asarray(slope).ravel()

    start = np.zeros(matrix.shape[1] * len(names))
    found = minimize(
        compute_loss_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}
    ).x.reshape(-1, len(names))
    weights = np.zeros((1 << features.bits, len(names)), np.float32)
    # Features that no text has keep the weight 0; the last row is the bias.
    weights[used] = found[:-1]
    return LinearModel(weights, found[-1].astype(np.float32), names, features)


def _build_feature_matrix(
    texts: Sequence[str], config: FeatureConfig
) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return the shares of the features that occur with a last column of ones, and the numbers
    of those features.
    """
    from scipy.sparse import csr_matrix, hstack

    finder = FeatureHasher(config)
    parts = [
        finder.extract_features(texts[first : first + _SLICE_TEXTS])
        for first in range(0, len(texts), _SLICE_TEXTS)
    ]
    numbers = np.concatenate([part.numbers for part in parts])
    documents = np.concatenate(
        [part.documents + _SLICE_TEXTS * index for index, part in enumerate(parts)]
    )
    used, columns = np.unique(numbers, return_inverse=True)
    share = 1.0 / np.maximum(np.bincount(documents, minlength=len(texts)), 1)
    matrix = csr_matrix((share[documents], (documents, columns)), shape=(len(texts), len(used)))
    return hstack([matrix, np.ones((len(texts), 1))], format="csr"), used


_PREFIX = "__label__"


class ClassifierRule:
    """A rule that drops documents by the score of a label."""

    def __init__(self, config: FastTextClassifierConfig | LinearClassifierConfig) -> None:
        self.kind = config.kind
        self._model: _FasttextModel | _LinearModel
        self._model = (
            _LinearModel(config)
            if isinstance(config, LinearClassifierConfig)
            else _FasttextModel(config)
        )
        self.limits = list_classifier_thresholds(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts by score."""
        return apply_thresholds(
            self.limits, {"score": self._model.predict_scores(batch.texts)}, len(batch)
        )


def list_classifier_thresholds(
    config: FastTextClassifierConfig | LinearClassifierConfig,
) -> list[ThresholdTest]:
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
        # Even an empty text gets a score for every label.
        labels = [label.removeprefix(_PREFIX) for label in _predict_label_scores(self._model, "")]
        _get_label_index(config.label, labels, config.model)
        self._label = _PREFIX + config.label

    def predict_scores(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        found = (_predict_label_scores(self._model, text).get(self._label, 0.0) for text in texts)
        # fastText's probabilities may be 1.00001
        return np.fromiter(found, np.float64, len(texts)).clip(0.0, 1.0)


def _load_fasttext(path: Path) -> Any:
    import fasttext  # an extra; its absence is reported before, with the install command

    try:
        return fasttext.load_model(str(path))
    except ValueError as error:
        raise DataError(
            f"{path} is not a valid fastText model: {error}. Give a .bin or .ftz file."
        ) from None


def _predict_label_scores(model: Any, text: str) -> dict[str, float]:
    # fastText raises on a text with a newline.
    labels, scores = model.predict(text.strip().replace("\n", " "), k=-1, threshold=0.0)
    return dict(zip(labels, map(float, scores), strict=True))


def _get_label_index(label: str, labels: Sequence[str], model: Path) -> int:
    if label not in labels:
        raise DataError(
            f"{model} has no label {label!r}; its labels are {', '.join(labels)}. Set label to "
            "one of them."
        )
    return list(labels).index(label)

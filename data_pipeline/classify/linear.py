"""The linear model: a weight per feature and label, kept in one .npz file, and what it says about texts.

The file holds `weights` (float32, 2^bits x labels), `bias` (float32, labels) and `header`: JSON as bytes with format,
version, labels and the features. A score is softmax(bias + mean of the weights of the text's features).
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.classify.features import FeatureConfig, FeatureHasher
from llmsys.errors import DataError

FORMAT = "llmsys-linear"
VERSION = 1
_MOST_BITS = 28


@dataclass(frozen=True)
class LinearModel:
    """Weights and what they are about."""

    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    labels: tuple[str, ...]
    features: FeatureConfig

    def save(self, path: Path) -> None:
        """Write the model; the same model gives the same bytes."""
        header = {"format": FORMAT, "version": VERSION, "labels": self.labels, **self.features._asdict()}
        coded = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez_compressed(file, weights=self.weights, bias=self.bias, header=coded)


def load_linear_model(path: Path) -> LinearModel:
    """Read a model; DataError when the file is none, or is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            weights, bias, coded = file["weights"], file["bias"], file["header"]
        header: dict[str, Any] = json.loads(coded.tobytes())
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise ValueError(f"it is {header['format']} version {header['version']}")
        shortest, longest = header["char_ngrams"]
        features = FeatureConfig(int(header["bits"]), int(header["word_ngrams"]), (int(shortest), int(longest)))
        labels = tuple(map(str, header["labels"]))
        if not 1 <= features.bits <= _MOST_BITS or weights.shape != (1 << features.bits, len(labels)):
            raise ValueError(f"its weights have the shape {weights.shape}")
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            f"{path} cannot be used as a linear model: {error}. "
            f"Make one with: python tools/train_classifier.py LABELLED... --output {path}"
        ) from None
    return LinearModel(weights.astype(np.float32), bias.astype(np.float32), labels, features)


class LinearScorer:
    """Scores texts. Keep one per process."""

    def __init__(self, model: LinearModel) -> None:
        self.model = model
        self._features = FeatureHasher(model.features)

    def predict_probabilities(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Probabilities, one row a text and one column a label; each row depends on its text alone."""
        features = self._features.extract_features(texts)
        counts = np.maximum(np.bincount(features.documents, minlength=len(texts)), 1)
        columns = [
            np.bincount(features.documents, self.model.weights[features.numbers, label], len(texts)) / counts
            for label in range(len(self.model.labels))
        ]
        logits = np.stack(columns, axis=1) + self.model.bias
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

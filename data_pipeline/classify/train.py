"""Labelled texts in, a linear model out: multinomial logistic regression with an L2 penalty, by L-BFGS.

The features of a text count with 1 / their number, so that its length does not matter. The same texts give the same
model on the same machine.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.classify.features import FeatureConfig, FeatureHasher
from data_pipeline.classify.linear import LinearModel

_SLICE_TEXTS = 1_000


def train_linear_model(
    texts: Sequence[str], labels: Sequence[str], features: FeatureConfig, penalty: float = 1e-6, steps: int = 200
) -> LinearModel:
    """Fit a model.

    Args:
        texts: what is labelled.
        labels: a label per text, two or more in all.
        features: what the model sees of a text.
        penalty: weight of the sum of squared weights beside the mean loss of a text.
        steps: iterations of L-BFGS at most.
    """
    from scipy.optimize import minimize

    names = tuple(sorted(set(labels)))
    targets = np.array([names.index(label) for label in labels])
    matrix, used = _build_feature_matrix(texts, features)
    wanted = np.eye(len(names))[targets]

    def compute_loss_and_gradient(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        weights = flat.reshape(-1, len(names))
        logits = matrix @ weights
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        slope = matrix.T @ (np.exp(logs) - wanted) / len(targets) + 2 * penalty * weights
        value = -(logs * wanted).sum() / len(targets) + penalty * float((weights**2).sum())
        return value, np.asarray(slope).ravel()

    start = np.zeros(matrix.shape[1] * len(names))
    found = minimize(compute_loss_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x.reshape(-1, len(names))
    weights = np.zeros((1 << features.bits, len(names)), np.float32)
    weights[used] = found[:-1]
    return LinearModel(weights, found[-1].astype(np.float32), names, features)


def _build_feature_matrix(texts: Sequence[str], config: FeatureConfig) -> tuple[Any, npt.NDArray[np.int64]]:
    """Shares of the features that occur, and a last column of ones; with the numbers of those features."""
    from scipy.sparse import csr_matrix, hstack

    finder = FeatureHasher(config)
    parts = [finder.extract_features(texts[first : first + _SLICE_TEXTS]) for first in range(0, len(texts), _SLICE_TEXTS)]
    numbers = np.concatenate([part.numbers for part in parts])
    documents = np.concatenate([part.documents + _SLICE_TEXTS * index for index, part in enumerate(parts)])
    used, columns = np.unique(numbers, return_inverse=True)
    share = 1.0 / np.maximum(np.bincount(documents, minlength=len(texts)), 1)
    matrix = csr_matrix((share[documents], (documents, columns)), shape=(len(texts), len(used)))
    return hstack([matrix, np.ones((len(texts), 1))], format="csr"), used

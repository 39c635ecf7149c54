"""Texts in, language codes and probabilities out, by a naive Bayes model over byte n-grams that ships in its package.

py3langid (Lui and Baldwin 2012) normalises its scores by the square root of the length, so that they can be compared
with a threshold. It reads the beginning of a text only, which costs little accuracy and makes long pages cheap.
"""

from functools import lru_cache

import numpy as np
import pyarrow as pa
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from llmsys.config.text import LanguageConfig


def identify(texts: pa.Array, config: LanguageConfig) -> tuple[pa.Array, pa.Array]:
    """The best language of each text.

    Args:
        texts: string or large_string without nulls.
        config: how much of each text to read.

    Returns:
        ISO 639-1 codes (string) and probabilities (float32).
    """
    identifier = _identifier()
    found = [identifier.classify(text[: config.sample_characters]) for text in texts.to_pylist()]
    codes = pa.array([code for code, _ in found], pa.string())
    return codes, pa.array([score for _, score in found], pa.float32())


def keep_mask(codes: pa.Array, scores: pa.Array, config: LanguageConfig) -> pa.Array:
    """Which texts stay: a wanted language with a probability above the minimum."""
    sure = np.asarray(scores.to_numpy(zero_copy_only=False) > config.minimum_score)
    wanted = np.array([not config.keep or code in config.keep for code in codes.to_pylist()], np.bool_)
    return pa.array(sure & wanted)


@lru_cache(maxsize=1)
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

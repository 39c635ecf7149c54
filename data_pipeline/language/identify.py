"""Texts in, language codes and probabilities out, by models that ship inside their packages.

`py3langid` gives probabilities that can be compared with a threshold; `cld2` knows more languages; `combined` asks
both, believes CLD2 only where py3langid cannot know better, and counts words that tell close neighbours apart. Each
reads the beginning of a text only, which costs little accuracy and makes long pages cheap.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.language.cld2 import UNKNOWN, detect_languages
from data_pipeline.language.codes import BAYES_CODES, normalize_language_code
from data_pipeline.language.naive_bayes import load_naive_bayes_model
from data_pipeline.language.serbian_latin import find_serbian_share
from data_pipeline.language.similar_languages import GROUPS, count_marker_words
from llmsys.config.language import LanguageConfig

# No language that CLD2 alone knows is taken for one of these with more than this probability.
_APART = "ar cs da de el en es fa fi fr he hu it ja ko nl pl pt ro ru sv th tr uk vi zh"
_UNMISTAKABLE = frozenset(_APART.split())
_SURE = 0.9

_Identified = tuple[list[str], npt.NDArray[np.float64]]


def identify_languages(texts: pa.Array, config: LanguageConfig) -> tuple[pa.Array, pa.Array]:
    """The best language of each text.

    Args:
        texts: string or large_string without nulls.
        config: which identifier to ask, and how much of each text to read.

    Returns:
        Codes as in `code.py` (string) and probabilities (float32).
    """
    beginnings = [text[: config.max_characters] for text in texts.to_pylist()]
    match config.kind:
        case "py3langid":
            codes, scores = _identify_with_py3langid(beginnings)
        case "cld2":
            codes, scores = _identify_with_cld2(beginnings)
        case "combined":
            codes, scores = _identify_with_both(beginnings)
    return pa.array(codes, pa.string()), pa.array(scores, pa.float32())


def compute_keep_mask(codes: pa.Array, scores: pa.Array, config: LanguageConfig) -> pa.Array:
    """Which texts stay: a wanted language with a probability above the minimum."""
    sure = np.asarray(scores.to_numpy(zero_copy_only=False) > config.min_score)
    wanted = np.array([not config.languages or code in config.languages for code in codes.to_pylist()], np.bool_)
    return pa.array(sure & wanted)


def _identify_with_py3langid(texts: Sequence[str]) -> _Identified:
    codes, scores = load_naive_bayes_model().predict_languages(texts)
    return [normalize_language_code(code) for code in codes], scores


def _identify_with_cld2(texts: Sequence[str]) -> _Identified:
    """CLD2's language, and the share of the text that is in it, halved when CLD2 is not sure."""
    found = detect_languages(texts)
    scores = np.array([one.share * (1 if one.sure else 0.5) for one in found], np.float64)
    return [normalize_language_code(one.code) for one in found], scores


def _identify_with_both(texts: Sequence[str]) -> _Identified:
    """py3langid's language and probability; CLD2's where it names a language that py3langid does not know.

    CLD2 is not asked where py3langid is sure of a language that no such language is taken for.
    """
    codes, scores = _identify_with_py3langid(texts)
    asked = [number for number, code in enumerate(codes) if code not in _UNMISTAKABLE or scores[number] <= _SURE]
    for number, code, score in zip(asked, *_identify_with_cld2([texts[number] for number in asked]), strict=True):
        if code not in BAYES_CODES and code != UNKNOWN:
            codes[number], scores[number] = code, score
    for group in GROUPS:
        _resolve_similar_languages(texts, codes, scores, group)
    _find_latin_serbian(texts, codes, scores)
    return codes, scores


_ASKED = frozenset({"hr", "bs"})
_LATIN_SERBIAN = frozenset({"sr", "hr", "bs", "sl"})  # what py3langid shares the probability of such a text among


def _find_latin_serbian(texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64]) -> None:
    """Correct the codes of texts in Serbian with Latin letters; the score is as for neighbours."""
    for number, code in enumerate(codes):
        share = find_serbian_share(texts[number]) if code in _ASKED else None
        if share is not None:
            in_group = float(load_naive_bayes_model().compute_probability([texts[number]], _LATIN_SERBIAN)[0])
            codes[number], scores[number] = "sr", in_group * share


def _resolve_similar_languages(
    texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64], group: frozenset[str]
) -> None:
    """Let marker words decide between the languages of a group; the score is the probability of the group, times that
    of the language by its share of the words (Laplace's rule of succession), where that is more than py3langid's.
    """
    asked = [number for number, code in enumerate(codes) if code in group]
    sure = load_naive_bayes_model().compute_probability([texts[number] for number in asked], group)
    for number, in_group in zip(asked, sure.tolist(), strict=True):
        found = count_marker_words(texts[number], group)
        best = max(found, key=lambda code: (found[code], code == codes[number]))
        share = (found[best] + 1) / (sum(found.values()) + 2)
        least = scores[number] if best == codes[number] else 0.0
        codes[number], scores[number] = best, max(least, in_group * share)

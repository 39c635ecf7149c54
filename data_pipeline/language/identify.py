"""Identify the language of texts, with models that ship inside their packages.

`py3langid` returns probabilities that can be compared with a threshold. `cld2` knows more languages. `combined` runs
both, accepts CLD2 only for languages that py3langid does not know, and counts marker words of close languages. Only the
beginning of a text is read, which costs little accuracy and makes long pages cheap.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.language.cld2 import UNKNOWN, detect_languages
from data_pipeline.language.codes import BAYES_CODES, normalize_language_code
from data_pipeline.language.naive_bayes import load_naive_bayes_model
from data_pipeline.language.similar_languages import GROUPS, count_marker_words
from llmsys.config.language import LanguageConfig

# py3langid does not mistake any language that only CLD2 knows for one of these with more than this probability.
_APART = "ar cs da de el en es fa fi fr he hu it ja ko nl pl pt ro ru sv th tr uk vi zh"
_UNMISTAKABLE = frozenset(_APART.split())
_SURE = 0.9

_Identified = tuple[list[str], npt.NDArray[np.float64]]


def identify_languages(texts: pa.Array, config: LanguageConfig) -> tuple[pa.Array, pa.Array]:
    """Identify the best language of each text.

    Args:
        texts: string or large_string without nulls.
        config: the identifier, and the number of characters to read.

    Returns:
        Codes as in `language.codes` (string) and probabilities (float32).
    """
    beginnings = [text[: config.max_characters] for text in texts.to_pylist()]
    match config.kind:
        case "py3langid":
            codes, scores = _identify_with_py3langid(beginnings)
        case "cld2":
            codes, scores = _identify_with_cld2(beginnings)
        case "combined":
            codes, scores = _identify_with_both(beginnings)
        case unreachable:
            assert_never(unreachable)
    return pa.array(codes, pa.string()), pa.array(scores, pa.float32())


def compute_keep_mask(codes: pa.Array, scores: pa.Array, config: LanguageConfig) -> pa.Array:
    """Mask the texts to keep: those in a wanted language with a probability above the minimum.

    Args:
        codes: string, from `identify_languages`.
        scores: float32, from `identify_languages`.
        config: the wanted languages (empty: all) and the minimum score.

    Returns:
        Boolean array.
    """
    sure = np.asarray(scores.to_numpy(zero_copy_only=False) > config.min_score)
    wanted = np.array([not config.languages or code in config.languages for code in codes.to_pylist()], np.bool_)
    return pa.array(sure & wanted)


def _identify_with_py3langid(texts: Sequence[str]) -> _Identified:
    codes, scores = load_naive_bayes_model().predict_languages(texts)
    return [normalize_language_code(code) for code in codes], scores


def _identify_with_cld2(texts: Sequence[str]) -> _Identified:
    """Return CLD2's languages and shares of the text, halved where CLD2 is not sure."""
    found = detect_languages(texts)
    scores = np.array([result.share * (1 if result.sure else 0.5) for result in found], np.float64)
    return [normalize_language_code(result.code) for result in found], scores


def _identify_with_both(texts: Sequence[str]) -> _Identified:
    """Return py3langid's languages and probabilities; CLD2's where it names a language that py3langid does not know.

    CLD2 is skipped where py3langid is sure of a language that no such language is mistaken for.
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
_LATIN_SERBIAN = frozenset({"sr", "hr", "bs", "sl"})  # py3langid divides the probability of such a text among these


def _find_latin_serbian(texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64]) -> None:
    """Correct the codes of Serbian texts in Latin letters; scores as in `_resolve_similar_languages`."""
    for number, code in enumerate(codes):
        if code not in _ASKED:
            continue
        from data_pipeline.language.serbian_latin import find_serbian_share  # most crawls have no such text

        share = find_serbian_share(texts[number])
        if share is not None:
            in_group = float(load_naive_bayes_model().compute_probability([texts[number]], _LATIN_SERBIAN)[0])
            codes[number], scores[number] = "sr", in_group * share


def _resolve_similar_languages(
    texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64], group: frozenset[str]
) -> None:
    """Choose between the languages of a group by marker words.

    The score is the probability of the group times the language's share of the marker words (Laplace's rule of
    succession), or py3langid's probability if that is larger.
    """
    asked = [number for number, code in enumerate(codes) if code in group]
    sure = load_naive_bayes_model().compute_probability([texts[number] for number in asked], group)
    for number, in_group in zip(asked, sure.tolist(), strict=True):
        found = count_marker_words(texts[number], group)
        best = max(found, key=lambda code: (found[code], code == codes[number]))
        share = (found[best] + 1) / (sum(found.values()) + 2)
        least = scores[number] if best == codes[number] else 0.0
        codes[number], scores[number] = best, max(least, in_group * share)

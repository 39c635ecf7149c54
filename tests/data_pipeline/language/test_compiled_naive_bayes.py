"""The compiled core sums the weights of languages as numpy does, bit by bit."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from llmsys.config.language import LanguageConfig
from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.language import identify, naive_bayes
from llmsys.data_pipeline.language.naive_bayes import NaiveBayesModel
from tests.data_pipeline.language.test_identify import NEIGHBOURS, ODD, SENTENCES, SERBIAN
from tests.helpers.hostile_texts import list_hostile_texts
from tests.helpers.native_core import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def models(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> tuple[NaiveBayesModel, NaiveBayesModel]:
    """Return the model with the core, and without it."""
    model = naive_bayes.load_naive_bayes_model()
    found = []
    for core in (built_core, CoreUnavailableError("off")):
        monkeypatch.setattr(naive_bayes, "load_core", lambda core=core: core)
        found.append(dataclasses.replace(model))
        assert (found[-1].compiled_sums is None) == (core is not built_core)
    return found[0], found[1]


def list_texts(seed: int) -> list[str]:
    """List texts of all lengths around those at which a text is read in several places."""
    choose = random.Random(seed)
    plain = [*SENTENCES.values(), *NEIGHBOURS.values(), *SERBIAN]
    joined = " ".join(choose.sample(plain, len(plain))) * 3
    cut = [joined[start : start + choose.randrange(400)] for start in range(0, len(joined), 31)]
    lengths = [joined[:size] for size in (1, 7, 8, 127, 128, 129, 135, 136, 255, 256)]
    return [*ODD, *plain, *cut, *lengths, *list_hostile_texts(seed, 60, "de"), joined * 20]


def find_differences(
    models: tuple[NaiveBayesModel, NaiveBayesModel], texts: Sequence[str]
) -> list[str]:
    """Return the texts whose probabilities differ in any bit."""
    compiled, plain = models
    different = []
    (encoded,) = naive_bayes._iter_encoded_slices(texts)
    ours = compiled._compute_label_probabilities(encoded)
    expected = plain._compute_label_probabilities(encoded)
    for text, row, other in zip(texts, ours, expected, strict=True):
        if row.tobytes() != other.tobytes():
            different.append(text)
    return different


@pytest.mark.parametrize("seed", [0, 1])
def test_hostile_texts_have_the_same_probabilities_in_both_orders(
    models: tuple[NaiveBayesModel, NaiveBayesModel], seed: int
) -> None:
    texts = list_texts(seed)
    assert find_differences(models, texts) == []
    assert find_differences(models, texts[::-1]) == []


def test_codes_and_scores_are_the_same_with_the_core_on_and_off(
    models: tuple[NaiveBayesModel, NaiveBayesModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pa.array(list_texts(2), pa.large_string())
    found = []
    for model in models:
        monkeypatch.setattr(identify, "load_naive_bayes_model", lambda model=model: model)
        found.append(identify.identify_languages(texts, LanguageConfig()))
    assert found[0][0].equals(found[1][0])
    assert found[0][1].equals(found[1][1])
    assert {*SENTENCES, *NEIGHBOURS, "sr"} <= set(found[0][0].to_pylist())


def test_weights_of_another_kind_are_left_to_python(
    models: tuple[NaiveBayesModel, NaiveBayesModel],
) -> None:
    weights = np.array([[-3.0, -4.0], [-5.0, -6.0]], np.float16)
    assert naive_bayes._pad_halves(weights).shape == (2, 8)
    small, infinite = np.full_like(weights, -1e-6), np.full_like(weights, -np.inf)
    for bad in (weights.astype(np.float32), small, infinite):
        assert naive_bayes._pad_halves(bad).shape == (0, 8)
    empty = naive_bayes._pad_halves(weights.astype(np.float32))
    assert dataclasses.replace(models[0], halves_FP=empty).compiled_sums is None


@pytest.mark.parametrize("name", ["feature", "places_F"])
@pytest.mark.parametrize("number", [-2, 1 << 20])
def test_a_number_beyond_the_tables_is_an_error(
    models: tuple[NaiveBayesModel, NaiveBayesModel],
    built_core: NativeCore,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
) -> None:
    monkeypatch.setattr(naive_bayes, "load_core", lambda: built_core)
    damaged = getattr(models[0], name).copy()
    damaged[5] = number
    with pytest.raises(ValueError, match="delete the folders naive_bayes-") as caught:
        _ = dataclasses.replace(models[0], **{name: damaged}).compiled_sums
    assert str(number) in str(caught.value)


def test_moves_beyond_the_tables_read_nothing_else(
    models: tuple[NaiveBayesModel, NaiveBayesModel],
    built_core: NativeCore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naive_bayes, "load_core", lambda: built_core)
    damaged = dataclasses.replace(
        models[0],
        moves=np.full_like(models[0].moves, 0xFFFFFFFF),
        row_base=np.full_like(models[0].row_base, 0xFFFFFF00),
    )
    codes, _ = damaged.predict_languages(list(SENTENCES.values()))
    assert len(codes) == len(SENTENCES)

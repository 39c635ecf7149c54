"""The model of languages is the library's, mapped from the cache folder or unpacked."""

from pathlib import Path

import numpy as np
import pytest

from llmsys.data_pipeline.language import naive_bayes

TEXTS = ["The cat sat on the mat.", "Der Hund schläft im Garten.", "", "日本語の文章です。"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path))
    monkeypatch.setattr(
        naive_bayes, "load_naive_bayes_model", naive_bayes.load_naive_bayes_model.__wrapped__
    )
    return tmp_path


def test_a_mapped_model_is_the_unpacked_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = naive_bayes._unpack_model()
    naive_bayes.load_naive_bayes_model()
    (stored,) = folder.iterdir()  # no temporary folder is left
    assert stored.name.startswith("naive_bayes-")

    def fail() -> None:
        raise AssertionError("the library's file was unpacked again")

    monkeypatch.setattr(naive_bayes, "_unpack_model", fail)
    model = naive_bayes.load_naive_bayes_model()
    for name in naive_bayes._ARRAYS:
        assert not getattr(model, name).flags.writeable
        assert getattr(model, name).dtype == getattr(expected, name).dtype
        assert np.array_equal(getattr(model, name), getattr(expected, name)), name
    assert model.labels == expected.labels
    assert model.num_context_bytes == expected.num_context_bytes
    codes, scores = model.predict_languages(TEXTS)
    other_codes, other_scores = expected.predict_languages(TEXTS)
    assert codes == other_codes
    assert scores.tolist() == other_scores.tolist()


@pytest.mark.parametrize("left", [None, 0, 40, 1000])
@pytest.mark.parametrize("name", ["weights_FL.npy", "model.json"])
def test_an_incomplete_folder_is_left_and_the_model_unpacked(
    folder: Path, name: str, left: int | None
) -> None:
    naive_bayes.load_naive_bayes_model()
    (stored,) = folder.iterdir()
    if left is None:
        (stored / name).unlink()
    else:
        content = (stored / name).read_bytes()
        (stored / name).write_bytes(content[: min(left, len(content) - 1)])
    model = naive_bayes.load_naive_bayes_model()
    assert model.predict_languages(TEXTS)[0] == ["en", "de", *model.predict_languages(TEXTS[2:])[0]]


def test_a_folder_that_cannot_be_written_costs_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("LLMSYS_CACHE", str(folder / "file"))
    assert naive_bayes.load_naive_bayes_model().predict_languages(TEXTS)[0][0] == "en"


def test_sums_are_those_of_a_sparse_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that scipy adds in the order of the features."""
    sparse = pytest.importorskip("scipy.sparse")
    model = naive_bayes.load_naive_bayes_model()
    text = ("Some words of a longer text, and many others. " * 200 + TEXTS[1]).encode()
    encoded = [text, b"", text[:400], *(each.encode() for each in TEXTS)]
    lengths = np.array([len(each) for each in encoded])
    counts = naive_bayes._count_features(model, encoded, lengths)
    starts = np.searchsorted(counts[0], np.arange(len(encoded) + 1))
    monkeypatch.setattr(naive_bayes, "_SUMMED_ROWS", 16)
    assert starts[1] > 2 * naive_bayes._SUMMED_ROWS
    weights = np.log1p(counts[2]).astype(np.float32)
    shape = (len(encoded), len(model.weights_FL))
    product = sparse.csr_array((weights, counts[1], starts), shape=shape) @ model.weights_FL
    expected = product.astype(np.float64)
    expected[np.diff(starts) > 0] += model.prior_L
    found = model._compute_log_posteriors(counts, len(encoded))
    assert found.tolist() == expected.tolist()

"""Documents whose middle comes last: a function of seed and document, whole in packed windows,
and nothing is lost.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmsys.config.fill_in_middle import FillInMiddleConfig
from llmsys.config.loading.load import load_run_config
from llmsys.data.batch import IGNORED, build_batch
from llmsys.data.fill_in_middle import MARKS, MiddleFiller, MiddleTokens
from llmsys.data.fitted_windows import FittedWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import ConfigError
from llmsys.train.build_objective import build_step_batches
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.token_files import write_paged_dataset

EOS, LENGTH = 2, 32
PRE, MID, SUF = 5, 6, 7
SIZES = np.random.default_rng(0).integers(1, LENGTH - MARKS, 300).tolist()
# Every token is another one, but for those that end documents.
DOCUMENTS = [
    [*range(10 + 100 * number, 9 + 100 * number + size), EOS] for number, size in enumerate(SIZES)
]


def build_filler(rate: float = 0.5, spm_rate: float = 0.5, seed: int = 0) -> MiddleFiller:
    return MiddleFiller(
        FillInMiddleConfig(rate=rate, spm_rate=spm_rate),
        MiddleTokens(PRE, MID, SUF),
        ("data", seed),
    )


def restore_plainly(tokens: list[int]) -> tuple[list[int], str]:
    """The document that was rearranged, read mark by mark, and its order."""
    body, end = tokens[:-1], tokens[-1:]
    if PRE not in body:
        return tokens, "plain"
    suf, mid = body.index(SUF), body.index(MID)
    if suf == 1:  # PRE SUF suffix MID prefix middle
        return body[mid + 1 :] + body[2:mid] + end, "SPM"
    return body[1:suf] + body[mid + 1 :] + body[suf + 1 : mid] + end, "PSM"


def fill(filler: MiddleFiller, number: int) -> list[int]:
    tokens: NDArray[np.int64] = np.array(DOCUMENTS[number])
    chosen = filler.select_documents(np.array([number]))[0]
    return (filler.order_parts(tokens, number) if chosen else tokens).tolist()


def test_rearranged_documents_are_the_documents_with_three_marks_by_the_rates() -> None:
    filler, orders = build_filler(rate=0.5, spm_rate=0.25), Counter[str]()
    for number, document in enumerate(DOCUMENTS):
        found = fill(filler, number)
        restored, order = restore_plainly(found)
        assert restored == document
        assert len(found) == len(document) + (MARKS if order != "plain" else 0)
        orders[order] += 1
        assert fill(build_filler(rate=0.5, spm_rate=0.25), number) == found
    assert orders["plain"] == pytest.approx(150, abs=30)
    assert any(
        fill(build_filler(seed=1), number) != fill(build_filler(), number) for number in range(20)
    )
    chosen = build_filler(rate=0.3).select_documents(np.arange(100_000))
    assert chosen.mean() == pytest.approx(0.3, abs=0.01)


def test_cuts_are_uniform() -> None:
    filler = build_filler(rate=1.0, spm_rate=0.0)
    tokens = np.array([*range(10, 30), EOS])
    prefixes = [
        filler.order_parts(tokens, number).tolist().index(SUF) - 1 for number in range(4000)
    ]
    middles = [
        len(tokens) + 1 - filler.order_parts(tokens, number).tolist().index(MID)
        for number in range(4000)
    ]
    # Two uniform cuts among 0 … 20 are 440 / 63 apart on average.
    assert np.mean(middles) == pytest.approx(440 / 63, abs=0.3)
    assert np.mean(prefixes) == pytest.approx((20 - 440 / 63) / 2, abs=0.3)


def test_the_share_of_spm_is_its_rate() -> None:
    tokens = np.array([*range(10, 1010), EOS])  # a prefix is hardly ever empty
    for rate in (0.0, 0.25, 1.0):
        filler = build_filler(rate=1.0, spm_rate=rate)
        found = [filler.order_parts(tokens, number)[1] == SUF for number in range(1000)]
        assert np.mean(found) == pytest.approx(rate, abs=0.05)


def test_packed_windows_hold_rearranged_documents_whole(tmp_path: Path) -> None:
    shards = require_paged(
        open_tokens(
            write_paged_dataset(tmp_path, DOCUMENTS, rows_per_file=30, rows_per_batch=4), "train"
        )
    )
    filler = build_filler()
    windows = FittedWindows(shards, length=LENGTH, seed=3, packing="best_fit", middle=filler)
    expected = Counter(tuple(fill(filler, number)) for number in range(len(DOCUMENTS)))
    found: Counter[tuple[int, ...]] = Counter()
    for number in range(windows.windows_per_epoch):
        batch = build_batch(windows.get_rows([number]), separate_documents=True)
        targets_T, documents_T = batch.targets_BT[0], batch.documents_BT[0]
        for document in documents_T[documents_T >= 0].unique().tolist():
            found[tuple(targets_T[documents_T == document].tolist())] += 1
    assert IGNORED not in {token for document in found for token in document}
    # the buffer is small, and its end is cropped
    assert sum((found & expected).values()) > 0.85 * len(DOCUMENTS)
    assert all(any(whole[: len(one)] == one for whole in expected) for one in found - expected)
    stats = windows.get_packing_stats()
    assert stats["lost_tokens_per_epoch"] + stats["tokens_per_epoch"] == sum(
        len(one) * n for one, n in expected.items()
    )


def test_a_document_that_does_not_fit_with_its_marks_keeps_its_order(tmp_path: Path) -> None:
    sizes = [LENGTH - MARKS, LENGTH - MARKS + 1, 3 * LENGTH] * 20
    documents = [
        [*range(10 + 100 * number, 9 + 100 * number + size), EOS]
        for number, size in enumerate(sizes)
    ]
    shards = require_paged(
        open_tokens(
            write_paged_dataset(tmp_path, documents, rows_per_file=30, rows_per_batch=4), "train"
        )
    )
    windows = FittedWindows(
        shards, length=LENGTH, seed=3, packing="best_fit", middle=build_filler(rate=1.0)
    )
    rows = [windows.get_rows([number]) for number in range(windows.windows_per_epoch)]
    marked: set[int] = set()
    for row in rows:
        tokens = row.tokens[0, 1:]
        if {PRE, MID, SUF} & set(tokens.tolist()):
            assert [int((tokens == mark).sum()) for mark in (PRE, MID, SUF)] == [1, 1, 1]
            marked.add(int(tokens[tokens > EOS + SUF].min()) // 100)
        else:
            body = tokens[tokens > EOS]
            assert (np.diff(body) == 1)[np.diff(body // 100) == 0].all()
    assert len(marked) > 15
    assert {number % 3 for number in marked} == {0}


def test_marks_and_packing_are_checked_before_training(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", symbols=("<fim_prefix>", "<fim_middle>"))
    settings = [
        "batch.packing=best_fit",
        f"data.folder={folder}",
        f"model.vocab_size={VOCABULARY}",
        "tokenizer.vocab_size=300",
        "train.precision=fp32",
    ]
    settings += ["batch.sequence_length=32", "batch.sequences=4"]
    config = load_run_config("train/demo", [*settings, "batch.fill_in_middle={}"])
    with pytest.raises(
        ConfigError, match=r"suffix_token=<fim_suffix> is not a token of the tokenizer"
    ):
        build_step_batches(config, 1, 0)
    same = load_run_config(
        "train/demo", [*settings, "batch.fill_in_middle={suffix_token: <fim_middle>}"]
    )
    with pytest.raises(ConfigError, match="has equal tokens"):
        build_step_batches(same, 1, 0)
    with pytest.raises(
        ConfigError,
        match=r"fill_in_middle: documents are rearranged as a whole, and packing=concatenate",
    ):
        load_run_config("train/demo", ["batch.fill_in_middle={}"])
    assert (
        load_run_config("train/demo", settings).trajectory_settings["batch"]["fill_in_middle"]
        is None
    )
    assert config.trajectory_settings["batch"]["fill_in_middle"]["rate"] == 0.5

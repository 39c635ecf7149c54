"""Packed windows are a function of data, seed and number; documents that fit stay whole, and
nothing comes twice.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.data import fitted_windows
from llmsys.data.batch import IGNORED, build_batch
from llmsys.data.document_packing import Packing, pack_documents
from llmsys.data.fitted_windows import FittedWindows
from llmsys.data.packed_windows import PADDING
from llmsys.dataset.paged_token_shards import PagedTokenShards, require_paged
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import ConfigError
from tests.helpers.token_files import write_paged_dataset
from tests.reference.packing import pack_best_fit, pack_first_fit

PLAIN = {"best_fit": pack_best_fit, "first_fit": pack_first_fit}
EOS, LENGTH = 2, 16
SIZES = np.random.default_rng(0).integers(1, 3 * LENGTH, 150).tolist()
# Every token is another one, but for those that end documents.
DOCUMENTS = [
    [*range(10 + 100 * number, 9 + 100 * number + size), EOS] for number, size in enumerate(SIZES)
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> PagedTokenShards:
    folder = write_paged_dataset(
        tmp_path_factory.mktemp("packed"), DOCUMENTS, rows_per_file=30, rows_per_batch=4
    )
    return require_paged(open_tokens(folder, "train"))


@pytest.fixture(params=["best_fit", "first_fit"])
def windows(
    request: pytest.FixtureRequest, shards: PagedTokenShards, monkeypatch: pytest.MonkeyPatch
) -> FittedWindows:
    """Return windows of several buffers."""
    monkeypatch.setattr(fitted_windows, "BUFFER_TOKENS", 500)
    monkeypatch.setattr(fitted_windows, "MIN_BUFFER_WINDOWS", 1)
    return FittedWindows(shards, length=LENGTH, seed=3, packing=request.param)


@pytest.mark.parametrize("packing", ["best_fit", "first_fit"])
@pytest.mark.parametrize("num_windows", [1, 5, 60, 400])
def test_placements_equal_the_plain_twin(packing: Packing, num_windows: int) -> None:
    sizes = np.minimum(np.array(SIZES), LENGTH)
    placed = pack_documents(sizes, LENGTH, num_windows, packing)
    windows, kept = PLAIN[packing](sizes.tolist(), LENGTH, num_windows)
    assert placed.kept.tolist() == kept
    filled = np.bincount(
        placed.windows[placed.windows >= 0], placed.kept[placed.windows >= 0], num_windows
    )
    assert filled.max() <= LENGTH
    expected = np.bincount(
        [w for w in windows if w >= 0], [k for w, k in zip(windows, kept, strict=True) if w >= 0]
    )
    # Which of equally full windows is taken is free under best fit.
    assert sorted(filled[filled > 0].tolist()) == sorted(expected[expected > 0].tolist())
    if packing == "first_fit":
        assert placed.windows.tolist() == windows


def test_an_epoch_has_every_kept_token_once_and_begins_documents_with_their_opening(
    windows: FittedWindows,
) -> None:
    assert windows.num_buffers > 3
    for epoch in range(2):
        first = epoch * windows.windows_per_epoch
        rows = windows.get_rows(range(first, first + windows.windows_per_epoch))
        batch = build_batch(rows, separate_documents=True)
        tokens, targets = batch.tokens_BT.numpy(), batch.targets_BT.numpy()
        is_padded = rows.documents[:, :-1] == PADDING
        assert ((targets == IGNORED) == is_padded).all()
        counts = Counter(targets[~is_padded].tolist())
        ends = counts.pop(EOS)
        assert set(counts.values()) == {1}
        assert set(counts) <= {token for document in DOCUMENTS for token in document}
        assert ends <= len(DOCUMENTS)
        lost = sum(SIZES) - int((~is_padded).sum())
        assert 0 <= lost < 0.04 * sum(SIZES)
        begins = {document[0] for document in DOCUMENTS if len(document) > 1}
        starts = np.isin(targets, list(begins))
        assert (tokens[starts] == EOS).all()
        # A document that fits a window and is not cropped is whole: its tokens are neighbours in
        # one row.
        for document in [document for document in DOCUMENTS if 2 < len(document) <= LENGTH]:
            places = np.argwhere(np.isin(targets, document[:-1]))
            if len(places) == len(document) - 1:
                assert len(set(places[:, 0])) == 1
                assert np.ptp(places[:, 1]) == len(document) - 2


def test_the_first_input_of_a_window_is_the_token_before_its_first_target(
    windows: FittedWindows,
) -> None:
    numbers = range(2 * windows.windows_per_epoch)
    rows, num_rests = windows.get_rows(numbers), 0
    for number, (first, target) in zip(numbers, rows.tokens[:, :2].tolist(), strict=True):
        # A window may be empty, and nothing tells the place of an end of sequence in its document.
        if target == EOS or not windows.list_documents(number):
            continue
        document, place = divmod(target - 10, 100)
        assert windows.list_documents(number)[0] == (0, document)
        # The token before the rest of a long document is its own, and before its first token ends
        # another document.
        assert first == (DOCUMENTS[document][place - 1] if place else EOS), number
        num_rests += place > 0
    assert num_rests > 9


def test_epochs_pack_other_buffers_in_another_order(windows: FittedWindows) -> None:
    count = windows.windows_per_epoch
    packed = [
        [tuple(windows.list_documents(epoch * count + at)) for at in range(count)]
        for epoch in range(3)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # Long documents fill windows alone in every epoch; short ones get other neighbours.
        shared = [{window for window in packed[epoch] if len(window) > 1} for epoch in (one, other)]
        assert len(shared[0] & shared[1]) < 0.5 * len(shared[0])
    # Buffers hold other documents in each epoch, and the first of a run is not the first of the
    # next epoch.
    per_buffer = windows.windows_per_buffer
    begins = [
        [set(epoch[at : at + per_buffer]) for at in range(0, count, per_buffer)] for epoch in packed
    ]
    assert not any(buffer in begins[0] for buffer in begins[1])


def test_buffers_have_another_order_in_each_epoch(windows: FittedWindows) -> None:
    begins = np.cumsum([0, *SIZES[:-1]])
    distances = []
    for epoch in range(3):
        first = epoch * windows.windows_per_epoch
        found = []
        for buffer in range(windows.num_buffers):
            numbers = range(
                first + buffer * windows.windows_per_buffer,
                first + (buffer + 1) * windows.windows_per_buffer,
            )
            documents = [
                document for number in numbers for _, document in windows.list_documents(number)
            ]
            # On the circle of the stream: the mean of places that lie together.
            angles = 2 * np.pi * begins[documents] / sum(SIZES)
            found.append(np.angle(np.exp(1j * angles).mean()) / (2 * np.pi))
        # In buffers, from one to the next that is read: the rotation of the epoch cancels.
        distances.append(np.round(np.diff(found) % 1 * windows.num_buffers).tolist())
    assert distances[0] != distances[1] != distances[2] != distances[0]


def test_documents_of_one_token_are_found_at_the_edges_of_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitted_windows, "BUFFER_TOKENS", 40)
    monkeypatch.setattr(fitted_windows, "MIN_BUFFER_WINDOWS", 1)
    folder = write_paged_dataset(tmp_path, [[EOS]] * 211, rows_per_file=50, rows_per_batch=10)
    windows = FittedWindows(
        require_paged(open_tokens(folder, "train")), length=LENGTH, seed=0, packing="first_fit"
    )
    count, seen = windows.windows_per_epoch, dict[int, list[int]]()
    for number in range(count):
        for _, document in windows.list_documents(number):
            seen.setdefault(document, []).append(number)
    assert windows.num_buffers == 5
    assert sorted(seen) == list(range(211))
    for document, numbers in seen.items():
        assert windows.list_windows_with_document(document, count).tolist() == numbers


def test_a_document_is_found_in_the_windows_that_have_it(windows: FittedWindows) -> None:
    count = 2 * windows.windows_per_epoch
    seen: dict[int, list[int]] = {}
    for number in range(count):
        for _, document in windows.list_documents(number):
            seen.setdefault(document, []).append(number)
    for document in range(len(DOCUMENTS)):
        assert windows.list_windows_with_document(document, count).tolist() == seen.get(
            document, []
        )
    rows, costs = windows.get_rows(range(9)), windows.compute_attention_cost(range(9))
    for documents, cost in zip(rows.documents[:, :-1], costs, strict=True):
        assert (
            cost == (np.unique(documents[documents != PADDING], return_counts=True)[1] ** 2).sum()
        )


def test_a_window_depends_on_its_number_alone(
    windows: FittedWindows, shards: PagedTokenShards
) -> None:
    other = FittedWindows(shards, length=LENGTH, seed=3, packing=windows.packing)
    numbers = [windows.windows_per_epoch + 3, 0, 7]
    rows = windows.get_rows(numbers)
    for number, row in zip(numbers, rows.tokens, strict=True):
        assert (other.get_rows([number]).tokens[0] == row).all()
    seeded = FittedWindows(shards, length=LENGTH, seed=4, packing=windows.packing)
    assert (seeded.get_rows(numbers).tokens != rows.tokens).any()
    stats = windows.get_packing_stats()
    assert stats["sequences_per_epoch"] == windows.windows_per_epoch
    assert (
        stats["tokens_per_epoch"] + stats["padding_tokens_per_epoch"]
        == windows.windows_per_epoch * LENGTH
    )
    assert stats["tokens_per_epoch"] + stats["lost_tokens_per_epoch"] == pytest.approx(
        sum(SIZES), rel=0.1
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.attention_scope=window"], r"batch\.packing: best_fit keeps documents whole, but "
        r"with attention_scope"),
        (["objective.kind=masked", "model.family=encoder", "model.head={kind: mlm}"],
         r"batch\.packing: best_fit pads sequences, which objective.kind=masked"),
    ],
)  # fmt: skip
def test_packing_that_does_not_fit_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("train/demo", ["batch.packing=best_fit", *words])

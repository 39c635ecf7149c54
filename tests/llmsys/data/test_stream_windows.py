"""A window is a function of data, seed and number, in memory that does not grow with the
documents.
"""

from pathlib import Path

import numpy as np
import pytest

from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset import token_stream
from llmsys.dataset.paged_token_shards import PagedTokenShards, require_paged
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import DataError
from tests.helpers.token_files import write_paged_dataset
from tests.reference.packing import build_stream_window

DOCUMENTS = [[*range(3, 3 + length), 2] for length in (5, 1, 30, 2, 2, 61, 9, 3, 17, 1, 8)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven documents in four files, of record batches with one or two of them."""
    return write_paged_dataset(
        tmp_path_factory.mktemp("stream"), DOCUMENTS, rows_per_file=3, rows_per_batch=2
    )


@pytest.fixture(scope="module")
def shards(written: Path) -> PagedTokenShards:
    return require_paged(open_tokens(written, "train"))


@pytest.mark.parametrize("length", [1, 5, 10, 37, 149])
@pytest.mark.parametrize(
    ("files", "cached"), [(32, 1 << 20), (32, 0), (0, 0)], ids=["small", "medium", "large"]
)
def test_windows_and_their_documents_equal_the_plain_twin_over_three_epochs(
    written: Path, length: int, files: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a small split stay in memory, documents of a medium one too; a large one's are
    found by batch.
    """
    monkeypatch.setattr(token_stream, "MAX_EAGER_FILES", files)
    monkeypatch.setattr(token_stream, "MAX_CACHED_TOKENS", cached)
    shards = require_paged(open_tokens(written, "train"))
    assert shards.stream.is_cached == (cached > 0)
    windows = StreamWindows(shards, length=length, seed=5)
    count = 3 * windows.windows_per_epoch
    rows = windows.get_rows(range(count))
    costs = windows.compute_attention_cost(range(count))
    seen: dict[int, list[int]] = {}
    for index in range(count):
        tokens, documents, owners = build_stream_window(shards, length=length, seed=5, index=index)
        assert rows.tokens[index].tolist() == tokens
        assert rows.documents[index].tolist() == owners
        assert costs[index] == sum(n * n for n in np.unique(owners[:-1], return_counts=True)[1])
        inside = list(dict.fromkeys(document % shards.num_documents for document in documents))
        assert [document for _, document in windows.list_documents(index)] == inside
        for document in inside:
            seen.setdefault(document, []).append(index)
    for document in range(shards.num_documents):
        assert windows.list_windows_with_document(document, count).tolist() == seen.get(
            document, []
        )
        assert windows.list_windows_with_document(document, 3).tolist() == [
            n for n in seen.get(document, []) if n < 3
        ]


@pytest.mark.parametrize(("length", "rows"), [(5, 4), (5, 7), (10, 3), (37, 3), (149, 4), (3, 1)])
def test_consecutive_windows_are_read_on_in_each_row_from_step_to_step(
    shards: PagedTokenShards, length: int, rows: int
) -> None:
    windows, shuffled = (
        StreamWindows(shards, length=length, seed=5, rows=number) for number in (rows, 0)
    )
    each = windows.windows_per_epoch
    for epoch in range(2):
        numbers = np.arange(epoch * each, (epoch + 1) * each)
        found = windows.get_rows(numbers).tokens.tolist()
        # The windows of the shuffled epoch, in another order.
        assert sorted(found) == sorted(shuffled.get_rows(numbers).tokens.tolist())
        for place in range(each - rows):
            # The last target of a window is the first input of the row's next one, but where a
            # row's part of the epoch ends: once in a row.
            assert found[place][-1] == found[place + rows][0], (epoch, place)
    seen: dict[int, list[int]] = {}
    for index in range(2 * each):
        for _, document in windows.list_documents(index):
            seen.setdefault(document, []).append(index)
    for document, indices in seen.items():
        assert windows.list_windows_with_document(document, 2 * each).tolist() == indices


def test_pieces_of_a_long_document_come_in_order_one_a_step(shards: PagedTokenShards) -> None:
    """Document 5 has 62 tokens of 150, so it is in two of the three rows of ten windows."""
    rows, length = 3, 5
    windows = StreamWindows(shards, length=length, seed=5, rows=rows)
    text = " ".join(
        map(str, windows.stream.read_range(*windows.stream.get_document_span(5)).tolist())
    )
    numbers = windows.list_windows_with_document(5, windows.windows_per_epoch)
    for row in np.unique(numbers % rows).tolist():
        own = numbers[numbers % rows == row]
        assert (np.diff(own // rows) == 1).all()
        tokens, documents = windows.get_rows(own)
        read = tokens[:, :-1][documents[:, :-1] % shards.num_documents == 5].tolist()
        assert len(read) > 2 * length
        # the end of the document before opens this one
        assert " ".join(map(str, read)).removeprefix("2 ") in text


def test_an_epoch_has_every_token_once_and_leaves_others_over_each_time(
    shards: PagedTokenShards,
) -> None:
    windows = StreamWindows(shards, length=11, seed=1)
    everything = np.concatenate(DOCUMENTS)
    assert windows.windows_per_epoch == len(everything) // 11
    assert windows.get_packing_stats()["lost_tokens_per_epoch"] == len(everything) % 11 > 0
    missing = []
    for epoch in range(4):
        first = epoch * windows.windows_per_epoch
        seen = windows.get_rows(range(first, first + windows.windows_per_epoch)).tokens[:, :-1]
        left = np.bincount(everything, minlength=99) - np.bincount(seen.ravel(), minlength=99)
        assert left.min() >= 0
        assert left.sum() == len(everything) % 11
        missing.append(left.tolist())
    assert len(set(map(tuple, missing))) > 1


def test_the_order_follows_the_seed_and_the_epoch(shards: PagedTokenShards) -> None:
    windows = StreamWindows(shards, length=4, seed=1)
    each = windows.windows_per_epoch
    first, second = (windows.get_rows(range(n, n + each)).tokens.tolist() for n in (0, each))
    other = StreamWindows(shards, length=4, seed=2).get_rows(range(each)).tokens.tolist()
    assert first not in (second, other)
    # Windows are cut in other places, not only taken in another order.
    assert sorted(first) != sorted(second)
    assert sorted(first) != sorted(other)


def test_too_little_data_is_refused(shards: PagedTokenShards) -> None:
    with pytest.raises(
        DataError, match=r"150 training tokens do not fill one sequence of 150\. Use a smaller"
    ):
        StreamWindows(shards, length=150, seed=0)

"""Laws of sorting and clustering beyond memory: the same rows and clusters as in memory, and no
file is left.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from llmsys.data_pipeline.core.task_record import write_file_list, write_rows
from llmsys.data_pipeline.dedup import duplicate_graph
from llmsys.data_pipeline.dedup.dedup_index import DocumentFiles
from llmsys.data_pipeline.dedup.duplicate_graph import (
    ExternalSorter,
    Indices,
    _find_roots,
    find_components,
    find_labels,
)
from llmsys.data_pipeline.stages.compute_signatures import DOCUMENT_SCHEMA
from llmsys.data_pipeline.stages.join_near_duplicates import LINK_SCHEMA, write_near_duplicates
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.uint64()), ("name", pa.string())])


@pytest.mark.parametrize(("rows", "run_rows"), [(0, 10), (5, 10), (1_000, 10), (3_000, 501)])
def test_rows_come_sorted_whatever_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, run_rows: int
) -> None:
    monkeypatch.setattr(duplicate_graph, "FAN_IN", 3)
    monkeypatch.setattr(duplicate_graph, "_BLOCK_ROWS", 4)  # so that a run has several blocks
    choose = np.random.default_rng(rows)
    given: list[tuple[int, int, str]] = []
    with ExternalSorter(tmp_path / "out", SCHEMA, ["a", "b"], run_rows) as sorter:
        for start in range(0, rows, 5):
            columns = {"a": choose.integers(-9, 9, 5), "b": choose.integers(0, 2**64, 5, np.uint64)}
            names = [str(start + number) for number in range(5)]
            sorter.add(**columns, name=names)
            given += zip(columns["a"].tolist(), columns["b"].tolist(), names, strict=True)
        found = [tuple(row.values()) for table in sorter.iter_sorted() for row in table.to_pylist()]
    assert found == sorted(given)  # no two keys are equal
    assert not list(tmp_path.iterdir())


def draw_links(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Chains, stars, repeated and reversed pairs, and a document that is linked with itself."""
    choose = np.random.default_rng(seed)
    chain = np.arange(0, 60)
    hub = np.stack([np.full(40, 150), choose.integers(100, 200, 40)], axis=1)
    links = [
        np.stack([chain[:-1], chain[1:]], axis=1),
        hub,
        choose.integers(200, 400, (80, 2)),
        np.array([[399, 399]]),
    ]
    pairs = np.concatenate([*links, links[2][:9, ::-1]])
    return pairs[choose.permutation(len(pairs))]


@pytest.mark.parametrize("seed", range(3))
def test_components_of_stars_are_those_of_union_find(tmp_path: Path, seed: int) -> None:
    pairs = draw_links(seed)
    expected, first = find_components(pairs[pairs[:, 0] != pairs[:, 1]])
    parts = list(find_labels(iter(np.array_split(pairs, 7)), tmp_path / "out", rows_in_memory=16))
    labels, documents = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert documents.tolist() == expected.tolist()
    assert labels.tolist() == first.tolist()
    assert not list(tmp_path.iterdir())


def test_stars_that_are_contracted_end_after_the_round_that_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come in batches that end elsewhere in each round: the runs differ."""
    monkeypatch.setattr(duplicate_graph, "_BLOCK_ROWS", 64)
    pairs = np.random.default_rng(0).permutation(
        np.stack([np.arange(2_000) // 40 * 40, np.arange(2_000)], axis=1)
    )
    run, rounds = duplicate_graph._StarContraction._run_large_star, list[int]()

    def count_round(*arguments: Any) -> int:
        rounds.append(run(*arguments))
        return rounds[-1]

    monkeypatch.setattr(duplicate_graph._StarContraction, "_run_large_star", count_round)
    found = find_labels(iter([pairs]), tmp_path / "near", 300)
    labels, documents = (np.concatenate(part) for part in zip(*found, strict=True))
    assert (labels == documents // 40 * 40).all()
    assert len(rounds) == 2


def test_pairs_are_sorted_as_they_come_and_not_held(tmp_path: Path) -> None:
    drawn, most = list[weakref.ref[Any]](), 0

    def draw() -> Iterator[Any]:
        nonlocal most
        for part in np.array_split(draw_links(0), 20):
            most = max(most, sum(one() is not None for one in drawn))
            pairs = part.copy()
            drawn.append(weakref.ref(pairs))
            yield pairs

    assert list(find_labels(draw(), tmp_path / "near", 16))
    assert most <= 2


def test_the_join_of_near_copies_is_the_same_in_any_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 documents in 40 files, of which the longest of a cluster is kept, then the one with
    the smallest id.
    """
    monkeypatch.setattr(duplicate_graph, "_BLOCK_ROWS", 4)  # so that clusters span tables
    choose = np.random.default_rng(0)
    names = [f"{number:032x}" for number in choose.permutation(400)]
    lengths = choose.integers(1, 4, 400)
    for file in range(40):
        rows = slice(file * 10, file * 10 + 10)
        with ArrowFileWriter(tmp_path / f"{file}.arrow", DOCUMENT_SCHEMA) as writer:
            columns = [names[rows], list(range(10)), lengths[rows].tolist()]
            writer.write(
                pa.record_batch([pa.array(column) for column in columns], schema=DOCUMENT_SCHEMA)
            )
    links = draw_links(0)
    links = links[links[:, 0] != links[:, 1]]
    with ArrowFileWriter(tmp_path / "links.arrow", LINK_SCHEMA) as writer:
        for part in np.array_split(links, 5):
            writer.write(
                pa.record_batch(
                    [pa.array(np.ascontiguousarray(c)) for c in part.T], schema=LINK_SCHEMA
                )
            )
    counts = write_rows(
        tmp_path / "rows", pa.schema([("rows", pa.int64())]), ({"rows": 10} for _ in range(40))
    )
    documents = DocumentFiles(
        write_file_list(tmp_path, "list", (f"{file}.arrow" for file in range(40))), counts
    )
    found = []
    for rows_in_memory in (1_000_000, 16):
        output = tmp_path / f"near-{rows_in_memory}.arrow"
        counted = write_near_duplicates(
            lambda amount, dropped: None,
            links=[tmp_path / "links.arrow"],
            documents=documents,
            earlier=[],
            output=output,
            rows_in_memory=rows_in_memory,
        )
        found.append(
            (counted, [row for batch in read_batches(output) for row in batch.to_pylist()])
        )
    assert found[0] == found[1]
    assert not list(tmp_path.glob(".*"))
    members, first = find_components(links)
    kept = {}
    for label in set(first.tolist()):
        kept[label] = min(
            members[first == label].tolist(), key=lambda number: (-lengths[number], names[number])
        )
    expected = {
        (number // 10, number % 10, names[kept[label]], int((first == label).sum()))
        for number, label in zip(members.tolist(), first.tolist(), strict=True)
        if number != kept[label]
    }
    assert {
        (row["source"], row["row"], row["kept"], row["size"]) for row in found[0][1]
    } == expected
    assert counted == {"clusters": len(kept), "linked": len(members), "later": len(expected)}


def find_roots_by_scipy(links: Indices, size: int) -> Indices:
    """The smallest node of each component, by another algorithm."""
    graph = coo_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=(size, size))
    labels = connected_components(graph, directed=False)[1]
    smallest = [int(np.flatnonzero(labels == label)[0]) for label in range(labels.max() + 1)]
    return np.array(smallest)[labels]


@pytest.mark.parametrize(("nodes", "pairs"), [(1, 1), (5, 4), (60, 40), (60, 300), (3_000, 2_500)])
def test_components_are_those_of_another_algorithm(nodes: int, pairs: int) -> None:
    source = np.random.default_rng(nodes + pairs)
    for _ in range(20):
        links = source.integers(0, nodes, (pairs, 2))
        expected = find_roots_by_scipy(links, nodes)
        assert _find_roots(links, nodes).tolist() == expected.tolist()


def test_a_long_chain_is_one_component() -> None:
    chain = np.random.default_rng(0).permutation(50_000)
    links = np.stack([chain[:-1], chain[1:]], axis=1)
    assert not _find_roots(links, len(chain)).any()
    assert find_components(np.zeros((0, 2), np.int64))[1].tolist() == []

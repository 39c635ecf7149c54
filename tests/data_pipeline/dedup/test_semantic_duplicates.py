"""Laws of semantic duplicates: those of a plain comparison of all pairs of a cluster, whatever
files, blocks, ranges and runs; hostile embeddings end nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from llmsys.data_pipeline.core.input_fields import encode_fields
from llmsys.data_pipeline.dedup.embeddings import (
    MAX_NUMBERS,
    SCALE,
    compute_cosines,
    compute_slack,
    find_nearest,
    normalize_embeddings,
    round_embeddings,
)
from llmsys.data_pipeline.dedup.spherical_kmeans import (
    assign_clusters,
    choose_cluster_count,
    compute_cluster_keys,
    find_centroids,
)
from llmsys.data_pipeline.stages import find_semantic_duplicates as stage
from llmsys.errors import DataError
from llmsys.storage.arrow_file import read_batches
from tests.helpers.deduplication import build_document, deduplicate_documents
from tests.reference.semantic_duplicates import find_semantic_duplicates

Vectors = npt.NDArray[np.float64]
OFF: dict[str, Any] = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}


def make_vectors(seed: int, groups: int, copies: int, numbers: int = 24) -> Vectors:
    """Directions, each with copies of some distance: a third of them near the threshold."""
    draw = np.random.default_rng(seed)
    centers = draw.normal(size=(groups, numbers))
    noise = draw.normal(size=(copies, groups, numbers))
    scales = draw.choice([0.02, 0.3, 1.0], size=(copies, groups, 1))
    return np.asarray((centers + scales * noise).reshape(-1, numbers), np.float64)


def make_documents(vectors: Sequence[Any] | Vectors, seed: int = 0) -> list[dict[str, Any]]:
    """Documents with a column of embeddings, and texts of few lengths, so that many tie."""
    draw = np.random.default_rng(seed)
    documents = []
    for vector, size in zip(vectors, draw.integers(5, 9, len(vectors)).tolist(), strict=True):
        name = draw.bytes(16).hex()
        cell = encode_fields({} if vector is None else {"vector": {"json": list(vector)}})
        documents.append(build_document(name, "x" * size, fields=cell))
    return documents


def find_dropped(
    folder: Path, documents: list[dict[str, Any]], files: int = 3, **semantic: Any
) -> dict[str, tuple[str, float, str]]:
    """The dropped documents of the stages: the id that stays, the cosine, and the reason."""
    section = {"kind": "embeddings", "embeddings": {"kind": "column", "column": "vector"}}
    deduplicate = OFF | {"semantic": section | semantic}
    kept, gone = deduplicate_documents(folder, documents, deduplicate, files)
    assert len(kept) + len(gone) == len(documents)
    assert {one["rule"] for one in gone} <= {"semantic_duplicates"}
    return {
        one["id"]: (one["reason"].split()[6].rstrip(","), one["value"], one["reason"])
        for one in gone
    }


def read_clusters(folder: Path, documents: Sequence[Any], vectors: Vectors) -> list[int]:
    """The clusters of documents, by their centroids."""
    (batch,) = read_batches(folder / "work" / "centroids" / "centroids.arrow")
    centroids = np.array(batch.column("centroid").to_pylist(), np.float64)
    stored = normalize_embeddings(vectors, "float16")[0].astype(np.float64)
    units = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    products = np.rint(SCALE * units) @ centroids.T
    return [int(one) for one in products.argmax(axis=1)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clusters", [1, 7])
def test_the_stages_drop_what_a_comparison_of_all_pairs_does(
    clusters: int, seed: int, tmp_path: Path
) -> None:
    vectors = make_vectors(seed, groups=30, copies=6)
    documents = make_documents(vectors, seed)
    found = find_dropped(
        tmp_path, documents, clusters=clusters, threshold=0.9, documents_per_task=40
    )
    members = [(len(one["text"]), one["id"]) for one in documents]
    stored = normalize_embeddings(vectors, "float16")[0].astype(np.float64)
    labels = read_clusters(tmp_path, documents, vectors)
    assert len(set(labels)) == clusters
    expected = find_semantic_duplicates(members, stored, labels, 0.9)
    assert {name: one[0] for name, one in found.items()} == {
        name: kept for name, (kept, _) in expected.items()
    }
    assert 20 < len(found) < 150
    for name, (kept, cosine, reason) in found.items():
        assert cosine == pytest.approx(expected[name][1], abs=1e-12)
        assert reason == (
            f"semantic_duplicates: cosine {cosine:.4f} >= 0.9 with {kept}, which stays"
        )


def test_files_ranges_blocks_and_runs_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make_documents(make_vectors(5, groups=25, copies=8), 5)
    settings: dict[str, Any] = {"threshold": 0.85, "clusters": 5}
    whole = find_dropped(tmp_path / "whole", documents, files=1, **settings)
    shuffled = [documents[place] for place in np.random.default_rng(1).permutation(len(documents))]
    assert find_dropped(tmp_path / "files", shuffled, files=6, **settings) == whole
    assert find_dropped(tmp_path / "a", documents, documents_per_task=1, **settings) == whole
    monkeypatch.setattr(stage, "ROWS_AT_ONCE", 3)
    assert find_dropped(tmp_path / "blocks", shuffled, files=2, **settings) == whole
    # Runs of seven embeddings, so that tables end within clusters.
    keywords: Any = stage.write_semantic_duplicates.__kwdefaults__
    monkeypatch.setitem(keywords, "sorted_bytes", 7 * 48)
    assert find_dropped(tmp_path / "runs", shuffled, files=2, **settings) == whole
    assert len(whole) > 30


def test_thousands_of_files_are_gathered_by_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make_documents(make_vectors(6, groups=10, copies=5), 6)
    whole = find_dropped(tmp_path / "whole", documents, threshold=0.9)
    monkeypatch.setattr("llmsys.data_pipeline.dedup.keys.FILES_PER_GROUP", 2)
    section = {"kind": "embeddings", "embeddings": {"kind": "column", "column": "vector"}}
    semantic = section | {"threshold": 0.9}
    folder = tmp_path / "groups"
    # Decisions of the first group are those of its two files.
    deduplicate_documents(folder, documents, OFF | {"semantic": semantic}, files=5)
    found = [
        name
        for path in sorted((folder / "work" / "semantic_duplicates").glob("*.arrow"))
        for batch in read_batches(path)
        for name in batch.column("kept").to_pylist()
    ]
    assert sorted(found) == sorted(one[0] for one in whole.values())


# --- hostile embeddings ---


def test_documents_without_an_embedding_stay_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = [1.0, 2.0, 3.0]
    hostile: list[Any] = [
        None, [], [0.0, 0, 0], [float("nan"), 1, 1], [1, float("inf"), 1], ["a", "b", "c"],
        [None, 1, 1], [[1], [2], [3]], [10**400, 1, 1],
    ]  # fmt: skip
    documents = make_documents([one, [2.0, 4.0, 6.0], *hostile, *hostile])
    found = find_dropped(tmp_path, documents)
    assert len(found) == 1
    assert found.keys() < {document["id"] for document in documents[:2]}
    assert "18 of 20 documents have no embedding, and stay" in caplog.text


def test_huge_and_tiny_numbers_have_a_direction() -> None:
    rows = np.array([[3e300, 4e300], [3e-320, 4e-320], [-3, -4]])
    found, usable = normalize_embeddings(rows, "float32")
    assert usable.all()
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.6, 0.8], [-0.6, -0.8]], rtol=1e-3)


def test_one_cluster_of_equal_embeddings_leaves_its_longest_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "ROWS_AT_ONCE", 16)
    documents = make_documents([[0.5, 0.5, -0.1]] * 100)
    found = find_dropped(tmp_path, documents, clusters=50)
    best = min(documents, key=lambda one: (-len(one["text"]), one["id"]))
    assert len(found) == 99
    assert {one[0] for one in found.values()} == {best["id"]}
    assert {one[1] for one in found.values()} == {1.0}


def test_fewer_documents_than_clusters_and_none_at_all(tmp_path: Path) -> None:
    documents = make_documents(make_vectors(0, groups=2, copies=1))
    assert find_dropped(tmp_path / "two", documents, clusters=40) == {}
    assert find_dropped(tmp_path / "none", [], files=1) == {}


def test_a_column_that_no_document_has_is_named(tmp_path: Path) -> None:
    message = "none of 2 documents has a list of numbers in the column vector"
    with pytest.raises(DataError, match=message):
        find_dropped(tmp_path, make_documents([None, None]))


@pytest.mark.parametrize("files", [1, 2])
def test_embeddings_of_two_lengths_are_named(files: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 numbers.* 2.*Embed all documents by one model"):
        find_dropped(tmp_path, make_documents([[1.0, 2.0], [1.0, 2.0, 3.0]]), files=files)


# --- whole numbers ---


@pytest.mark.parametrize("numbers", [1, 3, 7, 8, 9, 100, 768, 5_000])
def test_a_cosine_depends_on_its_own_rows_alone(numbers: int) -> None:
    draw = np.random.default_rng(numbers)
    left, right = (draw.normal(size=(70, numbers)).astype(np.float16) for _ in range(2))
    together = compute_cosines(left, right)
    alone = [compute_cosines(left[[row]], right[[row]])[0] for row in range(70)]
    assert together.tolist() == alone
    assert compute_cosines(right, left).tolist() == alone
    rounded = round_embeddings(left)
    assert all((round_embeddings(left[[row]]) == rounded[row]).all() for row in range(70))


@pytest.mark.parametrize("numbers", [2, 768, MAX_NUMBERS])
def test_products_of_whole_numbers_are_exact_and_near_the_cosine(numbers: int) -> None:
    draw = np.random.default_rng(numbers)
    vectors = np.concatenate([draw.normal(size=(20, numbers)), np.ones((1, numbers))])
    whole = round_embeddings(vectors)
    products = whole @ whole.T
    exact = whole.astype(np.int64) @ whole.astype(np.int64).T
    assert (products == exact).all()
    # No order of additions can pass what float32 holds exactly.
    assert (np.abs(whole).astype(np.int64) @ np.abs(whole).astype(np.int64).T).max() < 1 << 24
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    errors = np.abs(products / SCALE**2 - units @ units.T)
    assert errors.max() <= compute_slack(numbers)


def test_a_cosine_at_the_threshold_is_found_whatever_its_rounding() -> None:
    vectors = normalize_embeddings(make_vectors(9, groups=60, copies=2), "float16")[0]
    for left, right in zip(vectors[:60], vectors[60:], strict=True):
        exact = float(compute_cosines(left[None], right[None])[0])
        found, places = find_nearest(left[None], right[None], exact)
        assert (found.tolist(), places.tolist()) == ([exact], [0])
        assert find_nearest(left[None], right[None], np.nextafter(exact, 2))[1].tolist() == [-1]


# --- clusters ---


def test_clusters_are_those_of_plain_iterations_and_blind_to_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = round_embeddings(make_vectors(3, groups=9, copies=20)).astype(np.int16)
    found = find_centroids(vectors, 9, 10, 4)
    chosen = np.sort(np.random.default_rng(4).permutation(len(vectors))[:9])
    plain = vectors[chosen].astype(np.int64)
    for _ in range(10):
        labels = (vectors.astype(np.int64) @ plain.T).argmax(axis=1)
        for cluster in range(9):
            total = vectors[labels == cluster].astype(np.float64).sum(axis=0)
            if (labels == cluster).any():
                plain[cluster] = np.rint(SCALE * total / np.linalg.norm(total))
    assert (found == plain).all()
    monkeypatch.setattr("llmsys.data_pipeline.dedup.spherical_kmeans._PRODUCTS", 1)
    assert (find_centroids(vectors, 9, 10, 4) == found).all()
    assert (assign_clusters(vectors, found) == assign_clusters(vectors[::-1], found)[::-1]).all()
    assert (find_centroids(vectors, 9, 10, 5) != found).any()


def test_a_cluster_whose_vectors_cancel_keeps_its_centroid() -> None:
    vectors = np.array([[SCALE, 0], [-SCALE, 0]], np.int16)
    assert find_centroids(vectors, 1, 5, 0).tolist() in ([[SCALE, 0]], [[-SCALE, 0]])
    assert find_centroids(np.zeros((0, 0), np.int16), 3, 5, 0).shape == (0, 0)


@pytest.mark.parametrize(
    ("documents", "sample", "clusters"),
    [(0, 10, 1), (1_999, 10_000, 1), (5_000, 10_000, 5), (10**8, 10**6, 10_000), (10**8, 500, 50)],
)
def test_the_number_of_clusters_follows_from_the_documents(
    documents: int, sample: int, clusters: int
) -> None:
    assert choose_cluster_count(documents, sample) == clusters


def test_ranges_of_keys_hold_whole_clusters_in_order() -> None:
    keys = [int(key) for key in compute_cluster_keys(11)]
    assert keys == sorted(set(keys))
    assert all(0 <= key < 1 << 64 for key in keys)
    assert pa.array(compute_cluster_keys(11)).type == pa.uint64()

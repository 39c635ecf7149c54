"""Spherical k-means (Dhillon and Modha 2001) of embeddings as whole numbers.

Invariants:
    - The centroids follow from the set of vectors and the seed: every sum is of whole numbers and
      exact, so that neither their order nor the number of threads changes a bit.
    - Memory: 10 bytes for each number of a vector, and one block of products.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.dedup.embeddings import round_embeddings

Vectors = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
_PRODUCTS = 1 << 24  # at a time, 4 bytes each


def choose_cluster_count(documents: int, sample: int) -> int:
    """Choose the number of clusters of a corpus.

    Args:
        documents: Number of its documents with an embedding.
        sample: Number of documents that decide the clusters.

    Returns:
        The square root of the documents, but so few clusters that each has about 1,000 documents,
        and ten documents of the sample.
    """
    root = int(np.ceil(np.sqrt(documents)))
    return max(1, min(root, documents // 1_000, sample // 10))


def find_centroids(
    vectors: npt.NDArray[np.int16], clusters: int, iterations: int, seed: int
) -> npt.NDArray[np.int16]:
    """Find the centroids of vectors.

    Args:
        vectors: (N, numbers) distinct vectors as of `round_embeddings`, in an order that follows
            from their set.
        clusters: Number of clusters; no more than there are vectors are made.
        iterations: Maximum iterations.
        seed: Seed of the first centroids, which are vectors.

    Returns:
        (clusters, numbers), rounded as the vectors are. One without a vector stays where it was.
    """
    count = min(clusters, len(vectors))
    chosen = np.random.default_rng(seed).permutation(len(vectors))[:count]
    centroids = vectors[np.sort(chosen)]
    labels = np.full(len(vectors), -1, np.int64)
    for _ in range(iterations):
        found = assign_clusters(vectors, centroids)
        if np.array_equal(found, labels):
            break
        labels = found
        centroids = _compute_centroids(vectors, labels, centroids)
    return centroids


def assign_clusters(vectors: npt.NDArray[Any], centroids: npt.NDArray[np.int16]) -> Labels:
    """Assign vectors to the nearest centroids, the first of equally near ones.

    Args:
        vectors: (N, numbers) whole numbers.
        centroids: (clusters, numbers).

    Returns:
        (N,) numbers of clusters.
    """
    columns = centroids.astype(np.float32).T
    step = max(1, _PRODUCTS // max(1, len(centroids)))
    labels = np.zeros(len(vectors), np.int64)
    for start in range(0, len(vectors), step):
        block = vectors[start : start + step].astype(np.float32)
        labels[start : start + step] = (block @ columns).argmax(axis=1)
    return labels


def _compute_centroids(
    vectors: npt.NDArray[np.int16], labels: Labels, before: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """Return the mean direction of the vectors of each cluster."""
    order = np.argsort(labels, kind="stable")
    clusters, starts = np.unique(labels[order], return_index=True)
    # SCALE times the largest sample is below 2^31.
    sums = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.int32)
    moved = sums.any(axis=1)
    centroids = before.copy()
    centroids[clusters[moved]] = round_embeddings(sums[moved]).astype(np.int16)
    return centroids


def compute_cluster_keys(clusters: int) -> npt.NDArray[np.uint64]:
    """Divide all 64-bit keys among clusters, so that a range of keys holds whole clusters.

    Args:
        clusters: Number of clusters.

    Returns:
        (clusters,) rising keys.
    """
    return np.array([(number << 64) // clusters for number in range(clusters)], np.uint64)

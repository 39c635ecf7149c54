"""Find clusters of embeddings, and assign each document to one.

Reads the embeddings of all files. Writes the centroids, and for each file its embeddings by
cluster.

Invariants:
    - The clusters follow from the set of embeddings, whatever the files and their order: the sample
      is those with the smallest hashes, and equal embeddings are in it once.
    - Memory holds the sample, or one run of a file and the centroids.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.deduplication import SemanticDedupConfig
from llmsys.data_pipeline.dedup.embeddings import build_assigned_schema, round_embeddings
from llmsys.data_pipeline.dedup.keys import (
    KeyWriter,
    build_key_column,
    read_key_column,
    read_range,
)
from llmsys.data_pipeline.dedup.spherical_kmeans import (
    assign_clusters,
    choose_cluster_count,
    compute_cluster_keys,
    find_centroids,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.storage.arrow_file import ArrowFileWriter, read_batches

_SCHEMA = pa.schema([("centroid", pa.list_(pa.int16()))])


def write_centroids(
    report: Report,
    *,
    sources: Sequence[Path],
    documents: int,
    config: SemanticDedupConfig,
    output: Path,
) -> dict[str, Any]:
    """Write the centroids of a sample. Progress is in files.

    Args:
        report: Progress callback.
        sources: Embeddings of all files.
        documents: Their number.
        config: The semantic duplicates.
        output: File to write.

    Returns:
        Numbers of clusters and of sampled embeddings.
    """
    ranges = max(1, -(-documents // config.sample))
    hashes = [np.zeros(0, np.uint64)]
    vectors = list[npt.NDArray[np.int16]]()
    for path in sources:
        for part in read_range(path, 0, ranges):
            hashes.append(part["high"])
            vectors.append(round_embeddings(part["embedding"]).astype(np.int16))
        report(1, 0)
    sample = np.concatenate(vectors) if vectors else np.zeros((0, 0), np.int16)
    vectors.clear()
    _, first = np.unique(np.concatenate(hashes), return_index=True)
    sample = sample[first]
    count = config.clusters or choose_cluster_count(documents, config.sample)
    centroids = find_centroids(sample, count, config.iterations, config.seed)
    with ArrowFileWriter(output, _SCHEMA) as writer:
        column = build_key_column(centroids, _SCHEMA.field("centroid").type)
        writer.write(pa.record_batch([column], schema=_SCHEMA))
    return {"clusters": len(centroids), "sample": len(sample)}


def write_assigned_embeddings(
    report: Report, *, source: Path, centroids: Path, config: SemanticDedupConfig, output: Path
) -> dict[str, Any]:
    """Write the embeddings of one file by cluster. Progress is in documents.

    Args:
        report: Progress callback.
        source: The embeddings.
        centroids: File of centroids.
        config: The semantic duplicates.
        output: File to write, keys by `compute_cluster_keys`.

    Returns:
        Nothing: an empty result.
    """
    (batch,) = read_batches(centroids)
    places = read_key_column(batch.column("centroid"))
    keys = compute_cluster_keys(len(places))
    schema = build_assigned_schema(config.precision)
    with KeyWriter(output, schema) as writer:
        for batch in read_batches(source):
            columns = {name: read_key_column(batch.column(name)) for name in schema.names}
            labels = assign_clusters(round_embeddings(columns["embedding"]), places)
            writer.write(columns | {"high": keys[labels]})
            report(batch.num_rows, 0)
    return {}

"""Measure semantic duplicates: planted copies found by MinHash and by an encoder, and CPU seconds.

    python tools/bench/semantic.py MODEL [--threshold 0.95] [--copies 100] [--vectors 50000]

MODEL is the folder of an encoder. Copies are made of pages of the sample crawl: their sentences in
another order, and every third, sixth or tenth word left out. The clusters are timed on random
vectors of 384 numbers, of which one in ten is a near copy.
"""

import argparse
import json
import random
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.deduplication import SemanticDedupConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.core.task_record import write_rows
from llmsys.data_pipeline.dedup.dedup_index import DocumentFiles
from llmsys.data_pipeline.dedup.embeddings import (
    build_embedding_schema,
    hash_embeddings,
    normalize_embeddings,
)
from llmsys.data_pipeline.dedup.keys import KeyWriter
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.stages.cluster_embeddings import (
    write_assigned_embeddings,
    write_centroids,
)
from llmsys.data_pipeline.stages.compute_signatures import DOCUMENT_SCHEMA
from llmsys.data_pipeline.stages.find_semantic_duplicates import (
    ClusterRange,
    write_semantic_duplicates,
)
from llmsys.storage.arrow_file import ArrowFileWriter, read_batches

OFF: dict[str, Any] = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
NUMBERS = 384


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the encoder")
    parser.add_argument("--threshold", type=float, default=0.95, help="(default: %(default)s)")
    parser.add_argument("--copies", type=int, default=100, help="of each kind (%(default)s)")
    parser.add_argument("--vectors", type=int, default=50_000, help="(default: %(default)s)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as place:
        texts = _read_sample_texts(Path(place))
        embeddings = {"kind": "encoder", "model": str(arguments.model), "max_tokens": 512}
        section = {"kind": "embeddings", "embeddings": embeddings}
        semantic = {"semantic": section | {"threshold": arguments.threshold}}
        for gap in (3, 6, 10):
            folder = Path(place) / f"gap-{gap}"
            rows = _add_copies(texts, arguments.copies, gap)
            for name, deduplicate in (
                ("minhash", OFF | {"minhash": {"kind": "minhash"}}),
                ("semantic", OFF | semantic),
            ):
                with _measure_cpu() as seconds:
                    found, others = _count_found(folder / name, rows, deduplicate)
                print(
                    f"every {gap}th word left out: {name} finds {found} of {arguments.copies} "
                    f"copies, and drops {others} of {len(texts) - arguments.copies} other pages; "
                    f"{1e3 * seconds[0] / len(rows):.1f} CPU ms a page",
                    flush=True,
                )
        _measure_clusters(Path(place), arguments.vectors)


@contextmanager
def _measure_cpu() -> Iterator[list[float]]:
    """Yield a list that has the CPU seconds of the block at its end."""
    seconds: list[float] = []
    start = time.process_time()
    yield seconds
    seconds.append(time.process_time() - start)


def _build_config(folder: Path, **data: Any) -> RunConfig:
    base = load_run_config("data/sample", []).data.model_dump(mode="json")
    section = base | {"folder": str(folder), "executor": {"kind": "inline"}} | data
    tokenizer = {"kind": "sentencepiece"}
    return RunConfig.model_validate({"data": section, "tokenizer": tokenizer})


def _read_sample_texts(place: Path) -> list[str]:
    prepare_dataset(_build_config(place / "sample"), "documents")
    paths = sorted((place / "sample" / "documents").glob("*.arrow"))
    texts = [text for path in paths for batch in read_batches(path)
             for text in batch.column("text").to_pylist()]  # fmt: skip
    return sorted(texts)


def _add_copies(texts: list[str], copies: int, gap: int) -> list[dict[str, str]]:
    """Return documents, with a copy of the first ones in other words."""
    choose = random.Random(gap)
    rows = [{"id": f"page-{number}", "text": text} for number, text in enumerate(texts)]
    for number, text in enumerate(texts[:copies]):
        sentences = re.split(r"(?<=[.!?:])\s+", text)
        choose.shuffle(sentences)
        words = " ".join(sentences).split()
        kept = (word for place, word in enumerate(words) if place % gap)
        rows.append({"id": f"copy-{number}", "text": " ".join(kept)})
    return rows


def _count_found(
    folder: Path, rows: list[dict[str, str]], deduplicate: dict[str, Any]
) -> tuple[int, int]:
    """Return the number of copies that were dropped, and of other pages."""
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    language: dict[str, Any] = {"languages": []}
    more = {"inputs": [str(path)], "rules": [], "language": language, "deduplicate": deduplicate}
    prepare_dataset(_build_config(folder / "data", **more), "documents")
    dropped = {
        name
        for file in (folder / "data" / "dropped").glob("*.arrow")
        for batch in read_batches(file)
        for name in batch.column("id").to_pylist()
    }
    copied = {row["id"].partition("-")[2] for row in rows if row["id"].startswith("copy-")}
    found = {name.partition("-")[2] for name in dropped} & copied
    others = {name for name in dropped if name.partition("-")[2] not in copied}
    return len(found), len(others)


def _measure_clusters(place: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(count, NUMBERS)).astype(np.float32)
    copies = count // 10
    vectors[-copies:] = vectors[:copies] + 0.1 * vectors[copies : 2 * copies]
    values, _ = normalize_embeddings(vectors, "float16")
    rows = np.arange(count)
    zeros = np.zeros(count, np.uint64)
    columns = {"high": hash_embeddings(values), "text_high": zeros, "text_low": zeros, "row": rows,
               "shortness": rows, "id_high": zeros, "id_low": zeros}  # fmt: skip
    source = place / "embeddings"
    with KeyWriter(source, build_embedding_schema("float16")) as writer:
        writer.write(columns | {"embedding": values})
    documents = place / "documents"
    with ArrowFileWriter(documents, DOCUMENT_SCHEMA) as table:
        ids = pa.array([f"{row:032x}" for row in rows.tolist()])
        table.write(pa.record_batch([ids, rows, rows], schema=DOCUMENT_SCHEMA))
    counted = write_rows(place / "rows", pa.schema([("rows", pa.int64())]), iter([{"rows": count}]))
    del vectors, values, columns
    config = SemanticDedupConfig.model_validate(
        {"embeddings": {"kind": "column", "column": "x"}, "threshold": 0.95}
    )

    def report(amount: float, dropped: int) -> None:
        pass

    with _measure_cpu() as seconds:
        made = write_centroids(
            report, sources=[source], documents=count, config=config, output=place / "centroids"
        )
    print(f"{count:,} vectors of {NUMBERS}: {made['clusters']} centroids, {seconds[0]:.1f} CPU s")
    with _measure_cpu() as seconds:
        write_assigned_embeddings(
            report, source=source, centroids=place / "centroids", config=config,
            output=place / "assigned",
        )  # fmt: skip
    print(f"assigned: {seconds[0]:.1f} CPU s")
    with _measure_cpu() as seconds:
        found = write_semantic_duplicates(
            report,
            cluster_range=ClusterRange([place / "assigned"], 0, 1),
            config=config,
            documents=DocumentFiles([documents], counted),
            output=place / "decisions",
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"compared: {seconds[0]:.1f} CPU s, {found}; peak of this process {peak:.0f} MiB")


if __name__ == "__main__":
    main()

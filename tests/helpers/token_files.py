"""Token files of given ids, as `prepare` writes them."""

from pathlib import Path

import pyarrow as pa

from llmsys.dataset import token_shards
from llmsys.dataset.manifest import Histogram, Manifest, ReadSummary

TOKENIZER = "ab" * 16


def write_tokens(
    path: Path, documents: list[list[int]], rows_per_batch: int = 2, first: int = 0
) -> None:
    """Write one token file; ids, offsets and hashes are the numbers of the documents, from
    `first`.
    """
    schema = token_shards.build_token_schema("uint16")
    with token_shards.ArrowFileWriter(path, schema) as writer:
        for start in range(0, len(documents), rows_per_batch):
            rows = documents[start : start + rows_per_batch]
            numbers = [first + start + row for row in range(len(rows))]
            columns = {
                "tokens": rows,
                "id": [f"{number:032x}" for number in numbers],
                "file": ["crawl/a.warc.gz"] * len(rows),
                "offset": [100 * number for number in numbers],
                "url_hash": numbers,
                "text_bytes": [3 * len(row) for row in rows],
            }
            writer.write(pa.record_batch(columns, schema=schema))


def write_paged_dataset(
    folder: Path, documents: list[list[int]], *, rows_per_file: int, rows_per_batch: int = 2
) -> Path:
    """Write token files with page tables, their index and a manifest."""
    entries = []
    for number, start in enumerate(range(0, len(documents), rows_per_file)):
        path = folder / "tokens" / f"train-{number:05d}.arrow"
        write_tokens(path, documents[start : start + rows_per_file], rows_per_batch, start)
        entries.append(token_shards.write_page_table(path))
    index = folder / "tokens" / "train.index"
    token_shards.write_token_index(index, entries)
    split = token_shards.Split(
        documents=len(documents),
        tokens=sum(map(len, documents)),
        bytes=3 * sum(map(len, documents)),
        index=token_shards.TokenIndex(
            name=index.name, files=len(entries), digest=token_shards.compute_file_digest(index)
        ),
    )
    token_shards.write_manifest(
        folder, build_token_manifest({"train": split}, [entry.digest for entry in entries])
    )
    return folder


def build_token_manifest(splits: dict[str, token_shards.Split], digests: list[str]) -> Manifest:
    """Return the manifest of a dataset with tokens and without documents."""
    return Manifest.model_validate(
        {
            "name": "test",
            "fingerprint": token_shards.compute_dataset_fingerprint(TOKENIZER, digests),
            "config": {},
            "config_digest": "",
            "vocab_size": 65536,
            "token_dtype": "uint16",
            "tokenizer_fingerprint": TOKENIZER,
            "splits": splits,
            "documents": token_shards.DocumentFiles(),
            "dropped": token_shards.DocumentFiles(),
            "funnel": (),
            "languages": {},
            "lengths": Histogram(edges=(0, 1), counts=(0,)),
            "read": ReadSummary(files=0, records=0, html_bytes=0),
        }
    )

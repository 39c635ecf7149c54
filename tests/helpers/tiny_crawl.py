"""A tiny crawl, made in milliseconds: English pages that stay, and pages that each stage has a
reason to drop.
"""

import gzip
import hashlib
import json
import os
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any

from llmsys.config.data import CrawlConfig
from llmsys.config.run import RunConfig

PROSE = """
the of and to with that have be house river stone garden winter morning people often walked along
narrow streets because they wanted to see old bridges while children played near water under tall
trees where birds were singing every evening before dinner many families told stories about distant
mountains travel weather harvest music and books
"""
WORDS = PROSE.split()
GERMAN = (
    "Der Hund läuft durch den Wald und die Kinder spielen im Garten, während der Vater das Essen "
    "kocht. "
)


def write_sentences(choose: random.Random, count: int) -> list[str]:
    return [
        " ".join(choose.choices(WORDS, k=choose.randrange(8, 16))).capitalize() + "."
        for _ in range(count)
    ]


def format_page(paragraphs: list[str]) -> bytes:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f"<html><head><title>x</title></head><body><main>{body}</main></body></html>".encode()


def format_record(url: str, date: str, html: bytes) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html
    name = hashlib.md5(url.encode() + date.encode()).hexdigest()
    header = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: "
        f"<urn:uuid:{name}>\r\nWARC-Target-URI: {url}\r\nWARC-Date: {date}\r\nContent-Type: "
        f"application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return gzip.compress(header.encode() + http + b"\r\n\r\n", mtime=0)


def make_crawl(folder: Path, files: int = 3, pages: int = 14, seed: int = 0) -> Path:
    """Write `files` WARC files; each holds good pages, a German one, a short one, a recrawl and
    a near copy.
    """
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        good = [write_sentences(choose, 16) for _ in range(pages)]
        copy = [*good[0]]
        copy[7] = "One sentence differs in this copy."
        texts = [*good, [GERMAN * 8], ["Too short to stay."], good[1], copy]
        records = [
            format_record(
                f"https://example-{number}.org/{i}",
                f"2024-05-0{number + 1}T00:00:{i:02d}Z",
                format_page(paragraphs),
            )
            for i, paragraphs in enumerate(texts)
        ]
        (folder / f"crawl-{number}.warc.gz").write_bytes(b"".join(records))
    return folder


def build_tiny_config(folder: Path | str, crawl: Path | list[str], **data: Any) -> RunConfig:
    """A run whose data section reads the tiny crawl into `folder`, in this process unless told
    otherwise.
    """
    inputs = crawl if isinstance(crawl, list) else [f"{crawl}/*.warc.gz"]
    section: dict[str, Any] = {
        "name": "tiny",
        "folder": folder if isinstance(folder, str) else str(folder),
        "inputs": inputs,
        "rules": [{"kind": "gopher_quality", "min_words": 30}],
        "deduplicate": {"minhash": {"kind": "minhash", "buckets": 20, "hashes_per_bucket": 4}},
        "split": {"heldout_fraction": 0.2},
        "documents": {"num_shards": 2},
        "tokens": {"shard_tokens": 4_000, "batch_tokens": 1_000},
        "executor": {"kind": "inline"},
    }
    tokenizer = {"kind": "sentencepiece", "vocab_size": 400}
    return RunConfig.model_validate(
        {"data": CrawlConfig.model_validate(section | data), "tokenizer": tokenizer}
    )


ROOMS = ("documents", "dropped", "tokenizer", "tokens", "work")


def hash_files(folder: Path) -> dict[str, str]:
    """The sha256 of every file whose bytes are promised, by its name below the dataset folder. A
    file in a pack is named by its task, because its place depends on the workers.
    """
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for room in ROOMS
        for path in sorted((folder / room).rglob("*"))
        if path.is_file() and path.suffix != ".pack"
    }
    files["manifest.json"] = (folder / "manifest.json").read_bytes()
    files |= read_packed_files(folder)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def read_packed_places(folder: Path, stage: str) -> dict[str, list[str]]:
    """Where the journal has the outputs of the tasks of a stage, by the rest of their name."""
    journal = sqlite3.connect(folder / "journal" / "records.sqlite")
    rows = journal.execute("select item, outputs from record where stage = ?", (stage,)).fetchall()
    journal.close()
    return {os.fsdecode(item): [name for name, *_ in json.loads(text)] for item, text in rows}


def read_packed_files(folder: Path) -> dict[str, bytes]:
    """The bytes of every output in a pack, by `work/STAGE/ITEM#OUTPUT`."""
    journal = sqlite3.connect(folder / "journal" / "records.sqlite")
    stages = [stage for (stage,) in journal.execute("select distinct stage from record")]
    journal.close()
    found = {}
    for stage in stages:
        for item, places in read_packed_places(folder, stage).items():
            for number, place in enumerate(places):
                if ".pack/" in place:
                    pack, _, where = place.rpartition("/")
                    start, length = map(int, where.split("-"))
                    content = (folder / pack).read_bytes()[start : start + length]
                    found[f"work/{stage}/{item}#{number}"] = content
    return found


def list_blocks(folder: Path) -> list[str]:
    """The blocks that were extracted, by name."""
    names = [name for name in read_packed_files(folder) if name.endswith("#0")]
    return sorted(name.split("/", 2)[2][:-2] for name in names if name.startswith("work/extract/"))


def read_public_files(folder: Path) -> dict[str, bytes]:
    """The bytes of every file that readers of a dataset use, by its name below the dataset
    folder.
    """
    return {
        name: (folder / name).read_bytes()
        for name in hash_files(folder)
        if not name.startswith("work/")
    }


# python -m tests.helpers.tiny_crawl FOLDER INPUTS DATA: JSON lists and sections
if __name__ == "__main__":
    from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset

    given = [
        f"{name}/*.warc.gz" if Path(name).is_dir() else name for name in json.loads(sys.argv[2])
    ]
    prepare_dataset(build_tiny_config(sys.argv[1], given, **json.loads(sys.argv[3])))

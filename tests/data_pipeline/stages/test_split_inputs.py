"""Laws of blocks: a long file is cut only between whole records, and how it is cut changes no
byte.
"""

import gzip
import itertools
import random
import shutil
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_stream import InputStream, open_input_stream
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.stages import split_inputs
from llmsys.data_pipeline.stages.split_inputs import split_file
from llmsys.dataset.token_shards import load_manifest
from llmsys.events import read_events
from tests.helpers.tiny_crawl import (
    GERMAN,
    build_tiny_config,
    format_page,
    format_record,
    hash_files,
    list_blocks,
    make_crawl,
    write_sentences,
)


def make_records(seed: int, count: int) -> list[bytes]:
    choose = random.Random(seed)
    return [
        format_record(
            f"https://e.org/{number}",
            "2024-01-01T00:00:00Z",
            format_page(write_sentences(choose, choose.randrange(1, 40))),
        )
        for number in range(count)
    ]


def pages_of(
    path: Path, starts: list[tuple[int, int | None]]
) -> tuple[list[object], list[object], int]:
    """Rows, skips and records of a file that is read in these ranges."""
    rows: list[object] = []
    skips: list[object] = []
    records = 0
    for start, stop in starts:
        for batch in read_pages(str(path), max_page_bytes=1 << 20, start=start, stop=stop):
            rows += batch.pages.to_pylist()
            skips += batch.skipped
            records += batch.records
    return rows, skips, records


def damaged(data: bytes, kind: str, choose: random.Random) -> bytes:
    """A file with something wrong behind its first third."""
    place = choose.randrange(len(data) // 3, len(data))
    match kind:
        case "flip":
            return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]
        case "cut":
            return data[:place]
        case "hole":
            return data[:place] + data[place + 999 :]
        case "rubbish":
            return data[:place] + choose.randbytes(500) + data[place:]
        case "one member":
            return gzip.compress(gzip.decompress(data), mtime=0)
        case "plain":
            return gzip.decompress(data)
    return data


KINDS = ("whole", "flip", "cut", "hole", "rubbish", "one member", "plain", "lie", "nested")


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_a_file_give_what_the_file_gives(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local files are read from the first byte on, remote ones (with a tag) at the split points
    only.
    """
    monkeypatch.setattr(split_inputs, "_RUN", 2_000)
    for seed in range(4):
        choose = random.Random(seed)
        records = make_records(seed, 40)
        if kind == "lie":  # a record that says it is longer, or shorter, than it is
            header = gzip.decompress(records[20])
            said = header.split(b"Content-Length: ")[1].split(b"\r\n")[0]
            other = str(int(said) + choose.choice((-9, 9, 100_000))).encode()
            records[20] = gzip.compress(
                header.replace(b"Content-Length: " + said, b"Content-Length: " + other), mtime=0
            )
        # a crawl file as a page of a crawl: its bytes look like members of this one
        if kind == "nested":
            body = b"<p>" + b"".join(records[:9])
            records[20] = format_record("https://e.org/crawl", "2024-01-01T00:00:00Z", body)
        path = tmp_path / f"{seed}.warc.gz"
        path.write_bytes(damaged(b"".join(records), kind, choose))
        whole = pages_of(path, [(0, None)])
        for size, identity in itertools.product((1, 3_000, 9_000), ("", "tag")):
            ranges = split_file(str(path), size, identity)
            assert [one.stop for one in ranges[:-1]] == [one.start for one in ranges[1:]]
            assert (ranges[0].start, ranges[-1].stop) == (0, path.stat().st_size)
            assert pages_of(path, [(one.start, one.stop) for one in ranges]) == whole
            assert len(ranges) > (size < 9_000 and kind != "one member")


class CountedPages:
    """A file that notes which pages of 4 KiB are read, and how many bytes in all."""

    def __init__(self, source: InputStream) -> None:
        self.source, self.size, self.read, self.pages = source, source.size, 0, set[int]()

    def read_block(self, position: int, size: int) -> bytes:
        self.read += size
        self.pages |= set(range(position >> 12, (position + size) >> 12))
        return self.source.read_block(position, size)


def test_a_remote_file_is_read_at_its_split_points_only_and_never_split_inside_a_page(
    tmp_path: Path,
) -> None:
    """The page is stored uncompressed, so that its records are those of the file to whoever
    begins inside it.
    """
    records = make_records(0, 700)
    inner = b"".join(make_records(1, 300))
    page = gzip.decompress(format_record("https://e.org/crawl", "2024-01-01T00:00:00Z", inner))
    stored = gzip.compress(page, 0, mtime=0)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join([*records[:200], stored, *records[200:]]))
    begin = sum(map(len, records[:200]))
    ends = {
        begin + len(stored) + size for size in [0, *itertools.accumulate(map(len, records[200:]))]
    }
    with open_input_stream(str(path)) as source:
        assert next(split_inputs._iter_probed_points(source, begin + 1_000)) in ends
        counted = CountedPages(source)
        points = list(split_inputs._iter_probed_points(counted, 250_000))  # type: ignore[arg-type]
    assert len(points) > 1
    assert len(counted.pages) << 12 < source.size / 2
    # a search inside the page gives each of its records up at once
    assert counted.read < 20 * source.size


def test_a_remote_member_of_many_records_is_read_as_far_as_its_first_record(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(gzip.decompress(b"".join(make_records(0, 3000))), mtime=0))
    with open_input_stream(str(path)) as source:
        counted = CountedPages(source)
        assert list(split_inputs._iter_probed_points(counted, 100_000)) == []  # type: ignore[arg-type]
    assert counted.read < source.size / 2


def test_a_file_is_cut_at_the_same_places_wherever_it_changes_behind_them(tmp_path: Path) -> None:
    records = make_records(1, 40)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(records))
    before = split_file(str(path), 5_000)
    path.write_bytes(b"".join([*records[:30], records[39], *records[30:]]))
    after = split_file(str(path), 5_000)
    same = len(
        list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    )
    assert same >= len(before) // 2
    assert after[-1].digest == before[-1].digest or same < len(before)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), files=2)


def outputs(folder: Path) -> dict[str, str]:
    """What a dataset promises whatever its blocks: everything but the intermediates."""
    return {
        name: digest for name, digest in hash_files(folder).items() if not name.startswith("work/")
    }


PLAIN = {
    "rules": [],
    "deduplicate": {"exact": {"kind": "text"}, "minhash": {"kind": "none"}},
    "documents": {"num_shards": 2, "batch_bytes": 2_000},
}


def test_what_is_dropped_lies_in_the_same_order_whatever_the_blocks(tmp_path: Path) -> None:
    texts = [
        write_sentences(random.Random(1), 2),
        [GERMAN * 8],
        write_sentences(random.Random(0), 16),
    ] * 4
    records = [
        format_record(f"https://e.org/{n}", "2024-01-01T00:00:00Z", format_page(text))
        for n, text in enumerate(texts)
    ]
    (tmp_path / "a.warc.gz").write_bytes(b"".join(records))
    dedup = {"exact": {"kind": "text"}, "minhash": {"kind": "none"}}
    for name, size in (("whole", 1 << 30), ("blocks", 1)):
        executor = {"kind": "inline", "block_bytes": size}
        config = build_tiny_config(tmp_path / name, tmp_path, executor=executor, deduplicate=dedup)
        prepare_dataset(config, until="documents")
    assert len(list_blocks(tmp_path / "blocks")) > 8
    assert outputs(tmp_path / "blocks") == outputs(tmp_path / "whole")


def test_any_size_of_blocks_gives_the_same_dataset_and_a_changed_block_is_done_alone(
    crawl: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(crawl, tmp_path / "crawl")
    whole = prepare_dataset(build_tiny_config(tmp_path / "whole", own, **PLAIN), until="documents")
    small = {"kind": "inline", "block_bytes": 1_500}
    config = build_tiny_config(tmp_path / "blocks", own, executor=small, **PLAIN)
    assert prepare_dataset(config, until="documents") == whole
    assert len(list_blocks(tmp_path / "blocks")) > 8
    assert outputs(tmp_path / "blocks") == outputs(tmp_path / "whole")
    last = own / "crawl-1.warc.gz"
    new = format_record(
        "https://new.org/",
        "2024-06-01T00:00:00Z",
        format_page(write_sentences(random.Random(5), 16)),
    )
    last.write_bytes(last.read_bytes() + new)
    prepare_dataset(config, until="documents")
    events = read_events(tmp_path / "blocks" / "events.jsonl")
    tasks = {event["stage"]: event["tasks"] for event in events if event["event"] == "stage"}
    assert tasks["split_inputs"] == 1
    assert tasks["extract"] <= 2
    assert load_manifest(tmp_path / "blocks").read.records == whole.read.records + 1


def test_a_remote_file_is_cut_into_blocks(
    crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in crawl.iterdir():
        fsspec.filesystem("memory").pipe(f"/cut/{path.name}", path.read_bytes())
    monkeypatch.setattr(split_inputs, "_RUN", 1_000)

    def prepare(name: str, block_bytes: int) -> int:
        executor = {"kind": "inline", "block_bytes": block_bytes}
        config = build_tiny_config(
            tmp_path / name, ["memory://cut/*.warc.gz"], executor=executor, **PLAIN
        )
        prepare_dataset(config, until="documents")
        return len(list_blocks(tmp_path / name))

    files = prepare("whole", 1 << 30)
    for size in (1_500, 4_000):
        assert prepare("blocks", size) > files
        assert outputs(tmp_path / "blocks") == outputs(tmp_path / "whole")

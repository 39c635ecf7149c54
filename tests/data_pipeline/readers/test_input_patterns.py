"""Laws of file names and patterns: bytes that are not UTF-8, links that lead back, and addresses
with spaces in ARC.
"""

import os
from pathlib import Path

import pytest

from llmsys.config.loading.merge import read_overrides
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.file_patterns import match_files
from llmsys.data_pipeline.readers.input_files import find_inputs, get_input_name
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_batches, verify_checksums
from llmsys.errors import ConfigError, DataError
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

ODD = os.fsdecode(b"caf\xe9 \xff.warc.gz")
SHOWN = "caf%E9 %FF.warc.gz"


@pytest.mark.parametrize("block_bytes", [1 << 30, 4_096], ids=["whole", "blocks"])
def test_a_file_whose_name_is_not_utf8_is_prepared_like_any_other(
    tmp_path: Path, block_bytes: int
) -> None:
    crawl = make_crawl(tmp_path / "crawl")
    first = sorted(crawl.glob("*.warc.gz"))[0]
    with (crawl / first.name).open("ab") as file:
        file.write(b"garbage, so that something is skipped")
    config = build_tiny_config(
        tmp_path / "plain",
        [f"{crawl}/*.gz"],
        executor={"kind": "inline", "block_bytes": block_bytes},
    )
    prepare_dataset(config, until="documents")
    first.rename(crawl / ODD)
    config = build_tiny_config(
        tmp_path / "odd", [f"{crawl}/*.gz"], executor={"kind": "inline", "block_bytes": block_bytes}
    )
    prepare_dataset(config, until="documents")
    verify_checksums(tmp_path / "odd")

    def documents(folder: str) -> dict[str, str]:
        files = (tmp_path / folder / "documents").glob("*.arrow")
        return {
            row["id"]: row["file"]
            for name in files
            for batch in read_batches(name)
            for row in batch.to_pylist()
        }

    plain, odd = documents("plain"), documents("odd")
    assert plain.keys() == odd.keys()
    assert {name: file.replace(first.name, SHOWN) for name, file in plain.items()} == odd
    assert [skip.file for skip in load_manifest(tmp_path / "odd").read.skipped] == [
        f"{crawl}/{SHOWN}"
    ]


def test_a_list_may_name_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / ODD
    path.write_bytes(b"x")
    (tmp_path / "list").write_bytes(os.fsencode(path) + b"\n")
    assert find_inputs([f"@{tmp_path}/list"]) == [str(path)]
    assert get_input_name(str(path)) == SHOWN
    (tmp_path / "binary").write_bytes(b"\x1f\x8b\0")
    with pytest.raises(
        DataError,
        match=r"binary' cannot be read: it is not a text file. Give a text file with one path per "
        r"line.",
    ):
        find_inputs([f"@{tmp_path}/binary"])


def test_a_name_on_the_command_line_that_is_not_utf8_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        read_overrides([f"data.inputs=[{ODD}]"])
    assert "command line, data.inputs: character 5 is '\\udce9', which YAML does not allow." in str(
        caught.value
    )
    assert (
        "write ? as a pattern instead, or name the file in a list: 'data.inputs=[\"@files.txt\"]'."
        in str(caught.value)
    )


def test_links_that_lead_back_add_nothing_and_end(tmp_path: Path) -> None:
    folder = tmp_path / "crawl" / "2024" / "05"
    folder.mkdir(parents=True)
    (folder / "a.warc").write_bytes(b"x")
    (tmp_path / "crawl" / "b.warc").write_bytes(b"x")
    for name in ("loop", "again", "zz"):
        (folder / name).symlink_to(tmp_path / "crawl")
    (tmp_path / "crawl" / "self").symlink_to("self")
    expected = [f"{folder}/a.warc", f"{tmp_path}/crawl/b.warc"]
    for pattern in ("crawl/**/*.warc", "**/crawl/**/*.warc", "**", "crawl/**/**/*.warc"):
        assert [
            path for path in find_inputs([f"{tmp_path}/{pattern}"]) if path.endswith(".warc")
        ] == expected, pattern


def test_a_linked_folder_is_entered_once_by_its_own_path_if_it_has_one(tmp_path: Path) -> None:
    for name in ("in/z", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.warc").write_bytes(b"x")
    (tmp_path / "in" / "a").symlink_to(tmp_path / "in" / "z")
    (tmp_path / "in" / "m").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "n").symlink_to(tmp_path / "elsewhere")
    assert find_inputs([f"{tmp_path}/in/**/*.warc"]) == [
        f"{tmp_path}/in/m/deep/x.warc",
        f"{tmp_path}/in/z/x.warc",
    ]


def test_patterns_match_what_glob_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import glob

    for name in ("a/b/c.gz", "a/d[1].gz", "a/.hidden/e.gz", "f.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    for start in ("", f"{tmp_path}/"):
        for pattern in (
            "**/*.gz",
            "a/**/*.gz",
            "**/b/*.gz",
            "*/**/c.gz",
            "a/*.gz",
            "**/.hidden/*.gz",
            "none/**/*.gz",
        ):
            found = {os.path.normpath(path) for path in match_files(start + pattern)}
            assert found == {
                os.path.normpath(path) for path in glob.glob(start + pattern, recursive=True)
            }, pattern
        files = {
            os.path.normpath(path) for path in match_files(f"{start}a/**") if os.path.isfile(path)
        }
        assert files == {os.path.normpath(f"{start}a/{name}") for name in ("b/c.gz", "d[1].gz")}


@pytest.mark.parametrize(
    ("line", "url"),
    [
        (
            b"http://example.org/a b  c.html?q=1 2 1.2.3.4 20140216050221 text/html %d",
            "http://example.org/a b  c.html?q=1 2",
        ),
        (
            b"http://example.org/x y 2001:db8::1 20140216050221 text/html %d",
            "http://example.org/x y",
        ),
        (
            b"http://example.org/x y 1.2.3.4 20140216050221 text/html 200 abc - 5 a.arc.gz %d",
            "http://example.org/x y",
        ),
        (
            b"http://example.org/xy 0.0.0.0 20140216050221 text/html; charset=utf-8 %d",
            "http://example.org/xy",
        ),
    ],
)
def test_an_arc_address_with_spaces_is_read(tmp_path: Path, line: bytes, url: str) -> None:
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><p>old</p></html>"
    first = b"filedesc://a.arc 0.0.0.0 20140101000000 text/plain 7\n1 0 x\n\n\n"
    path = tmp_path / "a.arc"
    for between in (b"", b"garbage between two records\n"):
        path.write_bytes(first + between + (line % len(block) + b"\n" + block + b"\n") * 2)
        batches = list(read_pages(str(path), max_page_bytes=100_000))
        pages = [page for batch in batches for page in batch.pages.to_pylist()]
        assert [(page["url"], page["date"]) for page in pages] == [
            (url, "2014-02-16T05:02:21Z")
        ] * 2

"""A reader of the user's own code: its documents, what its source decides, damage, and the
refusals.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest

from llmsys.config.cleaning import PythonReaderConfig, ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.readers.python_reader import Document, PythonReader, check_python_reader
from llmsys.dataset.manifest import Manifest
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import ConfigError, DataError
from llmsys.launch.commands.templates.reader import Mailbox
from tests.helpers.paths import ROOT

TEMPLATE = (ROOT / "launch/commands/templates/reader.py").read_text()
MAIL = (
    b"From a\nMessage-ID: 1\n\nThe first message of two in this mailbox.\n\nFrom b\n\nA second "
    b"one without an id.\n"
)
PAGES = """
from llmsys.data_pipeline.readers.python_reader import Document, PythonReader


class Pages(PythonReader):
    def read(self, file):
        for line in file:
            yield Document(html=line.decode(), url="https://example.org/")
            if line.startswith(b"broken"):
                raise {error}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TEMPLATE)
    Path("a.mbox").write_bytes(MAIL)
    return tmp_path


def prepare() -> tuple[Manifest, list[str]]:
    reader = {"kind": "python", "path": "own.py:Mailbox"}
    data = {"folder": "made", "inputs": [{"path": "*.mbox", "reader": reader}],
        "executor": {"kind": "inline"},
            "language": {"languages": [], "min_score": 0},
            "documents": {"num_shards": 1}}  # fmt: skip
    manifest = prepare_dataset(
        RunConfig.model_validate({"data": {"kind": "crawl"} | data}), "documents"
    )
    rows = [
        row
        for batch in read_batches(Path("made/documents/part-00000.arrow"))
        for row in batch.to_pylist()
    ]
    return manifest, sorted(row["text"] for row in rows)


def test_its_documents_are_prepared_and_an_edit_makes_them_again() -> None:
    _, texts = prepare()
    assert texts == ["A second one without an id.", "The first message of two in this mailbox."]
    Path("own.py").write_text(TEMPLATE.replace(".strip() if", ".strip().upper() if"))
    manifest, texts = prepare()
    assert texts == ["A SECOND ONE WITHOUT AN ID.", "THE FIRST MESSAGE OF TWO IN THIS MAILBOX."]
    assert manifest.config["data"]["inputs"][0]["reader"]["path"] == "own.py:Mailbox"


def test_a_crawl_without_a_reader_keeps_the_keys_of_its_tasks() -> None:
    assert "reader" not in ReadConfig().model_dump(mode="json")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("EOFError('cut')", "damaged file after 2 documents: cut"),
        ("OSError('crc')", "crc"),
        (
            "__import__('zlib').error('invalid block')",
            "damaged file after 2 documents: invalid block",
        ),
        ("__import__('lzma').LZMAError('corrupt')", "damaged file after 2 documents: corrupt"),
    ],
)
def test_pages_are_extracted_and_damage_loses_the_rest_of_a_file(error: str, message: str) -> None:
    Path("own.py").write_text(PAGES.format(error=error))
    Path("a.pages").write_text("<p>One</p>\nbroken\n<p>Two</p>\n")
    config = ReadConfig(reader=PythonReaderConfig(path="own.py:Pages"))
    [batch] = read_pages("a.pages", max_page_bytes=1000, config=config)
    assert batch.pages.column("payload").to_pylist() == [b"<p>One</p>\n", b"broken\n"]
    assert batch.pages.column("text").to_pylist() == [None, None]
    [skip] = batch.skipped
    assert message in skip.reason
    assert not skip.is_retryable


def test_an_error_of_the_code_names_the_file_and_the_line() -> None:
    Path("own.py").write_text(PAGES.format(error="KeyError('subject')"))
    Path("a.pages").write_text("broken\n")
    config = ReadConfig(reader=PythonReaderConfig(path="own.py:Pages"))
    with pytest.raises(
        DataError,
        match=r"own.py:Pages failed on a.pages after 1 documents: KeyError: 'subject', line 10",
    ):
        list(read_pages("a.pages", max_page_bytes=1000, config=config))
    Path("own.py").write_text(
        PAGES.replace('Document(html=line.decode(), url="https://example.org/")', "line")
    )
    with pytest.raises(DataError, match=r"as document 0\. Yield Document"):
        list(read_pages("a.pages", max_page_bytes=1000, config=config))


def test_a_missing_class_is_named_before_the_crawl_is_read() -> None:
    data = CrawlConfig(read=ReadConfig(reader=PythonReaderConfig(path="own.py:Nothing")))
    with pytest.raises(
        ConfigError,
        match=r"has no class Nothing that extends PythonReader\. Use one of these: Mail",
    ):
        require_resource_files(data)


readings = count()


class _Counting(PythonReader):
    def read(self, file: BinaryIO) -> Iterator[Document]:
        yield Document(text=str(next(readings)))


def test_the_kit_compares_documents_and_two_readings() -> None:
    with pytest.raises(ConfigError, match="yields other documents when it reads a file again"):
        check_python_reader(_Counting(), b"", [])
    with pytest.raises(ConfigError, match="Correct read, or the expected texts"):
        check_python_reader(Mailbox(), MAIL, ["The first message of two in this mailbox."])

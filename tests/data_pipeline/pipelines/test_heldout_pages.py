"""Held-out pages of a comparison: by hash before any rule, without those that the crawl repeats."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from llmsys.config.data import CrawlConfig
from llmsys.config.language import LanguageConfig
from llmsys.data_pipeline.pipelines.heldout_pages import (
    build_pages_config,
    build_unfiltered_config,
    write_heldout_pages,
    write_kept_pages,
)
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_batches
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

FRACTION = 0.5
LANGUAGE = LanguageConfig()


def read_documents(folder: Path) -> dict[str, str]:
    return {
        row["id"]: row["text"]
        for file in load_manifest(folder).documents.files
        for batch in read_batches(folder / "documents" / file.name)
        for row in batch.select(["id", "text"]).to_pylist()
    }


def is_held(name: str) -> bool:
    """The definition, without our arrays: a keyed hash of the id as a fraction of 1."""
    digest = hashlib.blake2b(name.encode(), key=b"heldout:0", digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < FRACTION


def find_near_copies(texts: dict[str, str]) -> set[str]:
    """Ids of pages that share most of their sentences with another one, pair by pair."""
    sentences = {name: set(text.split(".")) for name, text in texts.items()}
    return {
        one
        for one in texts
        for other in texts
        if one != other and len(sentences[one] & sentences[other]) > 0.6 * len(sentences[one])
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    make_crawl(folder / "crawl")
    return folder


def build(folder: Path, name: str, **data: Any) -> Any:
    split = {"split": {"heldout_fraction": FRACTION}}
    return build_tiny_config(folder / name, folder / "crawl", **(split | data))


def prepare_pages(folder: Path) -> CrawlConfig:
    # A rule that half of the pages fail: they have 16 sentences of 8 to 15 words.
    base = build(folder, "base", rules=[{"kind": "gopher_quality", "min_words": 184}])
    prepare_dataset(base)
    data = build_unfiltered_config(base.data, folder / "all", has_urls=True)
    prepare_dataset(base.model_copy(update={"data": data}), "documents")
    return data


def test_pages_are_those_of_the_hash_without_copies_and_no_rule_touches_them(folder: Path) -> None:
    data = prepare_pages(folder)
    everything = {"rules": [], "deduplicate": {"exact": {"kind": "none"}}}
    everything["deduplicate"] |= {"minhash": {"kind": "none"}}
    whole = build(folder, "everything", **everything)
    prepare_dataset(whole, "documents")
    texts = read_documents(whole.data.folder)
    copied = find_near_copies(texts)
    assert copied, "the crawl has copies"
    written = write_heldout_pages(data, LANGUAGE, folder / "pages.parquet")
    rows = {row["id"]: row["text"] for row in pq.read_table(folder / "pages.parquet").to_pylist()}
    wanted = {name: text for name, text in texts.items() if is_held(name) and name not in copied}
    assert rows == wanted
    # German pages are known as copies of each other, and none is in the languages of the set.
    german = [text for text in read_documents(data.folder).values() if "Hund" in text]
    assert german
    assert not any("Hund" in text for text in rows.values())
    assert "Too short to stay." in " ".join(texts.values())
    assert written.documents == len(wanted)
    assert written.text_bytes == sum(len(text.encode()) for text in wanted.values())
    # Of each group the one that stays may be held out.
    assert 0 < written.left_out <= len(copied)
    kept = write_kept_pages(folder / "base", folder / "pages.parquet", folder / "kept.parquet")
    names = set(pq.read_table(folder / "kept.parquet").column("id").to_pylist())
    assert names == wanted.keys() & read_documents(folder / "base").keys()
    assert 0 < kept.documents == len(names) < written.documents


def test_the_set_has_every_page_as_it_is_and_nothing_to_train_on(folder: Path) -> None:
    data = prepare_pages(folder)
    written = write_heldout_pages(data, LANGUAGE, folder / "pages.parquet")
    own = build_pages_config(data, folder / "pages.parquet", folder / "set")
    manifest = prepare_dataset(build(folder, "base").model_copy(update={"data": own}), "documents")
    rows = pq.read_table(folder / "pages.parquet").to_pylist()
    assert read_documents(folder / "set") == {row["id"]: row["text"] for row in rows}
    assert manifest.funnel[-1].documents_out == written.documents


def test_the_same_pages_give_the_same_file(folder: Path) -> None:
    data = prepare_pages(folder)
    write_heldout_pages(data, LANGUAGE, folder / "one.parquet")
    write_heldout_pages(data, LANGUAGE, folder / "two.parquet")
    assert (folder / "one.parquet").read_bytes() == (folder / "two.parquet").read_bytes()

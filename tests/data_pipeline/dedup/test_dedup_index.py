"""Laws of comparing across datasets and of the filter: earlier copies stay, damage is refused,
nothing is missed.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsys.data_pipeline.dedup import keys
from llmsys.data_pipeline.dedup.bloom_filter import CountingBloomFilter, compute_filter_size
from llmsys.data_pipeline.pipelines import gather_stage
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from tests.helpers.deduplication import build_document, deduplicate_documents
from tests.helpers.killed_preparations import read_kept_bytes
from tests.helpers.tiny_crawl import build_tiny_config, list_blocks, make_crawl, read_packed_places

CHOOSE = random.Random(4)
WORDS = ["".join(CHOOSE.choices("bdfgklmnrst", k=5)) for _ in range(400)]
LONG, OTHER, THIRD = (" ".join(CHOOSE.choices(WORDS, k=120)) for _ in range(3))
MINHASH = {"kind": "minhash", "buckets": 20, "hashes_per_bucket": 4}
INDEXED: dict[str, Any] = {"url": {"kind": "url"}, "minhash": MINHASH, "index": {"kind": "kept"}}


def named(number: int, text: str, url: str) -> dict[str, Any]:
    return build_document(f"{number:032x}", text, url=url)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    rows = [named(1, LONG, "u1"), named(2, OTHER, "u2"), named(3, OTHER, "u3")]
    deduplicate_documents(tmp_path / "spring", rows, INDEXED, files=2)
    return tmp_path / "spring"


@pytest.mark.parametrize(
    "keys", [{"kind": "sorted"}, {"kind": "bloom"}, {"kind": "sorted", "keys_per_task": 3}]
)
def test_what_an_earlier_dataset_holds_stays_there_and_is_dropped_here(
    earlier: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    near = f"{LONG} {LONG.split()[0]}"  # longer than its earlier copy, and yet it goes
    rows = [named(11, "new text", "u1"), named(12, OTHER, "u12"), named(13, near, "u13")]
    rows += [named(14, f"{near} more", "u14"), named(15, THIRD, "u15"), named(16, "short", "u3")]
    for order in (rows, rows[::-1]):
        folder = tmp_path / f"{keys}{order[0]['url']}"
        kept, gone = deduplicate_documents(
            folder, order, INDEXED | {"earlier_datasets": [earlier], "key_filter": keys}, files=3
        )
        # u3 was itself dropped in spring: its text was u2's
        assert {row["url"] for row in kept} == {"u15", "u3"}
        assert {row["url"]: row["reason"] for row in gone} == {
            "u1": f"url_duplicates: same url with {1:032x} of the earlier dataset spring",
            "u12": f"exact_duplicates: same text with {2:032x} of the earlier dataset spring",
            "u13": f"near_duplicates: shares a bucket with {1:032x} of the earlier dataset spring",
            "u14": f"near_duplicates: shares a bucket with {1:032x} of the earlier dataset spring",
        }
    third = tmp_path / "third"
    kept, gone = deduplicate_documents(
        third, [named(21, THIRD, "u21")], INDEXED | {"earlier_datasets": [earlier, folder]}
    )
    assert kept == []
    assert gone[0]["test"] == "same text as an earlier dataset"
    assert gone[0]["reason"].endswith(f"{15:032x} of the earlier dataset {folder.name}")


def test_an_index_that_cannot_be_compared_with_is_refused(earlier: Path, tmp_path: Path) -> None:
    def refused(**config: Any) -> str:
        with pytest.raises(DataError) as error:
            deduplicate_documents(
                tmp_path / "now",
                [named(1, LONG, "u")],
                {"earlier_datasets": [earlier], "minhash": MINHASH} | config,
            )
        return str(error.value)

    assert "has no index" in refused(earlier_datasets=[tmp_path])
    assert "data.deduplicate.index.kind=kept" in refused(earlier_datasets=[tmp_path])
    assert "Use the same values in both" in refused(minhash={**MINHASH, "buckets": 19})
    content = json.loads((earlier / "index" / "index.json").read_text())
    (earlier / "index" / "index.json").write_text(json.dumps(content | {"format_version": 2}))
    assert (
        "index.json has deduplication index format 2, written by llmsys 0.1; llmsys 0.2.0 reads "
        "format 3"
    ) in refused()
    less = {kind: files for kind, files in content["keys"].items() if kind != "exact"}
    (earlier / "index" / "index.json").write_text(json.dumps(content | {"keys": less}))
    assert "holds minhash, url, but no exact keys" in refused()
    assert content["by_characters"] == {"default": False, "en": False}
    (earlier / "index" / "index.json").write_text(
        json.dumps(content | {"by_characters": {"en": True, "xx": True}})
    )
    assert (
        "near duplicates in en found by characters, and this config's data.language.profiles"
        in refused()
    )
    (earlier / "index" / "index.json").write_text(json.dumps(content))
    path = next((earlier / "index").glob("minhash-*.arrow"))
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    assert f"{path} does not match" in refused()
    deduplicate_documents(earlier, [named(1, LONG, "u1")], {"minhash": {"kind": "none"}})
    # an index that is not asked for any more is none
    assert not (earlier / "index" / "index.json").exists()


def test_the_filter_misses_no_repeat_and_lets_through_the_share_that_was_asked_for() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 64, size=40_000, dtype=np.uint64)
    twice = keys[:4_000]
    for error_rate in (0.1, 0.01):
        masks = []
        for parts in (
            np.split(np.concatenate([keys, twice]), 11),
            [np.concatenate([twice, keys[::-1]])],
        ):
            found = CountingBloomFilter(44_000, error_rate)
            for part in parts:
                found.add_keys(part)
            masks.append(found.query_repeated(keys))
        assert (masks[0] == masks[1]).all()  # neither order nor batches decide
        assert masks[0][:4_000].all()
        assert 0.5 * error_rate < masks[0][4_000:].mean() < 1.5 * error_rate
    assert compute_filter_size(1_000_000, 0.01) == (9_585_059, 7)  # Bloom's formulas


ALL_KINDS: dict[str, Any] = {
    "url": {"kind": "url"},
    "repeated_segments": {"kind": "sentences", "sentences": 2, "min_words": 20},
    "minhash": MINHASH,
    "substring": {"kind": "substring", "min_characters": 60, "min_words": 20},
    "index": {"kind": "kept"},
    "key_filter": {"kind": "sorted", "keys_per_task": 1_500},
}


def test_every_kind_together_gives_the_same_bytes_whoever_works_in_whatever_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, or two on shuffled inputs in blocks of another size; the index is among the
    bytes.

    In the second run the blocks are more than a group, so that keys, decisions and documents are
    gathered by groups.
    """
    crawl = make_crawl(tmp_path / "crawl", files=2)
    names = [f"{crawl}/crawl-{number}.warc.gz" for number in range(2)]
    found = {}
    for name, inputs, executor in (
        ("two", names[::-1], {"kind": "local", "workers": 2, "block_bytes": 5_000}),
        ("groups", names, {"kind": "inline", "block_bytes": 2_000}),
    ):
        if name == "groups":
            for module in (keys, gather_stage):
                monkeypatch.setattr(module, "FILES_PER_GROUP", 2)
            monkeypatch.setattr(keys, "MAX_GROUPS", 3)
        config = build_tiny_config(
            tmp_path / name, inputs, deduplicate=ALL_KINDS, executor=executor
        )
        manifest = prepare_dataset(config, until="documents")
        found[name] = read_kept_bytes(tmp_path / name) | {"manifest.json": ""}, manifest.funnel
    assert len(list((tmp_path / "two" / "index").iterdir())) == 6
    two, groups = (len(list_blocks(tmp_path / name)) for name in ("two", "groups"))
    assert groups > two
    assert found["two"] == found["groups"]
    gathered = read_packed_places(tmp_path / "groups", "gather")
    keys_of_groups = read_packed_places(tmp_path / "groups", "groups.signatures.exact")
    assert len(gathered) > 3 >= len(keys_of_groups) > 1
    stages = [stage.stage for stage in manifest.funnel][-5:]
    assert stages == [
        "url_duplicates",
        "exact_duplicates",
        "repeated_segments",
        "near_duplicates",
        "duplicate_substrings",
    ]
    last = manifest.funnel[-1]
    assert 0 < last.bytes_out < manifest.funnel[-3].bytes_in
    assert last.documents_out == sum(file.rows for file in manifest.documents.files)
    for stage, following in itertools.pairwise(manifest.funnel[1:]):
        assert (stage.documents_out, stage.bytes_out) == (
            following.documents_in,
            following.bytes_in,
        )

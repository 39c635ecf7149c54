"""Laws of the filters inside a preparation: every drop is in funnel and report, bytes follow
from the data alone.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError
from llmsys.launch.commands.prepare import list_spared_items
from llmsys.report.contamination_section import build_contamination_section
from tests.helpers.tiny_crawl import (
    build_tiny_config,
    format_page,
    format_record,
    hash_files,
    write_sentences,
)

QUESTION = (
    "Which of the seven grey geese flew over the frozen lake before the sun rose behind a hill on "
    "Monday?"
)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of pages, of which each filter has something to say about a few."""
    folder, choose = tmp_path_factory.mktemp("crawl"), random.Random(0)
    lines = {
        3: QUESTION,
        4: "Write to joe@mail.com or 8.8.8.8 now.",
        5: "The cafÃ© is schÃ¶n.",
        6: "What a damn day.",
    }
    for number in range(2):
        records = []
        for index in range(8):
            paragraphs = write_sentences(choose, 12)
            paragraphs[5] = lines.get(index, paragraphs[5])
            url = (
                "https://www.evil.org/1" if index == 1 else f"https://example.org/{number}/{index}"
            )
            records.append(
                format_record(url, f"2024-05-01T00:00:{index:02d}Z", format_page(paragraphs))
            )
        (folder / f"crawl-{number}.warc.gz").write_bytes(b"".join(records))
    return folder


def sections(folder: Path, action: str = "drop") -> dict[str, Any]:
    items = folder / "items.jsonl"
    items.write_text(json.dumps({"id": "q1", "question": QUESTION.lower()}) + "\n")
    evaluation = {"name": "quiz", "files": [items], "query_fields": ["question"], "id_field": "id"}
    return {
        "url": {"kind": "lists", "hosts": {"entries": ["evil.org"]}},
        "unicode": {"kind": "ftfy"},
        "rules": [
            {"kind": "bad_words", "word_lists": [{"language": "en", "entries": ["damn"]}],
                "action": "drop_line"}
        ],
        "decontaminate": {
            "kind": "ngram", "sets": [evaluation], "action": action, "margin_characters": 0,
            "min_piece_characters": 1,
        },
        "pii": {"kind": "replace"},
        "deduplicate": {"minhash": {"kind": "none"}},
        "documents": {"num_shards": 2, "batch_bytes": 2_000},  # several batches a file
    }  # fmt: skip


def rows(folder: Path, room: str) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((folder / room).iterdir())
        for batch in read_batches(path)
        for row in batch.to_pylist()
    ]


def test_each_filter_is_in_the_funnel_and_what_it_found_in_the_report(
    crawl: Path, tmp_path: Path
) -> None:
    manifest = prepare_dataset(
        build_tiny_config(tmp_path / "data", crawl, **sections(tmp_path)), until="documents"
    )
    stages = {stage.stage: stage for stage in manifest.funnel}
    order = [
        "read",
        "url",
        "extract",
        "unicode",
        "language",
        "bad_words",
        "exact_duplicates",
        "decontaminate",
        "pii",
    ]
    assert [name for name in stages if name in order] == order
    for stage, following in zip(manifest.funnel, [*manifest.funnel[1:], None], strict=True):
        assert (
            stage.documents_in - sum(drop.documents for drop in stage.dropped)
            == stage.documents_out
        )
        assert following is None or following.documents_in == stage.documents_out
    assert stages["unicode"].changed == {"documents repaired": 2, "lines repaired": 2}
    assert stages["bad_words"].changed == {"line taken out: listed word": 2}
    assert stages["pii"].changed == {"email replaced": 2, "ip replaced": 2}
    dropped = Counter((row["stage"], row["test"]) for row in rows(tmp_path / "data", "dropped"))
    assert dropped == {("url", "domain"): 2, ("decontaminate", "matches"): 2}
    texts = {row["url"]: row for row in rows(tmp_path / "data", "documents")}
    assert len(texts) == 12
    assert "The café is schön." in texts["https://example.org/0/5"]["text"]
    assert not any("joe@" in row["text"] or "damn" in row["text"] for row in texts.values())
    assert sum(row["pii.ip"] for row in texts.values()) == 2
    lines = [
        line
        for path in (tmp_path / "data" / "decontamination").iterdir()
        for line in path.read_text().splitlines()
    ]
    found = [json.loads(line) for line in lines]
    assert {(row["set"], row["item"], row["url"]) for row in found} == {
        ("quiz", "q1", f"https://example.org/{number}/3") for number in range(2)
    }
    assert all(QUESTION in row["excerpt"] and row["ngram"] in QUESTION for row in found)
    summary = manifest.decontamination
    assert summary is not None
    assert (summary.sets["quiz"].items_found, summary.sets["quiz"].documents_dropped) == (1, 2)
    part = build_contamination_section(load_manifest(tmp_path / "data"))
    assert part is not None
    assert QUESTION in "".join(map(str, part.content))


def test_a_fuzzy_match_drops_pages_with_changed_words_and_says_which_share(
    crawl: Path, tmp_path: Path
) -> None:
    asked = sections(tmp_path)
    changed = QUESTION.replace("seven", "nine").replace("lake", "river").replace("hill", "wood")
    (evaluation,) = asked["decontaminate"]["sets"]
    (tmp_path / "fuzzy.jsonl").write_text(json.dumps({"id": "q2", "question": changed}) + "\n")
    evaluation["files"] = [tmp_path / "fuzzy.jsonl"]
    for fuzzy, dropped in (("none", 0), ("coverage", 2)):
        asked["decontaminate"]["fuzzy"] = {"kind": fuzzy}
        manifest = prepare_dataset(
            build_tiny_config(tmp_path / "data", crawl, **asked), until="documents"
        )
        assert manifest.decontamination is not None
        assert manifest.decontamination.sets["quiz"].documents_dropped == dropped
    found = [
        json.loads(line)
        for path in (tmp_path / "data" / "decontamination").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert {(row["item"], row["words"], row["action"]) for row in found} == {("q2", 20, "dropped")}
    assert all(0.6 <= row["share"] < 1 for row in found)
    section = build_contamination_section(load_manifest(tmp_path / "data"))
    assert section is not None
    assert f"{found[0]['share']:.0%} of its words" in "".join(map(str, section.content))


def test_bytes_follow_from_the_data_and_what_is_no_longer_asked_for_is_undone(
    crawl: Path, tmp_path: Path
) -> None:
    names = [f"{crawl}/crawl-{number}.warc.gz" for number in (1, 0)]
    cut = sections(tmp_path, "cut")
    prepare_dataset(build_tiny_config(tmp_path / "one", crawl, **cut), until="documents")
    workers = {"kind": "local", "workers": 1}
    prepare_dataset(
        build_tiny_config(tmp_path / "two", names, **cut, executor=workers), until="documents"
    )
    one, two = ({**hash_files(tmp_path / name), "manifest.json": ""} for name in ("one", "two"))
    assert one == two
    documents = rows(tmp_path / "one", "documents")
    assert len(documents) == 14
    assert not any("grey geese" in row["text"] for row in documents)
    prepare_dataset(
        build_tiny_config(tmp_path / "one", crawl, **sections(tmp_path)), until="documents"
    )
    assert len(rows(tmp_path / "one", "documents")) == 12
    plain = {**cut, "decontaminate": {"kind": "none"}, "pii": {"kind": "none"}}
    prepare_dataset(build_tiny_config(tmp_path / "one", crawl, **plain), until="documents")
    prepare_dataset(build_tiny_config(tmp_path / "fresh", crawl, **plain), until="documents")
    assert [row["text"] for row in rows(tmp_path / "one", "documents")] == [
        row["text"] for row in rows(tmp_path / "fresh", "documents")
    ]
    assert sum("joe@mail.com" in row["text"] for row in rows(tmp_path / "one", "documents")) == 2
    assert not list((tmp_path / "one" / "decontamination").iterdir())


@pytest.mark.parametrize("action", ["drop", "cut"])
def test_spared_items_are_named_with_the_documents_that_keep_them(
    crawl: Path, tmp_path: Path, action: str
) -> None:
    asked = sections(tmp_path, action)
    asked["decontaminate"]["max_documents"] = 1
    manifest = prepare_dataset(
        build_tiny_config(tmp_path / "data", crawl, **asked), until="documents"
    )
    urls = {f"https://example.org/{number}/3" for number in range(2)}
    assert urls <= {row["url"] for row in rows(tmp_path / "data", "documents")}
    lines = "".join(
        path.read_text() for path in (tmp_path / "data" / "decontamination").iterdir()
    ).splitlines()
    found = [json.loads(line) for line in lines]
    assert {(row["item"], row["url"], row["action"]) for row in found} == {
        ("q1", url, "spared") for url in urls
    }
    assert manifest.decontamination is not None
    quiz = manifest.decontamination.sets["quiz"]
    assert (quiz.items_spared, quiz.items_found, quiz.documents_dropped) == (1, 0, 0)
    (item,) = quiz.spared
    assert (item.item, item.documents, {example.url for example in item.examples}) == (
        "q1",
        2,
        urls,
    )
    assert item.ngram in QUESTION
    section = build_contamination_section(load_manifest(tmp_path / "data"))
    assert section is not None
    shown = "".join(map(str, section.content))
    assert all(url in shown for url in urls)
    assert "1 items spared" in shown
    (said,) = list_spared_items(manifest)
    assert said.startswith(
        "decontamination: 1 items of quiz are spared because too many documents have them: q1 ("
    )


def test_a_changed_list_is_read_again_and_a_missing_one_is_named(
    crawl: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.txt"
    section = {
        "url": {"kind": "lists", "hosts": {"files": [hosts]}},
        "deduplicate": {"minhash": {"kind": "none"}},
    }
    config = build_tiny_config(tmp_path / "data", crawl, rules=[], **section)
    with pytest.raises(
        DataError, match=r"data\.url: .*hosts\.txt does not exist .* Correct the path"
    ):
        prepare_dataset(config, until="documents")
    left = []
    for entry in ("evil.org", "example.net", "evil.org"):
        hosts.write_text(entry)
        stage = next(
            stage
            for stage in prepare_dataset(config, until="documents").funnel
            if stage.stage == "url"
        )
        left.append(stage.documents_out)
    assert left == [14, 16, 14]

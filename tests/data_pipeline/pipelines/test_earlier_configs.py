"""Laws of a changed config: what an earlier one left saves work, and never changes a byte."""

import json
import os
import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.tokenizer import FileTokenizerConfig
from llmsys.data_pipeline.core.earlier_results import EARLIER
from llmsys.data_pipeline.graph import stage_runner
from llmsys.data_pipeline.graph import tasks as tasks_of_graph
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.stages import apply_rules, changed_thresholds, known_signatures
from llmsys.data_pipeline.tokenize import encode_documents, known_tokens
from tests.helpers.changed_rules import Rules, change_rules
from tests.helpers.tiny_crawl import (
    GERMAN,
    build_tiny_config,
    format_page,
    format_record,
    hash_files,
    write_sentences,
)

NO_LANGUAGE: dict[str, Any] = {"language": {"languages": [], "min_score": 0}}
REPETITION = {
    **{f"max_top_{n}gram_share": 0.5 for n in (2, 3, 4)},
    **{f"max_duplicate_{n}gram_share": 0.7 for n in range(5, 11)},
    **{f"max_duplicate_{part}_share": 0.6 for part in ("line", "paragraph")},
    **{f"max_duplicate_{part}_character_share": 0.6 for part in ("line", "paragraph")},
}
START: Rules = [
    {"kind": "gopher_repetition", **REPETITION},
    {"kind": "line_corrections", "max_removed_word_share": 0.2},
    {"kind": "c4_datatrove", "end_marks": [], "min_sentences": 3},
    {"kind": "gopher_quality", "min_words": 40, "min_stop_words": 1},
    {"kind": "fineweb_quality", "max_duplicate_line_character_share": 0.4},
    {"kind": "native_text"},
]
THRESHOLDS: dict[str, tuple[float, ...]] = {
    "0.max_duplicate_5gram_share": (0.2, 0.9),
    "0.max_top_3gram_share": (0.14, 0.04),
    "0.max_duplicate_line_share": (0.1, 0.6),
    "1.max_removed_word_share": (0.0, 0.02),
    "2.min_sentences": (1, 5),
    "3.min_words": (20, 80),
    "3.max_words": (150, 200),
    "3.min_stop_words": (0, 6),
    "3.max_bullet_line_share": (0.1,),
    "4.max_short_line_share": (0.1, 1.0),
    "4.max_duplicate_line_character_share": (0.1, 0.9),
    "5.min_stop_word_share": (0.3,),
}


def write_page(choose: random.Random) -> bytes:
    """A page with some of everything that the rules measure."""
    lines = [" ".join(write_sentences(choose, choose.randrange(1, 4))) for _ in range(9)]
    for number in range(len(lines)):
        kind = choose.randrange(9)
        if kind == 0:
            lines[number] = lines[0]
        elif kind == 1:
            lines[number] = f"- {lines[number][:20]}"
        elif kind == 2:
            lines[number] = f"{choose.randrange(99)} likes"
        elif kind == 3:
            lines[number] = "READ MORE NOW [1]"
    lines = lines[: choose.randrange(1, 10)]
    if choose.random() < 0.2:
        lines = [GERMAN * choose.randrange(1, 4) for _ in lines]
    return format_page(lines)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of every kind, some of them twice in a file, and blocks of some pages each."""
    choose = random.Random(7)
    folder = tmp_path_factory.mktemp("crawl")
    for file in range(2):
        records = [
            format_record(f"https://e-{file}.org/{i}", "2024-05-01T00:00:00Z", write_page(choose))
            for i in range(60)
        ]
        (folder / f"{file}.warc.gz").write_bytes(b"".join([*records, *records[:3]]))
    return folder


def prepare(folder: Path, crawl: Path, rules: Rules = START, **data: Any) -> dict[str, str]:
    """Prepare a dataset, and return the digest of everything in it."""
    data = NO_LANGUAGE | data
    executor = {"kind": "inline", "block_bytes": 9_000} | data.pop("executor", {})
    until = data.pop("until", "tokens")
    tokenizer = data.pop("tokenizer", None)
    config = build_tiny_config(folder, crawl, rules=rules, executor=executor, **data)
    if tokenizer is not None:
        config = config.model_copy(update={"tokenizer": FileTokenizerConfig(path=tokenizer)})
    prepare_dataset(config, until=until)
    return hash_files(folder)


def count_tasks(folder: Path, after: int = 0) -> Counter[str]:
    """Tasks that ran, by stage."""
    lines = (folder / "events.jsonl").read_text().splitlines()[after:]
    events = [event for event in map(json.loads, lines) if event["event"] == "stage"]
    counts = Counter[str]()
    for event in events:
        counts[event["stage"]] += event["tasks"] + event["eager"]
    return counts


def count_events(folder: Path) -> int:
    return len((folder / "events.jsonl").read_text().splitlines())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Documents that the rules of the present config saw, and blocks that were judged as a whole or
    from what was known.
    """
    counts = Counter[str]()
    take, select = changed_thresholds.take_over_rows, apply_rules._DocumentFilter.select_documents

    def count_taken(*arguments: Any) -> Any:
        found = take(*arguments)
        counts["whole" if found is None else "known"] += 1
        return found

    def count_selected(self: Any, texts: Any, drops: Any) -> Any:
        counts["documents"] += texts.num_rows
        return select(self, texts, drops)

    monkeypatch.setattr(changed_thresholds, "take_over_rows", count_taken)
    monkeypatch.setattr(apply_rules._DocumentFilter, "select_documents", count_selected)
    return counts


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_changed_threshold_gives_the_bytes_of_a_new_dataset(
    name: str, crawl: Path, tmp_path: Path
) -> None:
    prepare(tmp_path / "changed", crawl, until="documents")
    for value in THRESHOLDS[name]:
        rules = change_rules(START, {name: value})
        changed = prepare(tmp_path / "changed", crawl, rules, until="documents")
        assert changed == prepare(tmp_path / f"alone-{value}", crawl, rules, until="documents")


def test_a_changed_threshold_measures_the_documents_alone_that_it_may_change(
    crawl: Path, tmp_path: Path, measured: Counter[str]
) -> None:
    prepare(tmp_path, crawl, until="documents")
    assert measured["documents"] == 126
    measured.clear()
    prepare(tmp_path, crawl, change_rules(START, {"3.min_words": 60}), until="documents")
    # 14 have from 40 to 60 words, 9 fewer, and 4 are dropped later by a rule.
    assert 14 < measured["documents"] < 40
    assert measured["known"] > 4 * measured["whole"]


@pytest.mark.parametrize(
    "data",
    [
        {"extract": {"kind": "article", "format": "markdown"}},
        {"unicode": {"kind": "ftfy"}, "url": {"kind": "lists", "hosts": {"entries": ["e-1.org"]}}},
        {"language": {"languages": ["en", "de"], "min_score": 0.5}},
    ],
    ids=["markdown", "unicode and url", "languages"],
)
def test_other_sections_do_not_matter(data: dict[str, Any], crawl: Path, tmp_path: Path) -> None:
    rules = change_rules(START, {"3.min_words": 70, "2.min_sentences": 2})
    prepare(tmp_path / "changed", crawl, until="documents", **data)
    changed = prepare(tmp_path / "changed", crawl, rules, until="documents", **data)
    assert changed == prepare(tmp_path / "alone", crawl, rules, until="documents", **data)


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_thresholds_gives_the_bytes_of_new_datasets(
    seed: int, crawl: Path, tmp_path: Path
) -> None:
    choose = random.Random(seed)
    for number in range(4):
        wanted = choose.sample(sorted(THRESHOLDS), 1 + number % 3)
        rules = change_rules(START, {name: choose.choice(THRESHOLDS[name]) for name in wanted})
        changed = prepare(tmp_path / "changed", crawl, rules, until="documents")
        alone = prepare(tmp_path / f"alone-{number}", crawl, rules, until="documents")
        assert changed == alone


def test_workers_and_the_core_change_nothing(
    crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = change_rules(START, {"3.min_words": 80, "0.max_top_3gram_share": 0.1})
    alone = prepare(tmp_path / "alone", crawl, rules)
    prepare(tmp_path / "changed", crawl)
    workers = {"kind": "local", "workers": 2}
    assert prepare(tmp_path / "changed", crawl, rules, executor=workers) == alone
    monkeypatch.setenv("LLMSYS_NATIVE", "0")
    prepare(tmp_path / "python", crawl)
    assert prepare(tmp_path / "python", crawl, rules, executor=workers) == alone


def test_a_return_to_an_earlier_config_runs_no_task(crawl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    other = change_rules(START, {"3.min_words": 120})
    first = prepare(folder, crawl)
    second = prepare(folder, crawl, other)
    assert first != second
    for rules, expected in ((START, first), (other, second), (START, first)):
        before = count_events(folder)
        assert prepare(folder, crawl, rules) == expected
        assert not count_tasks(folder, before)
    # Another part of the config: the tokenizer's share of the documents and what follows.
    third = prepare(folder, crawl, split={"heldout_fraction": 0.5})
    before = count_events(folder)
    assert prepare(folder, crawl, other) == second
    assert prepare(folder, crawl, split={"heldout_fraction": 0.5}) == third
    assert not count_tasks(folder, before)


def test_a_return_to_stages_that_another_config_lacks_runs_no_task(
    crawl: Path, tmp_path: Path
) -> None:
    pii: dict[str, Any] = {"pii": {"kind": "replace", "kinds": ["email"]}}
    folder = tmp_path / "data"
    other: dict[str, Any] = {"split": {"heldout_fraction": 0.5}}
    first = prepare(folder, crawl, **pii)
    second = prepare(folder, crawl, **other)
    assert second == prepare(tmp_path / "alone", crawl, **other)
    before = count_events(folder)
    assert prepare(folder, crawl, **pii) == first
    assert prepare(folder, crawl, **other) == second
    assert not count_tasks(folder, before)


def test_a_copied_dataset_finds_earlier_results_too(crawl: Path, tmp_path: Path) -> None:
    first = prepare(tmp_path / "data", crawl)
    prepare(tmp_path / "data", crawl, change_rules(START, {"3.min_words": 80}))
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "data")
    before = count_events(tmp_path / "copy")
    assert prepare(tmp_path / "copy", crawl) == first
    assert not count_tasks(tmp_path / "copy", before)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(crawl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    prepare(folder, crawl)
    second = prepare(folder, crawl, change_rules(START, {"3.min_words": 80}))
    prepare(folder, crawl, change_rules(START, {"3.min_words": 120}))

    def count_kept() -> int:
        journal = sqlite3.connect(folder / "journal" / "records.sqlite")
        (count,) = journal.execute("select count(*) from earlier").fetchone()
        journal.close()
        return int(count)

    whole = count_kept()
    bound = {"earlier_results_bytes": 150_000}
    prepare(folder, crawl, change_rules(START, {"3.min_words": 20}), executor=bound)
    assert 0 < count_kept() < whole
    kept = sum(path.stat().st_size for path in (folder / EARLIER).glob("*"))
    assert kept <= 150_000
    # The results of before are not found, and made again.
    before = count_events(folder)
    assert (
        prepare(folder, crawl, change_rules(START, {"3.min_words": 80}), executor=bound) == second
    )
    assert count_tasks(folder, before)
    prepare(
        folder,
        crawl,
        change_rules(START, {"3.min_words": 80}),
        executor={"earlier_results_bytes": 0},
    )
    assert not (folder / EARLIER).exists()
    assert not count_kept()


@pytest.mark.parametrize("damage", ["links", "file", "work", "folder"])
def test_what_is_missing_or_damaged_is_made_again(
    damage: str, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    first = prepare(folder, crawl)
    if damage == "links":

        def refuse(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", refuse)
    prepare(folder, crawl, change_rules(START, {"3.min_words": 80}))
    if damage == "file":
        for path in (folder / EARLIER).iterdir():
            os.utime(path, (1, 1))
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    elif damage in ("work", "folder"):
        shutil.rmtree(folder / ("work" if damage == "work" else EARLIER))
    assert prepare(folder, crawl) == first
    assert prepare(folder, crawl) == first


class KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("tasks", [1, 5, 14, 20, 27])
def test_a_kill_while_a_threshold_changes_costs_nothing_but_time(
    tasks: int, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = change_rules(START, {"3.min_words": 80})
    first = prepare(tmp_path / "data", crawl)
    alone = prepare(tmp_path / "alone", crawl, rules)
    save = tasks_of_graph.save_task_result
    left = tasks

    def save_or_die(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        return save(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(stage_runner, "save_task_result", save_or_die)
        with pytest.raises(KilledError):
            prepare(tmp_path / "data", crawl, rules)
    assert prepare(tmp_path / "data", crawl, rules) == alone
    assert prepare(tmp_path / "data", crawl) == first


@pytest.mark.parametrize(
    "rules",
    [
        START[:-1],
        [*START[:2], START[3], START[2], *START[4:]],
        change_rules(START, {"2.min_words_per_line": 5}),
        change_rules(START, {"4.short_line_characters": 10}),
        [{**START[0], "name": "other"}, *START[1:]],
    ],
    ids=["fewer", "order", "lines", "measure", "name"],
)
def test_where_more_than_a_threshold_changes_every_document_is_measured(
    rules: Rules, crawl: Path, tmp_path: Path, measured: Counter[str]
) -> None:
    prepare(tmp_path / "changed", crawl, until="documents")
    measured.clear()
    changed = prepare(tmp_path / "changed", crawl, rules, until="documents")
    assert measured["documents"] == 126
    assert not measured["known"]
    assert changed == prepare(tmp_path / "alone", crawl, rules, until="documents")


def test_keys_are_computed_for_new_documents_alone(
    crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Counter[str]()
    mask = known_signatures.KnownSignatures.mask_rows

    def count_known(self: Any, rows: Any) -> Any:
        found = mask(self, rows)
        known.update({"known": int(found.sum()), "new": int((~found).sum())})
        return found

    monkeypatch.setattr(known_signatures.KnownSignatures, "mask_rows", count_known)
    deduplicate = {"url": {"kind": "url"}, "minhash": {"kind": "minhash", "buckets": 5}}
    both: dict[str, Any] = {"deduplicate": deduplicate, "until": "documents"}
    prepare(tmp_path / "data", crawl, change_rules(START, {"3.min_words": 80}), **both)
    assert not known
    assert prepare(tmp_path / "data", crawl, **both) == prepare(tmp_path / "alone", crawl, **both)
    assert known["known"] > known["new"] > 0


def test_new_documents_alone_are_encoded_where_the_tokenizer_is_given(
    crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "tokenizer", crawl)
    given = tmp_path / "tokenizer" / "tokenizer" / "tokenizer.model"
    encoded = Counter[str]()
    encode = encode_documents._encode_rows

    def count_rows(encoder: Any, batch: Any, source: Any, rows: Any) -> Any:
        encoded.update({"new": len(rows), "known": batch.num_rows - len(rows)})
        return encode(encoder, batch, source, rows)

    monkeypatch.setattr(encode_documents, "_encode_rows", count_rows)
    rules = change_rules(START, {"3.min_words": 80})
    alone = prepare(tmp_path / "alone", crawl, tokenizer=given)
    prepare(tmp_path / "data", crawl, rules, tokenizer=given)
    encoded.clear()
    assert prepare(tmp_path / "data", crawl, tokenizer=given) == alone
    assert encoded["known"] > encoded["new"] > 0
    # A killed run has replaced some of its files, and the ids of the others are still there.
    prepare(tmp_path / "data", crawl, rules, tokenizer=given, until="documents")
    assert prepare(tmp_path / "data", crawl, tokenizer=given) == alone


def test_another_tokenizer_takes_over_no_ids(
    crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    read = known_tokens.read_known_tokens
    monkeypatch.setattr(
        known_tokens,
        "read_known_tokens",
        lambda path, digest: (asked.append(path), read(path, digest))[1],
    )
    prepare(tmp_path / "data", crawl)
    changed = prepare(tmp_path / "data", crawl, change_rules(START, {"3.min_words": 80}))
    assert not asked
    alone = prepare(tmp_path / "alone", crawl, change_rules(START, {"3.min_words": 80}))
    assert changed == alone

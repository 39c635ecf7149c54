"""Laws of a block that is filtered again: the bytes are those of filtering all of it, whatever the
thresholds were before.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import MinHashDedupConfig, UrlDedupConfig
from llmsys.data_pipeline.core.document_schema import TEXT_SCHEMA
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.stages import apply_rules
from llmsys.data_pipeline.stages.apply_rules import apply_rules_to_file
from llmsys.data_pipeline.stages.changed_thresholds import EarlierFiltering, compare_rules
from llmsys.data_pipeline.stages.compute_signatures import write_signatures
from llmsys.storage.arrow_file import ArrowFileWriter
from tests.helpers.changed_rules import Rules, change_rules
from tests.helpers.tiny_crawl import GERMAN, build_tiny_config, write_sentences

REPETITION = {
    **{f"max_top_{n}gram_share": 0.5 for n in (2, 3, 4)},
    **{f"max_duplicate_{n}gram_share": 0.7 for n in range(5, 11)},
    **{f"max_duplicate_{part}_share": 0.6 for part in ("line", "paragraph")},
    **{f"max_duplicate_{part}_character_share": 0.6 for part in ("line", "paragraph")},
}
START: Rules = [
    {"kind": "gopher_repetition", **REPETITION},
    {"kind": "line_corrections", "max_removed_word_share": 0.2},
    {"kind": "c4", "end_marks": [], "min_sentences": 3, "max_page_characters": 1_200},
    {"kind": "gopher_quality", "min_words": 40, "min_stop_words": 1},
    {"kind": "fineweb_quality", "max_duplicate_line_character_share": 0.4},
    {"kind": "native_text"},
]
# Some of them are values that documents have: a limit lets its own value pass.
THRESHOLDS: dict[str, tuple[float, ...]] = {
    "0.max_duplicate_5gram_share": (0.0, 0.2, 0.9),
    "0.max_top_3gram_share": (0.14, 0.04),
    "0.max_duplicate_line_share": (0.1, 0.2, 0.25, 0.5),
    "0.max_duplicate_10gram_share": (0.1, 0.5),
    "1.max_removed_word_share": (0.0, 0.02),
    "2.min_sentences": (0, 1, 4, 5, 6),
    "2.max_page_characters": (500, 700, 3_000),
    "3.min_words": (20, 50, 80),
    "3.max_words": (90, 150, 200),
    "3.min_stop_words": (0, 5, 6),
    "3.max_bullet_line_share": (0.1, 0.25),
    "3.min_alphabetic_word_share": (0.9, 0.92),
    "4.max_short_line_share": (0.1, 0.25, 1.0),
    "4.max_duplicate_line_character_share": (0.1, 0.9),
    "5.min_stop_word_share": (0.1, 0.3),
}


def write_text(choose: random.Random) -> str | None:
    """A text with some of everything that the rules measure; None where nothing was extracted."""
    if choose.random() < 0.05:
        return None
    lines = [" ".join(write_sentences(choose, choose.randrange(1, 4))) for _ in range(9)]
    for number in range(len(lines)):
        kind = choose.randrange(10)
        if kind == 0:
            lines[number] = lines[0]
        elif kind == 1:
            lines[number] = f"- {lines[number][:20]} and some more words"
        elif kind == 2:
            lines[number] = f"{choose.randrange(99)} likes"
        elif kind == 3:
            lines[number] += " lorem ipsum" if choose.random() < 0.2 else " see [1]"
    lines = lines[: choose.randrange(1, 10)]
    if choose.random() < 0.15:
        lines = [GERMAN * choose.randrange(1, 4) for _ in lines]
    return "\n\n".join(lines)


def write_block(path: Path, seed: int, batches: int = 4) -> Path:
    """A file of extracted texts; some documents come twice, with one id."""
    choose = random.Random(seed)
    offset = 0
    with ArrowFileWriter(path, TEXT_SCHEMA) as writer:
        for _ in range(batches):
            rows = []
            for _ in range(25):
                offset += choose.randrange(1, 900)
                text = write_text(choose)
                url = f"https://e-{offset % 7}.org/{offset}"
                rows.append(
                    dict.fromkeys(TEXT_SCHEMA.names)
                    | {"id": f"{offset:032x}", "url": url, "date": "2024-05-01", "file": "crawl"}
                    | {"offset": offset, "bytes_html": 9_000, "text": text}
                )
            rows[-1] |= {name: rows[0][name] for name in ("id", "url", "text")}
            writer.write(pa.RecordBatch.from_pylist(rows, TEXT_SCHEMA))
    return path


class Block:
    """A block that is filtered by one config after the other."""

    def __init__(self, source: Path, folder: Path, **data: Any) -> None:
        self.source = source
        self.folder = folder
        self.data = {"language": {"languages": ["en", "de"], "min_score": 0.1}} | data
        self.count = 0

    def filter(self, rules: Rules, earlier: tuple[EarlierFiltering, Any] | None = None) -> Any:
        """Return what a later filtering starts from, and all that this one made."""
        config = build_tiny_config(self.folder, self.folder, rules=rules, **self.data).data
        assert isinstance(config, CrawlConfig)
        text = serialize_rules_by_language(config)
        self.count += 1
        paths = {name: self.folder / f"{name}-{self.count}" for name in ("kept", "dropped")}
        before, files = earlier or (None, None)
        result = apply_rules_to_file(
            lambda *_: None,
            source=self.source,
            config=config,
            rules=text,
            earlier=before,
            earlier_files=files,
            kept=paths["kept"],
            dropped=paths["dropped"],
        )
        tally = result["tally"]
        sums = {
            "stages": tally["stages"],
            "drops": sorted(tally["drops"], key=lambda drop: (drop["stage"], drop["test"])),
            "changes": {
                stage: {name: count for name, count in changes.items() if count}
                for stage, changes in tally["changes"].items()
            },
        }
        made = [path.read_bytes() for path in paths.values()]
        return (EarlierFiltering(text, result), paths), (made, result | {"tally": sums})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a block was filtered from what was known, and not."""
    counts = Counter[bool]()
    filter_changed = apply_rules._filter_changed

    def count_taken(*arguments: Any) -> Any:
        found = filter_changed(*arguments)
        counts[found is not None] += 1
        return found

    monkeypatch.setattr(apply_rules, "_filter_changed", count_taken)
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_filtered_from_what_an_earlier_config_left(
    seed: int, tmp_path: Path, taken: Counter[bool]
) -> None:
    block = Block(write_block(tmp_path / "texts", seed), tmp_path)
    choose = random.Random(seed)
    earlier, _ = block.filter(START)
    sequence = [{name: choose.choice(values)} for name, values in THRESHOLDS.items()]
    sequence += [
        {name: choose.choice(THRESHOLDS[name]) for name in choose.sample(sorted(THRESHOLDS), 3)}
        for _ in range(9)
    ]
    for values in sequence:
        rules = change_rules(START, values)
        earlier, changed = block.filter(rules, earlier)
        assert changed == block.filter(rules)[1], values
    assert taken[True] > 4  # two changes at once leave less of a hundred documents


def test_a_statistic_that_float32_rounds_across_a_limit_is_measured_again(
    tmp_path: Path, taken: Counter[bool]
) -> None:
    """2 of 3 lines is 0.66666669 in float32, above a limit that it is below."""
    lines = write_sentences(random.Random(1), 3)
    texts = ["\n".join([*lines[:2], lines[2].rstrip(".")])] * 2 + ["\n".join(lines)] * 7
    with ArrowFileWriter(tmp_path / "texts", TEXT_SCHEMA) as writer:
        rows = [
            dict.fromkeys(TEXT_SCHEMA.names)
            | {"id": f"{number:032x}", "url": "u", "file": "f", "offset": number, "text": text}
            | {"bytes_html": 9_000}
            for number, text in enumerate(texts)
        ]
        writer.write(pa.RecordBatch.from_pylist(rows, TEXT_SCHEMA))
    rules: Rules = [{"kind": "fineweb_quality", "max_newlines_per_word": 9}]
    block = Block(tmp_path / "texts", tmp_path)
    earlier, _ = block.filter(rules)
    kept = pa.ipc.open_file(tmp_path / "kept-1").read_all()
    limit = 0.66666668
    assert min(kept.column("fineweb_quality.end_mark_line_share").to_pylist()) > limit > 2 / 3
    changed = change_rules(rules, {"0.min_end_mark_line_share": limit})
    _, found = block.filter(changed, earlier)
    assert found == block.filter(changed)[1]
    assert sum(rows for _, rows in found[1]["kept_batches"]) == 7
    assert taken == {True: 1}


def test_an_earlier_test_of_the_same_rule_takes_a_dropped_document_when_it_is_stricter(
    tmp_path: Path, taken: Counter[bool]
) -> None:
    bare = "Children played near water under tall trees where birds were singing every evening. "
    texts = [bare * 5] + [" ".join(write_sentences(random.Random(1), 20))] * 7
    with ArrowFileWriter(tmp_path / "texts", TEXT_SCHEMA) as writer:
        rows = [
            dict.fromkeys(TEXT_SCHEMA.names)
            | {"id": f"{number:032x}", "url": "u", "file": "f", "offset": number, "text": text}
            | {"bytes_html": 9_000}
            for number, text in enumerate(texts)
        ]
        writer.write(pa.RecordBatch.from_pylist(rows, TEXT_SCHEMA))
    rules: Rules = [{"kind": "gopher_quality", "min_words": 50}]
    block = Block(tmp_path / "texts", tmp_path)
    earlier, (_, before) = block.filter(rules)
    assert [drop["test"] for drop in before["tally"]["drops"]] == ["stop words"]
    changed = change_rules(rules, {"0.min_words": 80})
    _, found = block.filter(changed, earlier)
    assert [drop["test"] for drop in found[1]["tally"]["drops"]] == ["words"]
    assert found == block.filter(changed)[1]
    assert taken == {True: 1}


def test_a_dropped_document_is_measured_where_its_value_passes_the_new_limit_alone(
    tmp_path: Path, taken: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[int]()
    select = apply_rules._DocumentFilter.select_documents

    def note_texts(self: Any, texts: Any, drops: Any) -> Any:
        measured.append(texts.num_rows)
        return select(self, texts, drops)

    monkeypatch.setattr(apply_rules._DocumentFilter, "select_documents", note_texts)
    sentences = " ".join(write_sentences(random.Random(1), 40)).split()
    with ArrowFileWriter(tmp_path / "texts", TEXT_SCHEMA) as writer:
        rows = [
            dict.fromkeys(TEXT_SCHEMA.names)
            | {"id": f"{number:032x}", "url": "u", "file": "f", "offset": number}
            | {"bytes_html": 9_000, "text": " ".join(sentences[: 10 * number]) + "."}
            for number in range(1, 21)
        ]
        writer.write(pa.RecordBatch.from_pylist(rows, TEXT_SCHEMA))
    rules: Rules = [{"kind": "gopher_quality", "min_words": 100, "min_stop_words": 0}]
    block = Block(tmp_path / "texts", tmp_path)
    earlier, _ = block.filter(rules)
    for words, again in ((120, 3), (90, 3), (70, 2), (70.0, 0)):
        changed = change_rules(rules, {"0.min_words": words})
        measured.clear()
        earlier, found = block.filter(changed, earlier)
        assert sum(measured) == again
        assert found == block.filter(changed)[1]
    reasons = pa.ipc.open_file(tmp_path / f"dropped-{block.count - 1}").read_all().column("reason")
    assert {reason.split(" < ")[1] for reason in reasons.to_pylist()} == {"70"}
    assert taken == {True: 4}


@pytest.mark.parametrize(
    "data",
    [{"unicode": {"kind": "ftfy"}}, {"documents": {"num_shards": 3, "batch_bytes": 4_000}}],
    ids=["unicode", "batches"],
)
def test_batches_and_repair_are_as_before(
    data: dict[str, Any], tmp_path: Path, taken: Counter[bool]
) -> None:
    block = Block(write_block(tmp_path / "texts", 5), tmp_path, **data)
    earlier, _ = block.filter(START)
    rules = change_rules(START, {"3.min_words": 60})
    assert block.filter(rules, earlier)[1] == block.filter(rules)[1]
    assert taken == {True: 1}


def test_documents_at_one_offset_are_all_measured(tmp_path: Path, taken: Counter[bool]) -> None:
    block = Block(write_block(tmp_path / "texts", 6), tmp_path)
    table = pa.ipc.open_file(tmp_path / "texts").read_all()
    same = table.set_column(4, "offset", pa.array([7] * table.num_rows, pa.int64()))
    with ArrowFileWriter(tmp_path / "texts", TEXT_SCHEMA) as writer:
        for batch in same.to_batches():
            writer.write(batch)
    earlier, _ = block.filter(START)
    rules = change_rules(START, {"3.min_words": 60})
    assert block.filter(rules, earlier)[1] == block.filter(rules)[1]
    assert taken == {False: 1}


@pytest.mark.parametrize(
    "rules",
    [
        START[:-1],
        [*START[:2], START[3], START[2], *START[4:]],
        change_rules(START, {"2.min_words_per_line": 2}),
        change_rules(START, {"2.max_page_characters": 0}),
        change_rules(START, {"4.short_line_characters": 10}),
        [{**START[0], "name": "other"}, *START[1:]],
        [{"kind": "gopher_repetition", "dialect": "paper", **REPETITION}, *START[1:]],
    ],
    ids=["fewer", "order", "lines", "no limit", "measure", "name", "dialect"],
)
def test_more_than_thresholds_is_no_changed_threshold(rules: Rules, tmp_path: Path) -> None:
    texts = [
        serialize_rules_by_language(build_tiny_config(tmp_path, tmp_path, rules=one).data)  # type: ignore[arg-type]
        for one in (START, rules)
    ]
    assert compare_rules(*texts) is None


def test_keys_of_documents_that_stay_are_taken_over(tmp_path: Path) -> None:
    block = Block(write_block(tmp_path / "texts", 2), tmp_path)
    # Two documents of the block have one id, which keys cannot tell apart.
    table = pa.ipc.open_file(tmp_path / "texts").read_all()
    names = pa.array([f"{row:032x}" for row in range(table.num_rows)])
    with ArrowFileWriter(tmp_path / "texts", TEXT_SCHEMA) as writer:
        for batch in table.set_column(0, "id", names).to_batches():
            writer.write(batch)
    earlier, _ = block.filter(change_rules(START, {"3.min_words": 90}))
    files = {"source": earlier[1]["kept"]}

    def sign(source: Path, name: str, earlier: Any = None) -> tuple[list[bytes], dict[str, Any]]:
        keys = {one: tmp_path / f"{one}.{name}" for one in ("url", "exact", "minhash")}
        documents = tmp_path / f"documents.{name}"
        result = write_signatures(
            lambda *_: None,
            source=source,
            number=0,
            dropped=(),
            documents=documents,
            keys=keys,
            url=UrlDedupConfig(),
            minhash=MinHashDedupConfig(buckets=5, hashes_per_bucket=2),
            unspaced=(),
            earlier=earlier,
        )
        return [path.read_bytes() for path in (documents, *keys.values())], result

    sign(files["source"], "before")
    files |= {"documents": tmp_path / "documents.before"}
    files |= {f"keys.{one}": tmp_path / f"{one}.before" for one in ("url", "exact", "minhash")}
    for words in (60, 120):
        now, _ = block.filter(change_rules(START, {"3.min_words": words}))
        source = now[1]["kept"]
        assert sign(source, "known", files) == sign(source, "new")

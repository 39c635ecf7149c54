"""Each dialect decides as its tool does: golden verdicts of the tools themselves on texts made to
be hard, and a plain
twin of the reading of the paper. Also what a config may say about dialects, and what their
comparison prints.
"""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from llmsys.config.data import CrawlConfig
from llmsys.config.line_rules import C4Config, C4DatatroveConfig, C4DolmaConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RuleConfig,
)
from llmsys.data_pipeline.core.document_schema import TEXT_SCHEMA
from llmsys.data_pipeline.inspection.dialect_differences import compare_dialects
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.dialects import translate_rules
from llmsys.data_pipeline.rules.rule import RuleOutcome
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.errors import ConfigError
from llmsys.launch.main import main
from tests.helpers.datatrove_reasons import REASONS
from tests.helpers.hard_texts import write_hard_text
from tests.helpers.paths import GOLDEN
from tests.reference.gopher_paper import (
    find_paper_quality_violation,
    find_paper_repetition_violation,
)

VERDICTS = GOLDEN / "hard_text_verdicts.tsv"
ROWS = [row.split("\t") for row in VERDICTS.read_text().splitlines() if not row.startswith("#")]
TEXTS = [write_hard_text(seed) for seed in range(len(ROWS))]
ORACLES: list[tuple[int, RuleConfig]] = [
    (1, GopherRepetitionConfig()),
    (2, GopherQualityConfig()),
    (3, C4DatatroveConfig(end_marks=())),
    (4, FinewebQualityConfig()),
    (5, GopherQualityConfig(dialect="dolma")),
    (6, GopherRepetitionConfig(dialect="dolma")),
    (7, GopherQualityConfig(dialect="dclm")),
    (8, GopherRepetitionConfig(dialect="dclm")),
]


def apply(rule: RuleConfig, texts: list[str]) -> RuleOutcome:
    return RuleChain([rule]).apply(pa.array(texts, pa.large_string()))[0]


def datatrove_reason(outcome: RuleOutcome, row: int) -> str:
    test = outcome.test[row].as_py()
    if test is None:
        return "-"
    name = f"{outcome.rule}:{test}"
    value, threshold = outcome.value[row].as_py(), outcome.threshold[row].as_py()
    return REASONS.get(name) or REASONS[f"{name} {'<' if value < threshold else '>'}"]


def test_the_golden_verdicts_are_of_these_texts() -> None:
    assert [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in TEXTS] == [
        row[0] for row in ROWS
    ]


@pytest.mark.parametrize(
    ("column", "rule"),
    ORACLES,
    ids=[f"{rule.kind}-{getattr(rule, 'dialect', 'datatrove')}" for _, rule in ORACLES],
)
def test_a_dialect_decides_as_its_tool_does(column: int, rule: RuleConfig) -> None:
    outcome = apply(rule, TEXTS)
    names_of_datatrove = column <= 4
    ours = [
        datatrove_reason(outcome, row) if names_of_datatrove else outcome.test[row].as_py() or "-"
        for row in range(len(TEXTS))
    ]
    assert ours == [row[column] for row in ROWS]


@pytest.mark.parametrize(
    "rule", [GopherQualityConfig(dialect="paper"), GopherRepetitionConfig(dialect="paper")]
)
def test_the_paper_is_read_as_its_plain_twin_reads_it(rule: RuleConfig) -> None:
    texts = [*TEXTS[:80], "", " \n", "word " * 300]
    twin = (
        find_paper_quality_violation
        if rule.kind == "gopher_quality"
        else find_paper_repetition_violation
    )
    assert apply(rule, texts).test.to_pylist() == [twin(text) for text in texts]


@pytest.mark.parametrize("dialect", ["paper", "dolma", "dclm"])
def test_empty_texts_and_no_texts_are_judged(dialect: str) -> None:
    for kind in (GopherRepetitionConfig, GopherQualityConfig):
        rule = kind.model_validate({"dialect": dialect})
        assert len(apply(rule, []).keep) == 0
        assert len(apply(rule, ["", " ", "\n\n", "a"]).keep) == 4


def test_limits_that_a_dialect_does_not_have_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"0\.2 has no effect in the dialect dolma\. Set max_symbol_ratio"
    ):
        GopherQualityConfig(dialect="dolma", max_hash_ratio=0.2)
    with pytest.raises(ValidationError, match="Set max_hash_ratio and max_ellipsis_ratio"):
        GopherQualityConfig(max_symbol_ratio=0.2)


def test_readings_keep_the_thresholds_of_the_config() -> None:
    rules = (
        GopherQualityConfig(min_words=7, max_hash_ratio=0.3),
        C4DatatroveConfig(min_sentences=1),
    )
    assert translate_rules(rules, "datatrove") == {"gopher_quality": rules[0], "c4": rules[1]}
    dolma = translate_rules(rules, "dolma")
    assert dolma == {
        "gopher_quality": GopherQualityConfig(dialect="dolma", min_words=7),
        "c4": C4DolmaConfig(),
    }
    assert translate_rules((), "dclm")["c4"] == C4Config()
    with pytest.raises(
        ConfigError,
        match=r"nemo is not a dialect\. Use two or more of datatrove, paper, dolma, dclm",
    ):
        translate_rules((), "nemo")


def stored(folder: Path, texts: list[str]) -> CrawlConfig:
    """A dataset folder with texts that were extracted before."""
    with ArrowFileWriter(folder / "work" / "extracted" / "a.arrow", TEXT_SCHEMA, "zstd") as writer:
        rows = [
            {
                "id": f"{n:03}",
                "url": f"https://a.example/{n}",
                "date": "",
                "file": "a",
                "offset": n,
                "text": text,
            }
            for n, text in enumerate(texts)
        ]
        writer.write(
            pa.RecordBatch.from_pylist([row | {"bytes_html": 1} for row in rows], TEXT_SCHEMA)
        )
    return CrawlConfig.model_validate(
        {"folder": folder, "language": {"languages": [], "min_score": 0}}
    )


HYPHENS = "the to of " * 20 + "extraordinarily-long-compounded-expressions " * 32


def test_a_comparison_counts_and_shows_where_two_dialects_differ(tmp_path: Path) -> None:
    data = stored(tmp_path, [HYPHENS, "the be to of and that have with " * 20, "short"])
    by_rule = {
        difference.rule: difference for difference in compare_dialects(data, ["datatrove", "dolma"])
    }
    assert list(by_rule) == ["gopher_repetition", "gopher_quality", "c4", "all together"]
    quality = by_rule["gopher_quality"]
    assert (quality.num_documents, quality.num_differing, quality.verdicts[False, True]) == (
        3,
        1,
        1,
    )
    (example,) = quality.examples["share of words with a letter", "kept"]
    assert example.url == "https://a.example/0"
    assert example.sentences == (
        "gopher_quality: share of words with a letter 0.662 < 0.8",
        "kept: share of words with a letter 1, drops below 0.8",
    )


def test_the_command_prints_matrix_reasons_and_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, [HYPHENS, "short"])
    words = [
        "prepare",
        "data/sample",
        "--compare-dialects",
        f"data.folder={tmp_path}",
        "data.language.languages=[]",
    ]
    words += ["data.language.min_score=0"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "gopher_quality: datatrove and dolma differ on 1 of 2 documents (50.0%)" in printed
    assert "datatrove: gopher_quality: share of words with a letter 0.662 < 0.7" in printed
    assert main([*words, "--json", "--dialects", "dclm,paper,dolma"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [one["dialects"] for one in plain[:5]] == [["dclm", "paper"]] * 4 + [["dclm", "dolma"]]
    assert sum(plain[0]["verdicts"].values()) == plain[0]["documents"] == 2
    assert main([*words, "--dialects", "dolma"]) == 2
    assert "dolma names 1 dialect. Give two, such as datatrove,dolma." in capsys.readouterr().err


def test_each_document_is_compared_with_the_words_and_thresholds_of_its_language(
    tmp_path: Path,
) -> None:
    pages = [
        "春天来了，院子里的花慢慢地开了，孩子们在树下跑来跑去，老人坐在门口看着他们说话。"
        "那时候村里的路还很窄，下过雨以后到处都是水，我们就在那里放纸船。",
        "the be to of and that have with " * 20,
    ]
    data = stored(tmp_path, [pages[0] * 3, pages[1]])
    quality = next(
        one
        for one in compare_dialects(data, ["datatrove", "paper"])
        if one.rule == "gopher_quality"
    )
    # read as English it has 3 words
    assert quality.verdicts[True, True] + quality.verdicts[True, False] == 2
    assert quality.num_documents == 2


def test_rules_of_one_kind_are_compared_each_by_its_name() -> None:
    rules = (GopherQualityConfig(min_words=7), GopherQualityConfig(name="long", min_words=70))
    assert {name: rule.title for name, rule in translate_rules(rules, "dolma").items()} == {
        "gopher_quality": "gopher_quality",
        "long": "long",
    }

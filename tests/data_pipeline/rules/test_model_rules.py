"""Laws of classifiers and perplexity: scores of hand-made models, the same alone and among
others, problems named.
"""

import gzip
import math
import re
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from llmsys.config.custom_rules import (
    FastTextClassifierConfig,
    LinearClassifierConfig,
    PerplexityConfig,
)
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.graph.resource_files import (
    list_rule_libraries,
    require_languages,
    require_resource_files,
)
from llmsys.data_pipeline.rules.classifier import (
    ClassifierRule,
    LinearModel,
    LinearScorer,
    load_linear_model,
    train_linear_model,
)
from llmsys.data_pipeline.rules.hashed_features import FeatureConfig
from llmsys.data_pipeline.rules.perplexity import ArpaModel, PerplexityRule, normalize_line
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import WhitespaceTokenizer
from llmsys.errors import ConfigError, DataError
from tools.train_classifier import main as train_main

PLAIN = WordSplitters(WordSplitter(WhitespaceTokenizer()))
GOOD = [
    f"The {word} walks along the old river, and it sings of stones."
    for word in ("man", "cat", "dog", "king", "sun")
]
BAD = [
    f"BUY {word} NOW!!! cheap cheap price click here"
    for word in ("pills", "shoes", "cars", "gold", "bags")
]
ARPA = """
\\data\\
ngram 1=6
ngram 2=5
ngram 3=2

\\1-grams:
-1.2\t<unk>
-99\t<s>\t-0.5
-0.9\t</s>
-0.7\tthe\t-0.3
-1.1\tcat\t-0.2
-1.3\tsat\t-0.1

\\2-grams:
-0.3\t<s> the\t-0.15
-0.4\tthe cat\t-0.12
-0.5\tcat sat\t-0.05
-0.6\tsat </s>
-0.8\tthe the

\\3-grams:
-0.1\t<s> the cat
-0.25\tthe cat sat

\\end\\
"""


@pytest.fixture
def arpa(tmp_path: Path) -> Path:
    path = tmp_path / "model.arpa.gz"
    path.write_bytes(gzip.compress(ARPA.encode()))
    return path


def test_scores_are_the_softmax_of_the_mean_weight(tmp_path: Path) -> None:
    config = FeatureConfig(bits=12, word_ngrams=1)
    weights = np.zeros((1 << 12, 2), np.float32)
    model = LinearModel(weights, np.array([0.0, 0.5], np.float32), ("a", "b"), config)
    word = int(LinearScorer(model)._features.extract_features(["river"]).numbers[0])
    weights[word] = (3.0, 0.0)
    model.save(tmp_path / "model.npz")
    scores = LinearScorer(load_linear_model(tmp_path / "model.npz")).predict_probabilities(
        ["river stone", "", "River!"]
    )
    for score, mean in zip(scores[:, 0], (1.5, 0.0, 3.0), strict=True):
        assert score == pytest.approx(1 / (1 + math.exp(0.5 - mean)))


@pytest.mark.parametrize("features", [FeatureConfig(14, 2), FeatureConfig(14, 1, (2, 4))])
def test_a_trained_model_tells_its_labels_apart_whatever_stands_beside_a_text(
    features: FeatureConfig,
) -> None:
    texts, labels = [*GOOD, *BAD], ["good"] * 5 + ["bad"] * 5
    model = train_linear_model(texts, labels, features)
    scorer = LinearScorer(model)
    together = scorer.predict_probabilities(texts)
    assert [model.labels[best] for best in together.argmax(axis=1)] == labels
    alone = np.concatenate([LinearScorer(model).predict_probabilities([text]) for text in texts])
    assert together.tobytes() == alone.tobytes()
    again = train_linear_model(texts, labels, features)
    assert model.weights.tobytes() == again.weights.tobytes()


def test_the_tool_makes_a_model_that_the_rule_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        [f"good\t{text}\n" for text in GOOD] + [f"bad\t{text}\n" for text in BAD] + ["no label\n"]
    )
    (tmp_path / "set.tsv").write_text("".join(lines))
    arguments = [
        str(tmp_path / "set.tsv"),
        "--output",
        str(tmp_path / "model.npz"),
        "--bits",
        "12",
        "--held-back",
        "0",
    ]
    assert train_main(arguments) == 0
    assert "10 texts, 1 lines could not be used, labels bad, good" in capsys.readouterr().out
    rule = ClassifierRule(
        LinearClassifierConfig(model=tmp_path / "model.npz", label="good", min_score=0.5)
    )
    verdicts = rule.apply(DocumentBatch([*GOOD, *BAD], PLAIN))
    assert verdicts.failed_D.tolist() == [-1] * 5 + [0] * 5
    assert verdicts.tests[0] == "score of good"
    with pytest.raises(
        DataError,
        match=r"has no label 'great'; its labels are bad, good\. Set label to one of them\.",
    ):
        ClassifierRule(LinearClassifierConfig(model=tmp_path / "model.npz", label="great"))


class FakeFasttext:
    """Answers like fasttext-predict: labels with their prefix, a probability that may lie above
    1.
    """

    @staticmethod
    def load_model(path: str) -> "FakeFasttext":
        if not path.endswith(".bin"):
            raise ValueError(f"{path} has wrong file format!")
        return FakeFasttext()

    def predict(
        self, text: str, k: int, threshold: float
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        assert (k, threshold, "\n" in text) == (-1, 0.0, False)
        good = 1.00001 if "river" in text else 0.2
        return ("__label__good", "__label__bad"), (good, 1 - good)


def test_a_fasttext_model_is_asked_of_the_text_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fasttext", FakeFasttext)
    rule = ClassifierRule(
        FastTextClassifierConfig(model=Path("m.bin"), label="good", min_score=0.5)
    )
    verdicts = rule.apply(DocumentBatch(["the\nriver\n", "no", ""], PLAIN))
    assert verdicts.failed_D.tolist() == [-1, 0, 0]
    assert verdicts.statistics["score"].tolist() == [1.0, 0.2, 0.2]
    with pytest.raises(DataError, match=r"m\.bin has no label 'x'; its labels are good, bad\."):
        ClassifierRule(FastTextClassifierConfig(model=Path("m.bin"), label="x"))
    with pytest.raises(
        DataError, match=r"m\.txt is not a valid fastText model: .* Give a \.bin or \.ftz file\."
    ):
        ClassifierRule(FastTextClassifierConfig(model=Path("m.txt"), label="x"))


@pytest.mark.parametrize("data", [b"", b"no model", b"PK\x03\x04 cut"])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(
        DataError, match=r"x\.npz is not a valid linear model: .* Train one with: python tools/"
    ):
        load_linear_model(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ("", -0.5 - 0.9),
        ("the cat sat", -0.3 - 0.1 - 0.25 + (-0.05 - 0.6)),
        ("the the", -0.3 + (-0.15 - 0.8) + (-0.3 - 0.9)),
        ("cat", (-0.5 - 1.1) + (-0.2 - 0.9)),
        ("dog the", (-0.5 - 1.2) - 0.7 + (-0.3 - 0.9)),
    ],
)
def test_arpa_scores_are_those_of_katz_by_hand(arpa: Path, line: str, score: float) -> None:
    assert ArpaModel(arpa).score_line(line) == pytest.approx(score)


def test_arpa_scores_are_kenlms(tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm")
    (tmp_path / "model.arpa").write_text(ARPA)
    ours, theirs = ArpaModel(tmp_path / "model.arpa"), kenlm.Model(str(tmp_path / "model.arpa"))
    words = ["the", "cat", "sat", "dog"]
    for number in range(4**5):
        line = " ".join(words[number // 4**place % 4] for place in range(number % 6))
        assert ours.score_line(line) == pytest.approx(theirs.score(line), abs=1e-4)


def test_without_kenlm_the_advice_is_a_setting_that_the_config_takes(
    arpa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", _raise_missing)
    rule = {"kind": "perplexity", "model": arpa, "head_max_perplexity": 1, "tail_min_perplexity": 2}
    with pytest.raises(ConfigError, match=r"kenlm.*or set backend: arpa") as refusal:
        list_rule_libraries(CrawlConfig.model_validate({"inputs": ["x"], "rules": [rule]}))
    setting = yaml.safe_load(re.search(r"or set (\w+: \w+)", str(refusal.value))[1])
    assert (
        list_rule_libraries(
            CrawlConfig.model_validate({"inputs": ["x"], "rules": [rule | setting]})
        )
        == []
    )


def _raise_missing(package: str) -> str:
    raise metadata.PackageNotFoundError(package)


def test_perplexity_counts_words_and_ends_of_lines_and_buckets_keep_what_is_equal(
    arpa: Path,
) -> None:
    def rule(**options: object) -> PerplexityRule:
        return PerplexityRule(
            PerplexityConfig.model_validate({"model": arpa, "backend": "arpa", **options})
        )

    text = "The Cát sat\ncat"
    value = 10 ** -((-1.3 - 2.7) / (4 + 2))
    assert rule().compute_perplexity(text) == pytest.approx(value)
    assert rule(normalize="none").compute_perplexity(text) > value
    for keep, kept in (
        (("head",), [0]),
        (("middle",), [1]),
        (("tail",), [2]),
        (("head", "middle"), [0, 1]),
    ):
        judged = rule(head_max_perplexity=4, tail_min_perplexity=6, keep=keep).apply(
            DocumentBatch(["the cat sat", text, "dog"], PLAIN)
        )
        assert judged.statistics["bucket"].tolist() == [0, 1, 2]
        assert np.flatnonzero(judged.failed_D < 0).tolist() == kept
    assert normalize_line(" É１２“x”…\x07 ") == 'e00"x"...'


def test_configs_without_a_middle_are_refused() -> None:
    with pytest.raises(
        ValidationError,
        match=r"9 is above tail_min_perplexity=5, which leaves no middle bucket\. Lower "
        r"head_max_perplexity",
    ):
        PerplexityConfig(model=Path("m"), head_max_perplexity=9, tail_min_perplexity=5)
    with pytest.raises(ValidationError, match="head and tail are not adjacent"):
        PerplexityConfig(model=Path("m"), keep=("head", "tail"))


def test_a_damaged_arpa_file_is_named(tmp_path: Path, arpa: Path) -> None:
    (tmp_path / "cut.arpa.gz").write_bytes(arpa.read_bytes()[:-20])
    (tmp_path / "odd.arpa").write_text(ARPA.replace("-0.4\tthe cat", "-0.4\tthe"))
    (tmp_path / "empty.arpa").write_text("")
    for name, message in (
        ("cut.arpa.gz", "cannot be read as an ARPA"),
        ("odd.arpa", "line 17"),
        ("empty.arpa", "no n-gram"),
    ):
        with pytest.raises(DataError, match=message):
            ArpaModel(tmp_path / name)


def test_what_a_rule_needs_is_asked_for_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.data_pipeline.graph.resource_files.metadata.version", _absent)
    for rule, extra in (
        (FastTextClassifierConfig(model=tmp_path / "m", label="x"), "fasttext"),
        (PerplexityConfig(model=tmp_path / "m"), "kenlm"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"the rule {rule.kind} needs the package .*pip install 'llmsys\[{extra}\]'",
        ):
            list_rule_libraries(CrawlConfig(rules=(rule,)))
    data = CrawlConfig(rules=(PerplexityConfig(model=tmp_path / "absent.arpa", backend="arpa"),))
    with pytest.raises(
        DataError, match=r"data\.rules\.0: .*absent\.arpa does not exist .* Correct the path"
    ):
        require_resource_files(data)
    hidden = {"kind": "bad_words", "word_lists": [{"language": "yue", "entries": ["w"]}]}
    data = CrawlConfig.model_validate({"rules": [hidden], "language": {"languages": []}})
    with pytest.raises(
        ConfigError,
        match=r"data\.rules\.0\.words: no document is recognized as 'yue', so its list would never",
    ):
        require_languages(data, ["en"])


def _absent(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)

"""Laws of encoder classifiers: scores are those of transformers' pipeline, stored ones are not
computed again, and mistakes are named before work starts.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import pipeline

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.encoder_classifier import (
    EncoderClassifierRule,
    ScoreFiles,
    keep_scores,
)
from llmsys.data_pipeline.rules.encoder_folder import read_encoder_folder
from llmsys.data_pipeline.rules.encoder_model import EncoderModel
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.errors import ConfigError, DataError
from tests.helpers.tiny_crawl import WORDS, build_tiny_config, make_crawl
from tests.helpers.tiny_encoder import save_tiny_encoder

TEXTS = [
    "the river and the old garden",
    "",
    "mountains " * 90,
    "children played near water, under tall trees.",
    "unknown 你好 words\nand lines",
    "music",
] + [" ".join(WORDS[start : start + 20]) for start in range(0, 30, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("model"))


def build_config(folder: Path, **values: Any) -> EncoderClassifierConfig:
    return EncoderClassifierConfig.model_validate(
        {"model": folder, "label": "good", "max_tokens": 64} | values
    )


def ask_pipeline(folder: Path, label: str, texts: Sequence[str]) -> list[float]:
    """The oracle: transformers' own scores, one text at a time."""
    classify = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found: Any = classify(list(texts), truncation=True, max_length=64)
    finally:
        torch.set_num_threads(before)
    return [next(one["score"] for one in row if one["label"] == label) for row in found]


def score(config: EncoderClassifierConfig, texts: Sequence[str]) -> list[float]:
    verdicts = EncoderClassifierRule(config).apply(DocumentBatch(texts, WordSplitters()))
    return list(verdicts.statistics["score"].tolist())


@pytest.mark.parametrize(
    ("labels", "problem", "label"),
    [
        (2, None, "good"),
        (3, "single_label_classification", "fair"),
        (3, "multi_label_classification", "bad"),
        (1, None, "quality"),
        (1, "regression", "quality"),
        (2, "regression", "bad"),
    ],
)
def test_scores_have_the_bits_of_transformers_pipeline(
    labels: int, problem: str | None, label: str, tmp_path: Path
) -> None:
    model = save_tiny_encoder(tmp_path, labels, problem, seed=labels)
    found = score(build_config(model, label=label), TEXTS)
    assert found == ask_pipeline(model, label, TEXTS)
    assert len({round(one, 4) for one in found}) > 5
    if labels == 1:
        assert score(build_config(model, label=""), TEXTS) == found


def test_batches_of_one_shape_give_a_text_the_same_score_in_any_company(folder: Path) -> None:
    config = build_config(folder, batch_size=4)
    model = EncoderModel(config, read_encoder_folder(config))

    def score_in_batches(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return model._choose_scores(model._run_in_batches(texts))

    together = score_in_batches(TEXTS)
    # The same row of a batch of the same shape, with others beside it.
    for row in range(0, len(TEXTS), 4):
        company = [TEXTS[row], *TEXTS[row + 1 : row + 4][::-1]]
        assert score_in_batches(company)[0] == score_in_batches([TEXTS[row]])[0]
    # A processor may round another row otherwise, and padding is masked.
    backwards = score_in_batches(TEXTS[::-1])[::-1]
    np.testing.assert_allclose(together, backwards, rtol=0, atol=2e-6)
    np.testing.assert_allclose(together, model.score_texts(TEXTS), rtol=0, atol=2e-6)


def test_limits_drop_and_without_them_nothing_is(folder: Path) -> None:
    scores = score(build_config(folder), TEXTS)
    middle = sorted(scores)[len(scores) // 2]
    batch = DocumentBatch(TEXTS, WordSplitters())
    kept = EncoderClassifierRule(build_config(folder)).apply(batch).failed_D
    assert (kept == -1).all()
    rule = EncoderClassifierRule(build_config(folder, min_score=middle))
    verdicts = rule.apply(batch)
    assert (verdicts.failed_D == -1).tolist() == [one >= middle for one in scores]
    assert set(verdicts.tests) == {"score of good"}
    above = EncoderClassifierRule(build_config(folder, max_score=middle)).apply(batch).failed_D
    assert (above == -1).tolist() == [one <= middle for one in scores]


def test_a_stored_score_is_not_computed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    compute = EncoderModel.score_texts

    def count_texts(self: EncoderModel, texts: Sequence[str]) -> Any:
        asked.extend(texts)
        return compute(self, texts)

    monkeypatch.setattr(EncoderModel, "score_texts", count_texts)

    def score_block(config: EncoderClassifierConfig, texts: Sequence[str]) -> list[float]:
        asked.clear()
        with keep_scores(ScoreFiles(tmp_path / "scores", "block")):
            return score(config, texts)

    first = score_block(build_config(folder), TEXTS[:6])
    assert asked == TEXTS[:6]
    # Another limit, other neighbours: one new text, which comes twice.
    assert (
        score_block(build_config(folder, min_score=0.9), [*TEXTS[2:7], TEXTS[6]])[:4] == first[2:]
    )
    assert asked == TEXTS[6:7]
    # Another label or length is another score; so are other weights.
    others: list[dict[str, Any]] = [{"label": "bad"}, {"max_tokens": 8}]
    for values in others:
        score_block(build_config(folder, **values), TEXTS[:2])
        assert asked == TEXTS[:2]
    other = save_tiny_encoder(tmp_path / "other", seed=5)
    score_block(build_config(other), TEXTS[:2])
    assert asked == TEXTS[:2]
    # What a damaged file held is computed again.
    for path in (tmp_path / "scores").rglob("*.arrow"):
        path.write_bytes(path.read_bytes()[:-40])
    assert score_block(build_config(folder), TEXTS[:6]) == first
    assert asked == TEXTS[:6]


def test_scores_that_a_failed_task_computed_are_kept(folder: Path, tmp_path: Path) -> None:
    def score_and_fail() -> None:
        with keep_scores(ScoreFiles(tmp_path, "block")):
            score(build_config(folder), TEXTS[:2])
            raise KeyError

    with pytest.raises(KeyError):
        score_and_fail()
    (path,) = tmp_path.rglob("block.arrow")
    assert pa.ipc.open_file(path).read_all().num_rows == 2


def test_a_dataset_is_scored_filtered_and_sampled_and_thresholds_cost_no_score(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=8)
    asked: list[str] = []
    compute = EncoderModel.score_texts

    def count_texts(self: EncoderModel, texts: Sequence[str]) -> Any:
        asked.extend(texts)
        return compute(self, texts)

    monkeypatch.setattr(EncoderModel, "score_texts", count_texts)
    rule: dict[str, Any] = {"kind": "encoder_classifier", "name": "taste", "model": str(folder)}
    rule |= {"label": "good", "max_tokens": 64}

    def prepare(name: str, *rules: dict[str, Any], **data: Any) -> pa.Table:
        asked.clear()
        config = build_tiny_config(tmp_path / name, crawl, rules=list(rules), **data)
        prepare_dataset(config)
        files = sorted((tmp_path / name / "documents").glob("*.arrow"))
        return pa.concat_tables(pa.ipc.open_file(path).read_all() for path in files)

    whole = prepare("data", rule)
    scores = whole.column("taste.score").to_numpy()
    texts = whole.column("text").to_pylist()
    expected = ask_pipeline(folder, "good", texts)
    assert scores.tolist() == expected
    middle = float(np.median(scores))
    # A limit, and another rule before it, ask the model nothing.
    for rules in (
        [rule | {"min_score": middle}],
        [{"kind": "gopher_quality", "min_words": 20}, rule],
    ):
        changed = prepare("data", *rules)
        assert not asked
        assert changed.equals(prepare(f"alone-{len(rules)}", *rules))
        assert asked
    edges = [middle]
    buckets = {"kind": "buckets", "column": "taste.score", "edges": edges, "weights": [0, 1]}
    prepare("data", rule, sampling=[buckets])
    assert not asked
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_bytes())
    low, high = sorted(manifest["sampling"][0]["groups"], key=lambda one: one["sampled_documents"])
    assert low["sampled_documents"] == 0 < high["sampled_documents"] == high["documents"]


# --- mistakes ---


def damage_folder(folder: Path, damage: str) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    match damage:
        case "no config":
            (folder / "config.json").unlink()
        case "torn config":
            (folder / "config.json").write_text('{"architectures": [')
        case "no classifier":
            config["architectures"] = ["BertForMaskedLM"]
            (folder / "config.json").write_text(json.dumps(config))
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "values", "message"),
    [
        ("no config", {}, "rules.0.model: .* has no config.json, so it is no folder of a model"),
        ("torn config", {}, "config.json cannot be read"),
        ("no classifier", {}, "BertForMaskedLM, which scores no label"),
        ("no weights", {}, "has no weights: none of model.safetensors"),
        ("no tokenizer", {}, "has no tokenizer: none of tokenizer.json"),
        (
            "",
            {"label": "great"},
            "rules.0.label: .* has no label 'great'; its labels are bad, good",
        ),
        ("", {"label": ""}, "has several labels; its labels are bad, good"),
        ("", {"max_tokens": 65}, "rules.0.max_tokens: 65 is above the 64 positions"),
    ],
)
def test_a_mistake_is_named_before_work_starts(
    damage: str, values: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    damage_folder(model, damage)
    rule = build_config(model, **values).model_dump(mode="json")
    section = {"name": "x", "folder": str(tmp_path / "data"), "inputs": ["*.gz"], "rules": [rule]}
    data = CrawlConfig.model_validate(section)
    with pytest.raises(DataError, match=message):
        require_resource_files(data)
    assert not (tmp_path / "data").exists()


def test_a_column_that_the_model_does_not_make_is_named_before_it_scores(
    folder: Path, tmp_path: Path
) -> None:
    rule = build_config(folder, name="taste").model_dump(mode="json")
    sampling = [{"kind": "buckets", "column": "taste.good", "edges": [0.5], "weights": [0, 1]}]
    section = {"name": "x", "folder": str(tmp_path / "data"), "inputs": ["*.gz"], "rules": [rule]}
    data = CrawlConfig.model_validate(section | {"sampling": sampling})
    with pytest.raises(ConfigError, match=r"sampling.0.column: .* Its column is taste.score"):
        require_resource_files(data)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    rule = {"kind": "encoder_classifier", "model": str(tmp_path / "none"), "label": "good"}
    section = {"name": "x", "folder": str(tmp_path / "data"), "inputs": ["*.gz"], "rules": [rule]}
    with pytest.raises(DataError, match=r"none/config.json does not exist"):
        require_resource_files(CrawlConfig.model_validate(section))


def test_weights_that_lack_the_head_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would begin a new head with random numbers."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not name.startswith("classifier")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"no weights for classifier.bias, classifier.weight: its"):
        score(build_config(model), ["a text"])


def test_a_gpu_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DataError, match="needs a GPU, and this process sees none"):
        score(build_config(folder, device="cuda"), ["a text"])

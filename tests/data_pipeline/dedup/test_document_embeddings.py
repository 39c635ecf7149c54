"""Laws of the embeddings of documents: those of transformers, stored ones are not computed again,
a dataset has the same bytes by any workers and after kills, and mistakes are named before work
starts.
"""

import json
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import EncoderEmbeddingsConfig
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.encoder_model import EmbeddingModel
from llmsys.errors import ConfigError, DataError
from tests.helpers.killed_preparations import kill_again_and_again, read_kept_bytes, start
from tests.helpers.tiny_crawl import WORDS, build_tiny_config, hash_files, make_crawl
from tests.helpers.tiny_encoder import save_tiny_encoder

TEXTS = [
    "the river and the old garden",
    "",
    "mountains " * 90,
    "children played near water, under tall trees.",
    "unknown 你好 words\nand lines",
] + [" ".join(WORDS[start : start + 20]) for start in range(0, 30, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("model"))


def build_section(folder: Path, **values: Any) -> dict[str, Any]:
    """A section of semantic duplicates by the tiny encoder."""
    encoder = {"kind": "encoder", "model": str(folder), "max_tokens": 64}
    encoder |= values.pop("embeddings", {})
    return {"kind": "embeddings", "embeddings": encoder, "threshold": 0.9} | values


def build_encoder(folder: Path, **values: Any) -> EncoderEmbeddingsConfig:
    section = build_section(folder, embeddings=values)["embeddings"]
    return EncoderEmbeddingsConfig.model_validate(section)


def embed_plainly(folder: Path, texts: Sequence[str], pooling: str) -> torch.Tensor:
    """The oracle: transformers' hidden states, one text at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder).eval()
    rows = []
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
            states = model(**tokens).last_hidden_state[0]
            rows.append(states[0] if pooling == "cls" else states.mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_the_pooled_states_of_transformers(pooling: str, folder: Path) -> None:
    model = EmbeddingModel(build_encoder(folder, pooling=pooling))
    expected = embed_plainly(folder, TEXTS, pooling).numpy()
    np.testing.assert_allclose(model.embed_texts(TEXTS), expected, rtol=1e-5, atol=1e-6)
    # What fills up a batch changes nothing but roundings.
    batched = EmbeddingModel(build_encoder(folder, pooling=pooling, batch_size=4))
    found = batched._run_in_batches(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len({tuple(row) for row in expected.round(3).tolist()}) == len(TEXTS)


def test_a_prefix_is_put_before_each_text(folder: Path) -> None:
    model = EmbeddingModel(build_encoder(folder, prefix="river "))
    expected = embed_plainly(folder, [f"river {text}" for text in TEXTS], "mean")
    np.testing.assert_allclose(model.embed_texts(TEXTS), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the model was asked about."""
    texts: list[str] = []
    compute = EmbeddingModel.embed_texts

    def count_texts(self: EmbeddingModel, given: Sequence[str]) -> Any:
        texts.extend(given)
        return compute(self, given)

    monkeypatch.setattr(EmbeddingModel, "embed_texts", count_texts)
    return texts


def read_names(folder: Path, room: str) -> list[dict[str, Any]]:
    files = sorted((folder / room).glob("*.arrow"))
    return [row for path in files for row in pa.ipc.open_file(path).read_all().to_pylist()]


def read_stage_keys(folder: Path) -> dict[str, set[str]]:
    """The keys of the tasks of each stage."""
    journal = sqlite3.connect(folder / "journal" / "records.sqlite")
    rows = journal.execute("select stage, key from record").fetchall()
    journal.close()
    return {stage: {key for name, key in rows if name == stage} for stage, _ in rows}


def test_another_threshold_rule_or_comparison_embeds_no_text_again(
    folder: Path, tmp_path: Path, asked: list[str]
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=8)

    def prepare(name: str, semantic: dict[str, Any], **data: Any) -> dict[str, str]:
        asked.clear()
        deduplicate = data.pop("deduplicate", {}) | {"semantic": semantic}
        prepare_dataset(build_tiny_config(tmp_path / name, crawl, deduplicate=deduplicate, **data))
        public = hash_files(tmp_path / name)
        return {key: one for key, one in public.items() if not key.startswith("work/")}

    prepare("data", build_section(folder))
    first = len(asked)
    dropped = [one for one in read_names(tmp_path / "data", "dropped")
               if one["stage"] == "semantic_duplicates"]  # fmt: skip
    kept = {one["id"] for one in read_names(tmp_path / "data", "documents")}
    assert dropped
    for one in dropped:
        words = one["reason"].split()
        assert one["test"] == "cosine"
        assert one["threshold"] == 0.9 <= one["value"]
        assert words[words.index("with") + 1].rstrip(",") in kept
    before = read_stage_keys(tmp_path / "data")
    # Only what is decided by the threshold runs again.
    changed = prepare("data", build_section(folder, threshold=0.999))
    after = read_stage_keys(tmp_path / "data")
    assert not asked
    assert {name for name in before if before[name] != after[name]} >= {"semantic_duplicates"}
    assert all(before[name] == after[name] for name in ("embeddings", "centroids", "assigned"))
    assert changed == prepare("alone", build_section(folder, threshold=0.999))
    assert len(asked) == first
    # Other rules and comparisons change what is compared, and ask about new texts alone.
    strict = [{"kind": "gopher_quality", "min_words": 130}]
    loose: dict[str, Any] = {"minhash": {"kind": "none"}}
    for number, (rules, deduplicate) in enumerate(((strict, {}), (strict, loose))):
        found = prepare("data", build_section(folder), rules=rules, deduplicate=deduplicate)
        assert len(asked) < 6
        alone = prepare(f"new-{number}", build_section(folder), rules=rules,
                        deduplicate=deduplicate)  # fmt: skip
        assert found == alone
        assert len(asked) > 6
    # Another model, pooling or precision is another embedding.
    prepare("data", build_section(folder, precision="float32"), rules=strict)
    assert len(asked) > 6


def test_a_damaged_embedding_file_is_computed_again(
    folder: Path, tmp_path: Path, asked: list[str]
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=1, pages=8)
    config = build_tiny_config(
        tmp_path / "data", crawl, deduplicate={"semantic": build_section(folder)}
    )
    prepare_dataset(config)
    expected = hash_files(tmp_path / "data")
    first = list(asked)
    for path in (tmp_path / "data" / "work" / "embeddings.packs").rglob("*.pack"):
        path.write_bytes(b"x" * path.stat().st_size)
    asked.clear()
    prepare_dataset(config)
    assert sorted(asked) == sorted(first)
    assert hash_files(tmp_path / "data") == expected


def test_workers_kills_and_the_order_of_files_change_no_byte(folder: Path, tmp_path: Path) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=3, pages=8)
    names = [str(path) for path in sorted(crawl.iterdir())]
    semantic = build_section(folder, clusters=3, documents_per_task=8)
    shared: dict[str, Any] = {"deduplicate": {"minhash": {"kind": "none"}, "semantic": semantic}}
    whole = tmp_path / "whole"
    assert start(whole, names, 1, **shared).wait() == 0
    assert start(tmp_path / "two", names, 2, **shared).wait() == 0
    assert hash_files(tmp_path / "two") == hash_files(whole)
    assert start(tmp_path / "order", names[::-1], 2, **shared).wait() == 0
    assert read_kept_bytes(tmp_path / "order") == read_kept_bytes(whole)
    assert kill_again_and_again(tmp_path / "killed", names, whole, 2, 3, **shared)
    assert hash_files(tmp_path / "killed") == hash_files(whole)
    manifest = json.loads((whole / "manifest.json").read_bytes())
    (stage,) = [one for one in manifest["funnel"] if one["stage"] == "semantic_duplicates"]
    assert 0 < stage["documents_out"] < stage["documents_in"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_embeddings_of_the_input_are_read_from_their_column(form: str, tmp_path: Path) -> None:
    vectors = [[1.0, 0.0, 0.1], [0.0, 1.0, 0.0], [1.0, 0.01, 0.1], [0.0, 0.0, 1.0]]
    texts = [" ".join(WORDS[number:] * 2) for number in range(4)]
    rows = [{"text": text, "vector": one} for text, one in zip(texts, vectors, strict=True)]
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        kind = pa.schema([("text", pa.string()), ("vector", pa.list_(pa.float32()))])
        pq.write_table(pa.Table.from_pylist(rows, kind), path)
    column = {"kind": "column", "column": "vector"}
    semantic = {"kind": "embeddings", "embeddings": column, "threshold": 0.9}
    data = {"rules": [], "split": {"heldout_fraction": 0}}
    deduplicate = {"minhash": {"kind": "none"}, "semantic": semantic}
    prepare_dataset(
        build_tiny_config(tmp_path / "data", [str(path)], deduplicate=deduplicate, **data),
        until="documents",
    )
    kept = {one["text"] for one in read_names(tmp_path / "data", "documents")}
    assert kept == {texts[0], texts[1], texts[3]}
    (gone,) = read_names(tmp_path / "data", "dropped")
    assert gone["text"] == texts[2]
    assert gone["value"] == pytest.approx(0.99995, abs=1e-4)


@pytest.mark.parametrize("more", [{}, {"repeated_segments": {"kind": "lines", "min_words": 5}}])
def test_it_is_the_only_comparison_or_follows_cut_texts(
    more: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=5)
    off = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
    for index in ("none", "kept"):
        deduplicate = off | more | {"semantic": build_section(folder), "index": {"kind": index}}
        prepare_dataset(build_tiny_config(tmp_path / index, crawl, deduplicate=deduplicate))
    kept = read_names(tmp_path / "none", "documents")
    assert kept == read_names(tmp_path / "kept", "documents")
    gone = read_names(tmp_path / "none", "dropped")
    named = [one["reason"] for one in gone if one["stage"] == "semantic_duplicates"]
    ids = {one["id"] for one in kept}
    assert named
    assert all(any(name in reason for name in ids) for reason in named)


# --- mistakes ---


def damage_folder(folder: Path, damage: str) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    match damage:
        case "no config":
            (folder / "config.json").unlink()
        case "decoder":
            (folder / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "cls" | "lasttoken":
            modes = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
            (folder / "1_Pooling").mkdir()
            content = {"word_embedding_dimension": 32, modes[damage]: True}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        case "torn pooling":
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "values", "message"),
    [
        ("no config", {}, "embeddings.model: .* has no config.json, so it is no folder of a model"),
        ("decoder", {}, "embeddings.model: .* is an encoder with a decoder"),
        ("no weights", {}, "embeddings.model: .* has no weights: none of model.safetensors"),
        ("no tokenizer", {}, "embeddings.model: .* has no tokenizer: none of tokenizer.json"),
        ("", {"max_tokens": 65}, "embeddings.max_tokens: 65 is above the 64 positions"),
        ("cls", {}, "embeddings.pooling: .* says pooling_mode_cls_token, not mean. Set pooling: c"),
        ("lasttoken", {}, "says pooling_mode_lasttoken, not mean. Embed the texts with sentence-"),
        ("torn pooling", {}, "1_Pooling/config.json cannot be read"),
    ],
)
def test_a_mistake_is_named_before_work_starts(
    damage: str, values: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    damage_folder(model, damage)
    semantic = build_section(model, embeddings=values)
    section = {"name": "x", "folder": str(tmp_path / "data"), "inputs": ["*.gz"]}
    data = CrawlConfig.model_validate(section | {"deduplicate": {"semantic": semantic}})
    with pytest.raises(DataError, match=message):
        require_resource_files(data)
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_missing_and_a_library_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"name": "x", "folder": str(tmp_path / "data"), "inputs": ["*.gz"]}
    semantic = build_section(tmp_path / "none")
    data = CrawlConfig.model_validate(section | {"deduplicate": {"semantic": semantic}})
    with pytest.raises(DataError, match=r"embeddings: .*none/config.json does not exist"):
        require_resource_files(data)

    def find_none(package: str) -> str:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", find_none)
    with pytest.raises(ConfigError, match=r"needs the package transformers.*llmsys\[encoder\]"):
        require_resource_files(data)


def test_weights_that_lack_a_layer_are_refused_and_the_pooler_is_not_asked(
    folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    kept = {name: one for name, one in weights.items() if ".pooler." not in name}
    assert len(kept) < len(weights)
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    EmbeddingModel(build_encoder(model))
    kept = {name: one for name, one in kept.items() if ".layer.1.output.dense" not in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"no weights for .*: its embeddings would be random"):
        EmbeddingModel(build_encoder(model))


def test_what_a_config_cannot_give_is_named(folder: Path) -> None:
    column = {"kind": "column", "column": "on"}
    semantic = {"kind": "embeddings", "embeddings": column}
    for keep in ("none", ["source"]):
        with pytest.raises(ValueError, match="keep_fields does not keep on, so it cannot be read"):
            build_tiny_config(
                "x", [], deduplicate={"semantic": semantic}, read={"keep_fields": keep}
            )
    build_tiny_config("x", [], deduplicate={"semantic": semantic}, read={"keep_fields": ["on"]})
    section = {"earlier_datasets": ["runs/old"], "semantic": build_section(folder)}
    with pytest.raises(ValueError, match="1 earlier datasets have no embeddings in their index"):
        build_tiny_config("x", [], deduplicate=section)

"""`llmsys convert` on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from llmsys.launch.main import main
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")


@pytest.fixture
def trained_tokenizer(tmp_path: Path) -> Path:
    lines = (f"the lazy {i} dogs of the {i % 7} quick foxes" for i in range(200))
    options: dict[str, Any] = {
        "vocab_size": 330,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "minloglevel": 2,
    }
    prefix = str(tmp_path / "pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=prefix, model_type="bpe", **options
    )
    return tmp_path / "pieces.model"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build("mixtral").save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_the_direction_follows_from_the_source(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", str(source), str(ours)]) == 0
    assert (
        f"wrote {ours}. Use it with: llmsys generate {ours}/config.yaml" in capsys.readouterr().out
    )
    checkpoint = ours / "checkpoints" / "step-00000000"
    assert main(["convert", str(checkpoint), str(back), "--max-shard-size", "20KB", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    logits = printed.pop("logits")
    assert logits["largest_difference"] <= 1e-5 * logits["largest_logit"]
    assert printed == {"source": str(checkpoint), "destination": str(back)}
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 1


def test_generation_works_from_a_converted_folder(
    tmp_path: Path, trained_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("llama")
    model.resize_token_embeddings(400)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(trained_tokenizer.read_bytes())
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    words = ["--prompt", "the lazy", "generation.max_new_tokens=5", "--json"]
    assert main(["generate", str(tmp_path / "ours" / "config.yaml"), *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == "the lazy"
    record = json.loads(
        (tmp_path / "ours" / "checkpoints" / "step-00000000" / "state.json").read_text()
    )
    assert record["run"] == {"tokenizer_fingerprint": load_tokenizer(trained_tokenizer).fingerprint}


def test_a_dry_run_lists_both_ways_and_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "ours"
    assert main(["convert", str(source), str(ours), "--dry-run"]) == 0
    listed = capsys.readouterr().out
    theirs = "model.layers.1.block_sparse_moe.experts.3.w3.weight (24, 16) float32"
    assert f"{theirs}  =  parameter/blocks.1.feed_forward.experts.up_proj[3] (16, 24)" in listed
    assert not ours.exists()
    assert main(["convert", str(source), str(ours)]) == 0
    capsys.readouterr()
    assert main(["convert", str(ours), str(tmp_path / "back"), "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert ["model.safetensors: model.norm.weight (16,)"] in [row["theirs"] for row in rows]
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--max-shard-size", "many"],
            "'many' is not a size. Write a number and a unit, such as 2GB or 500MiB.",
        ),
        (["--max-shard-size", "0GB"], "'0GB' is not a size"),
        (["--max-shard-size", "2GB"], "--max-shard-size applies to the conversion to Hugging Face"),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused(
    words: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "ours"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_source_that_is_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "ours")]) == 2
    assert "is not a folder. Name a Hugging Face folder or a run folder." in capsys.readouterr().err

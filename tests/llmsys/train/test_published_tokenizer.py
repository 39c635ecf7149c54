"""The way of somebody with a published model: convert it, prepare data with its tokenizer,
evaluate, train on.
"""

import json
from pathlib import Path

import pytest
import yaml

from llmsys.dataset.token_shards import open_tokens
from llmsys.launch.main import main
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.json_tokenizers import write
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    size = len(write("gpt2", tmp_path / "theirs").get_vocab())
    model = build("gpt2")
    model.resize_token_embeddings(size)
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_convert_prepare_evaluate_train_and_generate(
    theirs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "ours"
    assert main(["convert", str(theirs), str(ours)]) == 0
    values = yaml.safe_load((ours / "config.yaml").read_text())
    values["data"] = build_tiny_config(
        tmp_path / "data", make_crawl(tmp_path / "crawl")
    ).data.model_dump(mode="json")
    values["batch"] = {"sequence_length": 32, "sequences": 4}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    assert main(["prepare", str(config)]) == 0

    tokens, tokenizer = open_tokens(tmp_path / "data", "train"), load_tokenizer(theirs)
    tokens.require_tokenizer(tokenizer.fingerprint)
    copied = load_tokenizer(tmp_path / "data" / "tokenizer")
    assert (copied.eos_id, copied.fingerprint) == (tokenizer.eos_id, tokenizer.fingerprint)
    first = tokens.get_tokens(0).tolist()
    assert first[-1] == tokenizer.eos_id not in first[:-1]
    assert tokenizer.encode(tokenizer.decode(first)) == first[:-1]

    capfd.readouterr()
    assert main(["evaluate", str(config), "--json"]) == 0
    before = json.loads(capfd.readouterr().out)
    assert before["gzip_bits_per_byte"] > 0

    settings = [f"run.folder={tmp_path / 'tuned'}", f"train.init_from={ours}", "train.tokens=2560"]
    settings += ["schedule.warmup_tokens=128", "optimizer.learning_rate=0.01", "launch.processes=1"]
    assert main(["train", str(config), *settings, "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["loss"] < before["loss"]
    asked = [
        "--prompt",
        "The lazy",
        "generation.prefix_pieces=null",
        "generation.max_new_tokens=4",
        "--json",
    ]
    assert main(["generate", str(config), *settings, *asked]) == 0
    assert json.loads(capfd.readouterr().out)[0]["prompt"] == "The lazy"


def test_another_end_encodes_the_documents_again(theirs: Path, tmp_path: Path) -> None:
    file = theirs / "tokenizer.json"
    config = build_tiny_config(
        tmp_path / "data", make_crawl(tmp_path / "crawl", files=1)
    ).model_dump(mode="json")
    for settings, end in (({}, "<|endoftext|>"), ({"eos_token": "!"}, "!")):
        values = {
            "data": config["data"],
            "tokenizer": {"kind": "file", "path": str(file), **settings},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        assert main(["prepare", str(tmp_path / "run.yaml")]) == 0
        tokens = open_tokens(tmp_path / "data", "train")
        assert tokens.get_tokens(0)[-1] == load_tokenizer(theirs).find_piece_id(end)
        assert load_tokenizer(tmp_path / "data" / "tokenizer").eos_id == tokens.get_tokens(0)[-1]
    (theirs / "tokenizer_config.json").unlink()
    (theirs / "config.json").unlink()
    (theirs / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(values | {"tokenizer": {"kind": "file", "path": str(theirs)}})
    )
    assert main(["prepare", str(tmp_path / "run.yaml")]) == 2

"""A model of each of many types is continued, and its export is the original but for the weights.

Each case is a folder as transformers writes it: bf16, several ids that end a text, a chat template,
a licence. One has several files of weights, and one two dtypes that its config does not name.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from llmsys.config.loading.load import load_run_config
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.launch.main import main
from llmsys.train.build_trainer import train_run
from tests.helpers.json_tokenizers import write
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")

GENERATION = {"eos_token_id": [0, 2], "temperature": 0.7, "do_sample": True, "top_p": 0.9}
SMALL_FILES = {
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "LICENSE": "as you like",
    "README.md": "---\nlicense: other\n---\n",
    "special_tokens_map.json": '{"eos_token": "<|endoftext|>"}',
}
MASK, SENTINEL = "[MASK]", "<extra_id_{}>"
SPANS = {
    "objective": {"kind": "span_corruption", "sentinel_token": SENTINEL},
    "batch": {"sequence_length": 32, "sequences": 2, "attention_scope": "window"},
}
SETTINGS = {
    "bert": {"objective": {"kind": "masked", "mask_token": MASK}},
    "bart": SPANS,
    "t5": SPANS,
}
CASES = [
    "bart", "bert", "deepseek_v3", "falcon, new", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss",
    "llama, tied", "mistral", "mixtral", "olmo2", "qwen2", "qwen3_moe", "t5",
]  # fmt: skip
SHARDED, UNSTATED = "mixtral", "olmo2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run on a dataset that was prepared with the tokenizer of every case."""
    root = tmp_path_factory.mktemp("data")
    write_tokenizer(root / "tokenizer")
    config = build_tiny_config(root / "data", make_crawl(root / "crawl", files=1))
    settings = {
        "tokenizer": {"kind": "file", "path": str(root / "tokenizer")},
        "data": config.data.model_dump(mode="json"),
        "batch": {"sequence_length": 32, "sequences": 2},
        "schedule": {"kind": "constant"},
        "launch": {"processes": 1},
    }
    (root / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert main(["prepare", str(root / "settings.yaml")]) == 0
    return settings


def write_tokenizer(folder: Path) -> int:
    """A tokenizer for every objective; gives its size."""
    tokenizer = write("gpt2", folder)
    tokenizer.add_special_tokens([MASK, *(SENTINEL.format(number) for number in range(8))])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write_original(case: str, folder: Path) -> Any:
    """The folder of a case, as its publisher would write it; gives the class that loads it."""
    model = build(case)
    model.resize_token_embeddings(write_tokenizer(folder))
    model = model.to(torch.bfloat16)
    if case == UNSTATED:
        model.model.norm.float()
    model.save_pretrained(folder, **({"max_shard_size": "9KB"} if case == SHARDED else {}))
    if case == UNSTATED:  # as old folders are: wide norms, and no word about dtypes
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for name, text in SMALL_FILES.items():
        (folder / name).write_text(text)
    return type(model)


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".safetensors"
    }


def read_weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


def describe(weights: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        file: {name: (value.dtype, value.shape) for name, value in tensors.items()}
        for file, tensors in weights.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_the_export_of_a_continued_model_equals_its_source_but_for_the_weights(
    case: str, data: dict[str, Any], tmp_path: Path
) -> None:
    kind = write_original(case, tmp_path / "theirs")
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "start")
    convert_to_hugging_face(tmp_path / "start", tmp_path / "unchanged")
    theirs, before = read_files(tmp_path / "theirs"), read_weights(tmp_path / "theirs")
    assert {file.name: file.read_bytes() for file in (tmp_path / "unchanged").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()
    }
    assert (len(before) > 1) == (case == SHARDED)

    values = yaml.safe_load((tmp_path / "start" / "config.yaml").read_text()) | data
    values |= SETTINGS.get(case, {})
    values["run"] = {"name": "tuned", "folder": str(tmp_path / "tuned")}
    values["train"] = {"tokens": 128, "init_from": str(tmp_path / "start")}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
    train_run(load_run_config(str(tmp_path / "settings.yaml")), lambda *_: [])
    shutil.rmtree(tmp_path / "start")
    assert main(["convert", str(tmp_path / "tuned"), str(tmp_path / "converted")]) == 0
    train = ["train", str(tmp_path / "settings.yaml"), "--export", str(tmp_path / "exported")]
    assert main(train) == 0

    for way in ("converted", "exported"):
        mine, after = read_files(tmp_path / way), read_weights(tmp_path / way)
        assert json.loads(mine.pop("llmsys.json"))["steps"] == 2
        assert mine == theirs
        assert describe(after) == describe(before)
        changed = [
            name for file in before for name, value in before[file].items()
            if not torch.equal(value, after[file][name])
        ]  # fmt: skip
        assert len(changed) > 3
        loaded, report = kind.from_pretrained(
            tmp_path / way, output_loading_info=True, dtype="auto"
        )
        assert loaded.dtype == torch.bfloat16
        assert not any(
            report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )

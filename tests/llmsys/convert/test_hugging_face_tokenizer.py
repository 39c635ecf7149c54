"""A Hugging Face folder with a tokenizer.json: what is converted continues text as transformers
does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.convert.tokenizer_files import import_tokenizer
from llmsys.launch.main import main
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.json_tokenizers import write
from tests.helpers.transformers_models import build

transformers = pytest.importorskip("transformers")
PROMPTS = ["The lazy", "it's the 5", "Straße 猫", " fox"]
NEW = 12


def folder_of(case: str, kind: str, folder: Path) -> Any:
    """A random model with a tokenizer that fits it, as a Hugging Face folder."""
    size = len(write(kind, folder).get_vocab())
    model = build(case)
    model.resize_token_embeddings(size)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model.eval()


def greedy(model: Any, folder: Path, prompt: str) -> str:
    """What transformers continues the prompt with, decoded together with it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ids = ids.long() if ids.numel() else torch.tensor([[begin]])
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": tokenizer.eos_token_id}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)[0]
    text = str(tokenizer.decode(whole, skip_special_tokens=True))
    if text.startswith(prompt):
        return text
    # Bytes that are no character spoil the whole bytes beside them, which here are the prompt's.
    return prompt + str(tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize(
    ("case", "kind", "opening"),
    [
        ("gpt2", "gpt2", []),
        ("llama", "llama3", ["<|begin_of_text|>"]),
        ("llama", "llama2", ["<s>"]),
        ("qwen2", "qwen2", []),
        ("gpt_neox", "gpt2", []),
        ("kimi_linear", "gpt2", []),
    ],
)
def test_generation_gives_the_greedy_text_of_transformers(
    case: str, kind: str, opening: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = folder_of(case, kind, tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    config = str(tmp_path / "ours" / "config.yaml")
    run = load_run_config(config)
    assert list(run.generation.prefix_pieces or ()) == opening
    capsys.readouterr()
    prompts = [*PROMPTS, ""]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    settings = [
        "generation.temperature=0",
        f"generation.max_new_tokens={NEW}",
        "train.precision=fp32",
    ]
    assert main(["generate", config, *asked, *settings, "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)
    assert [one["prompt"] + one["text"] for one in samples] == [
        greedy(theirs, tmp_path / "theirs", prompt) for prompt in prompts
    ]
    record = json.loads(
        (tmp_path / "ours" / "checkpoints" / "step-00000000" / "state.json").read_text()
    )
    assert record["run"] == {
        "tokenizer_fingerprint": load_tokenizer(tmp_path / "theirs").fingerprint
    }


def test_the_opening_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of("llama", "llama3", tmp_path / "theirs")
    main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    words = ["generate", str(tmp_path / "ours" / "config.yaml"), "--prompt", "The lazy", "--json"]
    capsys.readouterr()
    texts = []
    for opening in ("[<|begin_of_text|>]", "[]", "null"):
        settings = [
            "generation.temperature=0",
            f"generation.prefix_pieces={opening}",
            "train.precision=fp32",
        ]
        assert main([*words, *settings]) == 0
        texts.append(json.loads(capsys.readouterr().out)[0]["text"])
    assert len(set(texts)) == 3
    assert main([*words, "generation.prefix_pieces=[<bos>]"]) == 2
    assert (
        "generation.prefix_pieces has <bos>, which is not a token of the tokenizer"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "t5"])
def test_a_run_of_ours_goes_out_with_it_as_it_is(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of("llama", kind, tmp_path / "theirs")
    main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    (tmp_path / "ours" / "hugging_face" / "record.json").unlink()  # as if it had been trained here
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    ours, theirs = load_tokenizer(tmp_path / "ours" / "tokenizer"), tmp_path / "back"
    loaded = transformers.AutoTokenizer.from_pretrained(theirs)
    assert (theirs / "tokenizer.json").read_bytes() == (
        tmp_path / "theirs" / "tokenizer.json"
    ).read_bytes()
    assert (
        loaded.eos_token_id
        == ours.eos_id
        == json.loads((theirs / "config.json").read_text())["eos_token_id"]
    )
    for prompt in PROMPTS:
        assert loaded.encode(prompt, add_special_tokens=False) == ours.encode(prompt)


def test_a_masked_model_knows_the_mask_of_its_tokenizer(tmp_path: Path) -> None:
    folder_of("bert", "bert", tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    run = load_run_config(str(tmp_path / "ours" / "config.yaml"))
    assert (run.objective.kind, run.objective.mask_token) == ("masked", "[MASK]")


def test_tokenizer_json_goes_before_sentencepiece_and_a_damaged_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "theirs"
    write("gpt2", source)
    (source / "tokenizer.model").write_bytes(b"SentencePiece's")
    (tmp_path / "one").mkdir()
    taken = import_tokenizer(source, tmp_path / "one")
    assert taken is not None
    assert taken.file == "tokenizer/tokenizer.json"
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer.model").unlink()
    (tmp_path / "two").mkdir()
    assert import_tokenizer(source, tmp_path / "two") is None
    assert "the run is written without this tokenizer" in caplog.text

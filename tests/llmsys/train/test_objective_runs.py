"""Whole runs of the other objectives, as a person starts them: translate, fill masks, fine-tune a
classifier.

Real commands, each of them once in a process of its own, on toy languages small enough for seconds.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmsys.events import read_events
from llmsys.train.checkpoint_load import load_tensors, read_tensor_metadata
from tests.helpers.command_line import run_llmsys
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.forked_commands import run_forked
from tests.helpers.tiny_pairs import WORDS, build_sentence_pairs, write_pairs_config

SHAPE: dict[str, Any] = {
    "vocab_size": 330, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64, "norm": {"kind": "layernorm"}, "feed_forward": {"kind": "relu",
        "bias": True},
}  # fmt: skip
ADAM = {"kind": "adamw", "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.0}


def write_config(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(settings))
    return path


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(like.shape, dtype=like.dtype)
        for name, like in read_tensor_metadata(checkpoint).items()
    }
    load_tensors(tensors, checkpoint)
    return tensors


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a toy translation, prepared and trained with dropout."""
    folder = tmp_path_factory.mktemp("translation")
    data = write_pairs_config(folder, pairs=1500, longest=5).data
    settings = {
        "run": {"name": "toy", "folder": str(folder / "run")},
        "data": data.model_dump(mode="json"),
        "tokenizer": {"vocab_size": 330},
        "model": SHAPE | {
            "family": "encoder_decoder", "tie_word_embeddings": True,
            "position": {"kind": "sinusoidal"},
            "initializer": "xavier", "embedding": {"scale": "sqrt_hidden_size",
                "initializer_range": 0.125},
            "dropout": {"embedding": 0.05, "residual": 0.05}, "encoder": {"num_hidden_layers": 1},
        },
        "loss": {"label_smoothing": 0.1},
        "batch": {"sequence_length": 64, "target_sequence_length": 64, "tokens": 600,
            "num_length_buckets": 2},
        "optimizer": ADAM | {"learning_rate": 1.0},
        "schedule": {"kind": "noam", "warmup_steps": 60},
        "train": {"tokens": 600 * 260, "log_every_steps": 20, "precision": "fp32",
            "threads_per_process": 1},
        "checkpoint": {"every_steps": 20, "keep_last": 4, "average_last": 4},
        "generation": {"num_beams": 2},
    }  # fmt: skip
    config = write_config(folder / "toy.yaml", settings)
    run_llmsys("train", config, "--prepare")
    return config


def test_a_translation_run_learns_its_language(translation: Path) -> None:
    result = json.loads(run_forked("evaluate", translation, "--json").stdout)
    assert result["bleu"] > 25
    assert result["sentences"] == 30
    assert result["signature"].startswith("nrefs:1|case:mixed|")
    assert "averaged/step-00000260" in result["checkpoint"]
    plain = json.loads(
        run_forked("evaluate", translation, "checkpoint.average_last=0", "--json").stdout
    )
    assert "checkpoints/step-00000260" in plain["checkpoint"]
    steps = [
        e for e in read_events(translation.parent / "run" / "events.jsonl") if e["event"] == "step"
    ]
    assert all(abs(step["target_tokens"] - 600) < 90 for step in steps)
    assert all(0 <= step["padding_share"] < 0.4 for step in steps)
    assert "is finished" in run_forked("train", translation).stdout


def test_lines_are_translated_in_their_order(translation: Path, tmp_path: Path) -> None:
    given = tmp_path / "in.txt"
    sources = [source for source, _ in build_sentence_pairs(5, seed=9, longest=4)]
    given.write_text("\n".join([*sources[:3], "", *sources[3:]]) + "\n")
    run_llmsys("translate", translation, "--input", given, "--output", tmp_path / "out.txt")
    found = (tmp_path / "out.txt").read_text().split("\n")
    assert len(found) == 7  # six lines and what follows the last newline
    assert [bool(line) for line in found] == [True, True, True, False, True, True, False]
    done = run_forked("translate", translation, "--input", tmp_path / "nowhere.txt", check=False)
    assert done.returncode == 2
    assert "nowhere.txt does not exist" in done.stderr


def test_a_resumed_run_drops_what_the_uninterrupted_one_dropped(
    translation: Path, tmp_path: Path
) -> None:
    whole = translation.parent / "run" / "checkpoints"
    shutil.copytree(whole / "step-00000220", tmp_path / "run" / "checkpoints" / "step-00000220")
    run_forked("train", translation, f"run.folder={tmp_path / 'run'}", "checkpoint.average_last=0")
    resumed, calm = (
        read_weights(tmp_path / "run" / "checkpoints" / "step-00000260"),
        read_weights(whole / "step-00000260"),
    )
    assert resumed.keys() == calm.keys()
    assert all(torch.equal(value, calm[name]) for name, value in resumed.items())


def test_a_translation_model_is_not_asked_to_continue(translation: Path) -> None:
    done = run_forked(
        "translate", translation, "model.family=decoder", "model.encoder=null", check=False
    )
    assert done.returncode == 2
    assert "data.kind: pairs data do not fit objective next_token" in done.stderr


def encoder(folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": "masks", "folder": str(folder / "masks")},
        "data": {"folder": str(make_dataset(folder / "data", symbols=("<mask>",)))},
        "tokenizer": {"vocab_size": VOCABULARY, "control_symbols": ["<mask>"]},
        "model": SHAPE | {
            "vocab_size": VOCABULARY, "family": "encoder", "head": {"kind": "mlm"},
            "position": {"kind": "learned"},
            "tie_word_embeddings": True, "dropout": {"embedding": 0.1},
        },
        "batch": {"sequence_length": 64, "sequences": 8},
        "optimizer": ADAM | {"learning_rate": 3e-3},
        "schedule": {"kind": "constant", "warmup_tokens": 5120},
        "train": {"tokens": 60 * 512, "log_every_steps": 10, "precision": "fp32",
            "threads_per_process": 1},
        "launch": {"processes": 2}, "checkpoint": {"every_steps": 0},
    }  # fmt: skip


def test_masks_are_learnt_and_a_classifier_starts_from_them(tmp_path: Path) -> None:
    settings = encoder(tmp_path)
    config = write_config(tmp_path / "masks.yaml", settings)
    run_forked("train", config)
    steps = [e for e in read_events(tmp_path / "masks" / "events.jsonl") if e["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(5.95, abs=0.3)  # ln 384
    assert steps[-1]["loss"] < 4.5
    result = json.loads(run_llmsys("evaluate", config, "--json").stdout)
    assert 0 < result["accuracy"] < 1
    assert result["evaluated_targets"] > 30

    rows = [
        f"{label}\tthe {word} file"
        for word in sorted(WORDS)
        for label, word in [(word < "l", word)]
    ]
    (tmp_path / "texts.tsv").write_text("\n".join(rows * 20))
    settings |= {
        "run": {"name": "labels", "folder": str(tmp_path / "labels")},
        "data": {
            "kind": "labelled", "folder": str(tmp_path / "labelled"),
            "inputs": [str(tmp_path / "texts.tsv")],
            "heldout_inputs": [str(tmp_path / "texts.tsv")],
        },
        "tokenizer": {"kind": "file",
            "path": str(tmp_path / "data" / "tokenizer" / "tokenizer.model")},
        "batch": {"sequence_length": 64, "tokens": 256},
        "train": settings["train"] | {"tokens": 60 * 256, "init_from": str(tmp_path / "masks")},
    }  # fmt: skip
    settings["model"] |= {
        "head": {"kind": "classification", "num_labels": 2},
        "tie_word_embeddings": False,
    }
    tuned = write_config(tmp_path / "labels.yaml", settings)
    run_forked("prepare", tuned)
    said = run_forked("train", tuned).stderr
    assert "newly initialised: classifier.bias, classifier.weight" in said
    assert "not used: head." in said
    assert json.loads(run_forked("evaluate", tuned, "--json").stdout)["accuracy"] > 0.9
    wrong = run_forked(
        "train", tuned, "model.head.num_labels=3", f"run.folder={tmp_path / 'x'}", check=False
    )
    assert "model.head.num_labels=3, and" in wrong.stderr
    assert "has 2 labels (False, True). Set model.head.num_labels=2" in wrong.stderr
    nowhere = run_forked(
        "train", tuned, "train.init_from=nowhere", f"run.folder={tmp_path / 'y'}", check=False
    )
    assert "train.init_from=nowhere: nowhere does not exist" in nowhere.stderr

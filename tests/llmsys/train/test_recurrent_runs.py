"""Runs of recurrent layers without attention learn: a language model, hidden tokens, labels of
texts, and another language.
"""

from pathlib import Path
from typing import Any

import pytest

from llmsys.doctor.toy_dataset import (
    VOCABULARY,
    build_toy_config,
    write_toy_dataset,
    write_toy_pairs,
)
from llmsys.train.build_trainer import train_run
from tests.helpers.step_losses import list_step_losses

LABELS = ("even", "odd")
# (sections of the model, other sections, share of the first loss that the last may have)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "language model": ({"family": "decoder"}, {"data": {"kind": "crawl"}}, 0.8),
    "hidden tokens": (
        {"family": "encoder", "head": {"kind": "mlm"}},
        {"data": {"kind": "crawl"}, "tokenizer": {"control_symbols": ["<mask>"]}},
        0.9,
    ),
    "labels": (
        {
            "family": "encoder",
            "head": {"kind": "classification", "num_labels": len(LABELS), "pooling": "mean"},
        },
        {"data": {"kind": "labelled"}},
        0.7,
    ),
    "translation": ({"family": "encoder_decoder"}, {"data": {"kind": "pairs"}}, 0.8),
}


def write_data(folder: Path, kind: str) -> None:
    if kind == "crawl":
        write_toy_dataset(folder, symbols=("<mask>",))
    else:
        # Few, so that labels that say nothing about a text are learnt by heart.
        write_toy_pairs(folder, labels=LABELS if kind == "labelled" else (), pairs=16)


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    model, sections, share = RUNS[name]
    kind = sections["data"]["kind"]
    write_data(tmp_path / "data", kind)
    lengths = {} if kind == "crawl" else {"sequences": None, "micro_sequences": 0, "tokens": 128}
    scope = {"attention_scope": "window"} if kind == "crawl" else {}
    config = build_toy_config(
        tmp_path,
        **sections,
        model={
            "vocab_size": VOCABULARY,
            "moe": None,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "position": {"kind": "none"},
            "rnn": {"kind": "lstm", "score": "none", "input_feeding": False},
        }
        | model,
        batch=scope | lengths,
        optimizer={"kind": "adamw", "learning_rate": 0.02, "weight_decay": 0.0},
        schedule={"kind": "constant", "warmup_tokens": 0},
        train={"reproducibility": "fast", "tokens": 30 * 256, "hang_timeout_seconds": 0},
        checkpoint={"every_steps": 0},
        evaluation={"every_steps": 0},
    )
    train_run(config, lambda *_: [])
    steps = list_step_losses(config.run.folder)
    assert steps[-1] < share * steps[0], steps

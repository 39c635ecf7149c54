"""A run on a mixture whose batch grows, killed on the way and continued on another number of
processes.

Runs the real commands; the one that is killed is a process of its own.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.events import read_events, read_latest_events
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.forked_commands import run_forked
from tests.helpers.paths import ROOT

MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sources = [
        {"folder": str(tmp_path / name), "weight": weight}
        for name, weight in (("large", 3), ("small", 1))
    ]
    make_dataset(tmp_path / "large", documents=120)
    make_dataset(tmp_path / "small", documents=20)
    settings = {
        "run": {"folder": str(tmp_path / "run")},
        "data": {"kind": "mixture", "sources": sources, "stages": [{"start_tokens": 1024,
            "weights": [1, 1]}]},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": MODEL,
        "batch": {
            "sequence_length": 32, "sequences": 16, "micro_sequences": 1, "assignment": "balanced",
            "ramp": {"start_tokens": 128, "ramp_tokens": 1500},
        },
        "optimizer": {"learning_rate": 0.01},
        "factors": {"weight_decay": [[0, 1], [3000, 0]]},
        "train": {
            "tokens": 3000, "log_every_steps": 1, "noise_scale_every_steps": 2, "precision": "fp32",
            "threads_per_process": 1,
        },
        "checkpoint": {"every_steps": 3},
    }  # fmt: skip
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_command(config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "llmsys.launch.main", "train", str(config), *words]


def train(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked("train", config, *words, check=False)


def read_steps(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in events if event["event"] == "step"}


@pytest.mark.distributed
def test_a_growing_mixture_killed_in_mid_ramp_goes_on_as_if_nothing_had_been(
    config: Path, tmp_path: Path
) -> None:
    calm = train(config, f"run.folder={tmp_path / 'calm'}")
    assert calm.returncode == 0, calm.stderr[-2000:]
    process = subprocess.Popen(
        run_command(config), cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    path, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (
        path.exists() and max(read_steps(read_events(path)), default=0) >= 4
    ):
        time.sleep(0.05)
    process.kill()
    process.wait()
    resumed = train(
        config, "launch.processes=2", "batch.micro_sequences=2", "batch.assignment=sequential"
    )
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    events = read_latest_events(path)
    found, wanted = (
        read_steps(events),
        read_steps(read_latest_events(tmp_path / "calm" / "events.jsonl")),
    )
    assert found.keys() == wanted.keys()
    sizes = [wanted[step]["batch_tokens"] for step in wanted]
    assert sizes[0] == 128 and sizes[-1] == 512 and sizes == sorted(sizes) and len(set(sizes)) == 4  # noqa: PT018
    for step, event in wanted.items():
        for name in ("tokens", "batch_tokens", "batch_digest", "epochs", "learning_rate"):
            assert found[step][name] == event[name], (step, name)
        assert found[step]["loss"] == pytest.approx(event["loss"], rel=1e-4)
    assert any("noise_scale_tokens" in event for event in wanted.values())
    start = next(event for event in events if event["event"] == "start")
    assert {name: one["padding_tokens_per_epoch"] for name,
        one in start["packing"]["sources"].items()} == {
        "large": 0, "small": 0
    }  # fmt: skip
    evaluation = [event for event in events if event["event"] == "evaluation"][-1]
    assert evaluation["evaluated_tokens"] == sum(
        one["evaluated_tokens"] for one in evaluation["sources"].values()
    )
    _check_other_dataset(config, tmp_path)


def _check_other_dataset(config: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "small")
    make_dataset(tmp_path / "small", documents=23)
    done = train(config)
    assert done.returncode == 2
    assert "data.1.documents was 20, now 23" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_source_of_another_tokenizer_is_refused_with_the_way_out(
    config: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "small")
    make_dataset(tmp_path / "small", documents=20, symbols=("<mask>",))
    done = train(config)
    assert done.returncode == 2
    assert "source small" in done.stderr
    assert f"tokenizer.kind=file tokenizer.path={tmp_path / 'large' / 'tokenizer'}" in done.stderr


def test_a_mixture_is_not_prepared(config: Path) -> None:
    words = [sys.executable, "-m", "llmsys.launch.main", "prepare", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 2
    assert "data.kind=mixture refers to prepared datasets" in done.stderr

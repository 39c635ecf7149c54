"""A disk that fills up while a run trains: one message, and the same command goes on afterwards."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import yaml

from llmsys.events import read_latest_events
from llmsys.launch.main import main
from tests.helpers.forked_commands import run_forked
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

# Less than a checkpoint needs, and more than the small files of a run.
FULL_BYTES = 60_000


def limit_files() -> None:
    """Let no file of this process grow beyond the limit: writes fail as those to a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))


def train_on_full_disk(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmsys.launch.train", str(config)], cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        preexec_fn=limit_files,
    )  # fmt: skip


def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    data = build_tiny_config(tmp_path / "data", make_crawl(tmp_path / "crawl", files=1)).data
    settings = {
        "run": {"folder": str(tmp_path / "run")},
        "data": data.model_dump(mode="json"),
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 400},
        "model": {
            "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
        },
        "batch": {"sequence_length": 32, "sequences": 2},
        "schedule": {"kind": "constant"},
        "train": {"tokens": 256},
        "checkpoint": {"every_steps": 2},
        "launch": {"processes": 1},
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert main(["prepare", str(config)]) == 0

    stopped = train_on_full_disk(config)
    assert stopped.returncode == 2, stopped.stderr
    assert "Traceback" not in stopped.stderr
    said = stopped.stderr.strip().splitlines()[-1]
    assert str(tmp_path / "run") in said
    assert "disk" in said or "too large" in said, said

    run_forked("train", config)
    steps = [event["step"] for event in read_latest_events(tmp_path / "run" / "events.jsonl")
             if event["event"] == "finish"]  # fmt: skip
    assert steps == [4]

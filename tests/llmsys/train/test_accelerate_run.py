"""A run under accelerate on two processes: started by its launcher, killed, and ended by another
engine.
"""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from llmsys.events import read_events, read_latest_events
from tests.helpers.command_line import read_final_loss
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.forked_commands import run_forked
from tests.helpers.paths import ROOT
from tests.helpers.paused_run import pause_run
from tests.helpers.process import PATIENCE_SECONDS

STEPS = 8


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = {
        "run": {"name": "toy", "folder": str(tmp_path / "run")},
        "data": {"folder": str(make_dataset(tmp_path / "data"))},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
        },
        "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2},
        "optimizer": {"learning_rate": 0.01},
        "train": {"tokens": STEPS * 8 * 32, "log_every_steps": 1, "precision": "fp32"},
        "engine": {"kind": "accelerate"},
        "launch": {"processes": 2},
        "checkpoint": {"every_steps": 2},
        "generation": {"prompts": ["the cat"], "max_new_tokens": 4},
    }  # fmt: skip
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.distributed
def test_accelerate_joins_its_ranks_and_hands_its_run_on(config: Path, tmp_path: Path) -> None:
    alone = ("engine.kind=torch", "launch.processes=1")
    run_forked("train", config, *alone, f"run.folder={tmp_path / 'calm'}")
    calm = [
        e["loss"]
        for e in read_latest_events(tmp_path / "calm" / "events.jsonl")
        if e["event"] == "evaluation"
    ]
    middle = pause_run(tmp_path / "middle", step=4)
    words = [sys.executable, "-m", "llmsys.launch.main", "train", str(config)]
    process = subprocess.Popen(
        words, cwd=ROOT, env=middle.environment, stderr=subprocess.PIPE, text=True
    )
    middle.wait(process)
    ranks = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "train.py" in " ".join(p.cmdline())
    ]
    max(ranks, key=lambda rank: rank.pid).send_signal(signal.SIGKILL)
    middle.go_on()
    message = process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert "was killed by signal 9" in message
    assert "Traceback" not in message
    assert "run the same command again to continue" in message
    run_forked("train", config, *alone)
    starts = [
        event
        for event in read_events(tmp_path / "run" / "events.jsonl")
        if event["event"] == "start"
    ]
    assert [(start["engine"], start["world_size"]) for start in starts] == [
        ("accelerate", 2),
        ("torch", 1),
    ]
    assert starts[1]["resumed_from"] == 2
    assert read_final_loss(config) == pytest.approx(calm[-1], rel=1e-5)


def test_several_processes_under_a_config_for_one_are_refused(config: Path, tmp_path: Path) -> None:
    said = tmp_path / "accelerate.yaml"
    said.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\n"
    )
    words = ["--config_file", str(said), "--num_processes", "2", "launch/train.py", str(config)]
    done = subprocess.run(
        [sys.executable, "-m", "llmsys.launch.launchers.accelerate", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert (
        "distributed_type: NO, which trains in one process, but launch.processes=2" in done.stderr
    )
    assert "Run `accelerate config` for several processes" in done.stderr

"""Bitwise mode as a person uses it: a run on two processes is killed and goes on in one, bit for
bit as a calm one.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.errors import CheckpointError
from llmsys.events import read_events, read_latest_events
from llmsys.parallel.process_group import init_process_group
from llmsys.train.build_trainer import train_run
from llmsys.train.run_checks import check_loaded_state
from llmsys.train.run_settings import drop_reproducibility_mode
from tests.helpers.bitwise_runs import CASES, build
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.paths import ROOT
from tests.helpers.paused_run import pause_run
from tests.helpers.process import PATIENCE_SECONDS

STEPS = 24
TOLD = ("step", "experts", "state_hash", "evaluation")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = {
        "run": {"folder": str(tmp_path / "killed")},
        "data": {"folder": str(make_dataset(tmp_path / "toy"))},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
            "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "num_shared_experts": 1},
        },
        "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2,
            "assignment": "balanced"},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup_tokens": 512},
        "train": {
            "tokens": STEPS * 8 * 32, "log_every_steps": 1, "reproducibility": "bitwise",
            "threads_per_process": 1
        },
        "checkpoint": {"every_steps": 4, "keep_last": STEPS},
        "evaluation": {"every_steps": 12},
    }  # fmt: skip
    path = tmp_path / "toy.yaml"
    path.write_text(json.dumps(settings))
    return path


def read_trajectory_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the trajectory without times and memory, which differ between runs."""
    events = [
        event for event in read_latest_events(folder / "events.jsonl") if event["event"] in TOLD
    ]
    own = ("second", "time", "memory", "utilisation")
    return [
        {key: value for key, value in event.items() if not any(word in key for word in own)}
        for event in events
    ]


@pytest.mark.distributed
def test_a_killed_run_goes_on_with_another_number_of_processes_and_the_same_bits(
    config: Path, tmp_path: Path
) -> None:
    train_run(load_run_config(str(config), [f"run.folder={tmp_path / 'calm'}"]), lambda *_: [])
    words = [
        sys.executable,
        "-m",
        "llmsys.launch.main",
        "train",
        str(config),
        "launch.processes=2",
        "layout.expert=2",
    ]
    middle = pause_run(tmp_path / "middle", step=8)
    process = subprocess.Popen(
        words, cwd=ROOT, env=middle.environment, stderr=subprocess.PIPE, text=True
    )
    middle.wait(process)
    ranks = [
        one
        for one in psutil.Process(process.pid).children(recursive=True)
        if "train.py" in " ".join(one.cmdline())
    ]
    ranks[-1].send_signal(signal.SIGKILL)
    middle.go_on()
    message = process.communicate(timeout=PATIENCE_SECONDS)[1]
    assert (
        "bitwise mode: the same weights and moments, bit for bit, on any power of two of processes"
        in message
    )
    assert "divides the 4 micro-batches of a step" in message
    train_run(load_run_config(str(config), []), lambda *_: [])
    starts = [
        event
        for event in read_events(tmp_path / "killed" / "events.jsonl")
        if event["event"] == "start"
    ]
    assert [(start["world_size"], start["reproducibility"]) for start in starts] == [
        (2, "bitwise"),
        (1, "bitwise"),
    ]
    assert starts[1]["resumed_from"] == 4
    assert read_trajectory_events(tmp_path / "killed") == read_trajectory_events(tmp_path / "calm")
    checkpoints = [
        tmp_path / run / "checkpoints" / f"step-{STEPS:08d}" for run in ("killed", "calm")
    ]
    records = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints]
    assert (
        records[0]["state_hash"]
        == records[1]["state_hash"]
        == read_trajectory_events(tmp_path / "calm")[-2]["state_hash"]
    )


RELATIVE = {
    "moe": None,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "position": {"kind": "transformer_xl"},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer-xl": RELATIVE
    | {"attention": {"kind": "segment_memory", "segment_length": 8, "memory_length": 12}},
    "xlnet": RELATIVE | {"family": "encoder", "head": {"kind": "permutation"}},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_that_lost_its_last_steps_repeats_them_bit_for_bit(
    config: Path, tmp_path: Path, name: str
) -> None:
    """Memories begin empty with every row, and permutations follow from the window, so neither
    has a state to save.
    """
    settings = json.loads(config.read_text())
    settings["model"] |= ARCHITECTURES[name]
    settings["train"] |= {"tokens": 6 * 8 * 32}
    settings["checkpoint"] |= {"every_steps": 2}
    settings["evaluation"] |= {"every_steps": 3}
    config.write_text(json.dumps(settings))
    train_run(load_run_config(str(config), [f"run.folder={tmp_path / 'calm'}"]), lambda *_: [])
    shutil.copytree(tmp_path / "calm", tmp_path / "killed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / f"step-{step:08d}")
    train_run(load_run_config(str(config), []), lambda *_: [])
    starts = [
        event
        for event in read_events(tmp_path / "killed" / "events.jsonl")
        if event["event"] == "start"
    ]
    assert [start["resumed_from"] for start in starts] == [None, 2]
    assert read_trajectory_events(tmp_path / "killed") == read_trajectory_events(tmp_path / "calm")


def test_a_state_that_loads_with_other_bits_is_refused() -> None:
    with init_process_group():
        engine = build(next(iter(CASES.values())))
        check_loaded_state(engine, Path("step-00000004"), {})
        with pytest.raises(
            CheckpointError,
            match=r"was saved with state 00ff and loads as [0-9a-f]{32}. Its files are",
        ):
            check_loaded_state(engine, Path("step-00000004"), {"state_hash": "00ff"})


def test_a_run_may_change_its_mode_but_not_what_bits_depend_on() -> None:
    fast, one, two = (
        {"seed": 0},
        {"seed": 0, "bitwise": {"threads": 1}},
        {"seed": 0, "bitwise": {"threads": 2}},
    )
    assert drop_reproducibility_mode(one, fast) == (fast, fast)
    assert drop_reproducibility_mode(fast, two) == (fast, fast)
    assert drop_reproducibility_mode(one, two) == (one, two)
    assert torch.get_num_threads() == 1

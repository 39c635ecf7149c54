"""The whole run on a small dataset: train, kill, resume, finish, evaluate, generate, as a person
would start them.

Runs the real commands, in processes of their own where it matters how these start or end.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from llmsys.config.loading.load import load_run_config
from llmsys.events import read_events, read_latest_events
from llmsys.launch.train import HUNG, LOST_PEER, STOPPED
from tests.helpers.command_line import read_final_loss, run_llmsys
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.device_profile import write_abacus
from tests.helpers.forked_commands import run_forked
from tests.helpers.paths import ROOT
from tests.helpers.paused_run import pause_run
from tests.helpers.process import PATIENCE_SECONDS, wait_until

STEPS = 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture
def config(tmp_path: Path, dataset: Path) -> Path:
    settings = {
        "run": {"name": "toy", "folder": str(tmp_path / "run")},
        "data": {"folder": str(dataset)},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
            "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "num_shared_experts": 1},
        },
        "batch": {"sequence_length": 32, "sequences": 8},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup_tokens": 512},
        "train": {"tokens": STEPS * 8 * 32, "log_every_steps": 1},
        "layout": {"expert": 2},
        "launch": {"processes": 2},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "evaluation": {"every_steps": 2},  # an evaluation right before a save
        "generation": {"prompts": ["the cat"], "max_new_tokens": 8},
    }  # fmt: skip
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        '{"good": "the cat", "bad": "cat the cat"}\n{"good": "the dog runs", "bad": "xq zy xq zy '
        'xq"}\n'
    )
    settings["evaluation"]["tasks"] = [{"kind": "pairs", "path": str(pairs)}]
    settings["flops"] = {"device": str(write_abacus(tmp_path / "abacus.yaml"))}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.timeout(900)  # four starts of two processes, on a machine that may have other work
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_killed_run_ends_with_the_loss_of_an_undisturbed_one(
    config: Path, tmp_path: Path, engine: str
) -> None:
    choices = (
        f"engine.kind={engine}",
        f"checkpoint.mode={'async' if engine == 'torch' else 'sync'}",
    )
    run_forked("train", config, *choices, f"run.folder={tmp_path / 'calm'}")
    calm = [
        event
        for event in read_latest_events(tmp_path / "calm" / "events.jsonl")
        if event["event"] == "evaluation"
    ]
    for step, victim in ((4, "rank" if engine == "torch" else "launcher"), (6, "stopped")):
        middle = pause_run(tmp_path / victim, step)
        process = subprocess.Popen(
            [sys.executable, "-m", "llmsys.launch.main", "train", str(config), *choices],
            cwd=ROOT, env=middle.environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        middle.wait(process)
        ranks = [
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if "train.py" in " ".join(p.cmdline())
        ]
        # which DeepSpeed's launcher would die of
        asks = signal.SIGTERM if engine == "torch" else signal.SIGHUP
        sent = asks if victim == "stopped" else signal.SIGKILL
        (max(ranks, key=lambda rank: rank.pid) if victim == "rank" else process).send_signal(sent)
        if victim == "launcher":  # its ranks end where they stand, some time after
            psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)
        if victim == "stopped":
            wait_until(lambda at=middle, number=sent: at.heard(number), "the rank heard nothing")
        middle.go_on()
        message = process.communicate(timeout=PATIENCE_SECONDS)[1]
        if victim == "rank":
            assert "run the same command again to continue" in message
            assert process.returncode == LOST_PEER
            assert message.count("error:") == 1
            assert "frame #" not in message
        if victim == "stopped":
            assert process.returncode == STOPPED
            assert re.search(
                rf"llmsys: stopped: {sent.name} came: saved after step \d+ of 12 into", message
            )
        psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)
        assert not any(
            rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks
        )
    run_forked("train", config, *choices)
    assert read_final_loss(config) == calm[-1]["loss"]
    events = read_events(tmp_path / "run" / "events.jsonl")
    starts = [event["resumed_from"] for event in events if event["event"] == "start"]
    assert starts[:2] == [None, 2]
    assert starts[2:] == [event["step"] for event in events if event["event"] == "stopped"]
    # a save in the background lets the run go on as far as to the next; one step more hears
    assert 6 <= starts[2] <= 9


def test_a_hang_ends_with_its_status_and_one_message(config: Path, tmp_path: Path) -> None:
    middle = pause_run(tmp_path / "middle", 4)
    process = subprocess.Popen(
        [sys.executable, "-m", "llmsys.launch.main", "train", str(config),
            "train.hang_timeout_seconds=3"],
        cwd=ROOT, env=middle.environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    message = process.communicate(timeout=PATIENCE_SECONDS)[1]  # it never goes on
    assert process.returncode == HUNG, message
    assert message.count("error:") == 1
    assert "no step has finished for 3 s (train.hang_timeout_seconds), in" in message
    assert "frame #" not in message


def test_a_finished_run_is_left_alone_and_can_be_used(config: Path) -> None:
    run_forked("train", config, "train.profile.steps=[3]")
    before = (config.parent / "run" / "events.jsonl").read_bytes()
    assert "is finished" in run_forked("train", config).stdout
    assert (config.parent / "run" / "events.jsonl").read_bytes() == before
    evaluated = json.loads(run_llmsys("evaluate", config, "--json").stdout)
    assert evaluated["loss"] == pytest.approx(read_final_loss(config), abs=2e-3)
    assert evaluated["gzip_bits_per_byte"] > 0
    events = read_latest_events(config.parent / "run" / "events.jsonl")
    last = [event for event in events if event["event"] == "evaluation"][-1]
    assert evaluated["sets"] == last["sets"]
    assert evaluated["sets"]["pairs"]["accuracy"] == 1.0
    assert all(0 < event["utilisation"] < 1 for event in events if event["event"] == "step")
    reconciled = json.loads(run_llmsys("reconcile", config.parent / "run", "--json").stdout)[
        "runs"
    ][0]
    assert (reconciled["device"], reconciled["ranks"]) == ("abacus", 2)
    assert reconciled["parameters"]["predicted"] == reconciled["parameters"]["built"]
    assert reconciled["step_seconds"]["residual"] > -1
    samples = json.loads(run_llmsys("generate", config, "--json", "--prompt", "the dog").stdout)
    assert samples[0]["prompt"] == "the dog"
    # The folder is enough: its tokenizer is a copy of the dataset's.
    dataset = load_run_config(str(config)).data.folder
    dataset.rename(dataset.with_name("away"))
    alone = run_forked("generate", config.parent / "run", "--json", "--prompt", "the dog").stdout
    dataset.with_name("away").rename(dataset)
    assert json.loads(alone) == samples
    damaged = sorted((config.parent / "run" / "checkpoints").glob("*/__0_0.distcp"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"X")
    repaired = run_forked("train", config)
    assert f"skipping checkpoint {damaged.parent}: __0_0.distcp is damaged" in repaired.stderr
    assert (
        read_final_loss(config)
        == [e["loss"] for e in map(json.loads, before.splitlines()) if e["event"] == "evaluation"][
            -1
        ]
    )
    [profile] = [event for event in events if event["event"] == "profile"]
    assert (profile["step"], (config.parent / "run" / profile["trace"]).is_file()) == (3, True)
    assert profile["shares"]["matmul"] > 0
    environment = json.loads((config.parent / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["world_size"] == 2
    assert environment["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    traces = config.parent / "run" / "heartbeats" / "collectives-rank-"
    assert environment["variables"]["TORCH_FR_DUMP_TEMP_FILE"] == str(traces)
    assert set(environment["affinity"]) <= os.sched_getaffinity(0)
    assert environment["matmuls"] == {
        "float32_matmul_precision": "highest",
        "bf16_reduced_precision_sums": False,
        "fp16_reduced_precision_sums": False,
    }


def test_another_config_in_the_same_folder_is_refused_with_the_difference(config: Path) -> None:
    alone = ("launch.processes=1", "layout.expert=1")
    run_forked("train", config, "train.tokens=512", *alone)
    for change in ("train.tokens=1024", "optimizer.learning_rate=0.02"):
        done = run_forked("train", config, "train.tokens=512", *alone, change, check=False)
        assert done.returncode == 2
        assert re.search(
            rf"{change.split('=')[0]} was [\d.]+, now {change.split('=')[1]}", done.stderr
        )
        assert "Traceback" not in done.stderr
    assert (
        "is finished"
        in run_forked("train", config, "train.tokens=512", *alone, "train.log_every_steps=5").stdout
    )


def test_a_missing_tokenizer_says_how_to_make_one(config: Path, tmp_path: Path) -> None:
    done = run_forked("train", config, "tokenizer={kind: file, path: nowhere.model}", check=False)
    assert done.returncode == 2
    assert "nowhere.model" in done.stderr
    assert done.stderr.count("llmsys: error") == 1
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(config: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = run_llmsys("train", config, f"launch.port={port}", check=False)
    assert done.returncode == 2
    assert f"launch.port={port} is in use" in done.stderr
    assert "launch.port=0" in done.stderr

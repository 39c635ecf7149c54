"""Printed commands run as printed, a launch folder makes its run again, and only what was lost is started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.train import STOPPED
from llmsys.log import latest_events
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.process import wait_until
from tests.train.test_run import ROOT, llmsys

SETTINGS = {
    "tokenizer": {"vocab_size": VOCABULARY},
    "model": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    },
    "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2},
    "optimizer": {"learning_rate": 0.01},
    "train": {"tokens": 3 * 8 * 32, "log_every_steps": 1, "precision": "fp32"},
}  # fmt: skip
COUNTED = """
import os, pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
sys.exit(int(sys.argv[2]) if len(starts.read_text()) == 1 else 0)
"""

PATIENT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(75)))
pathlib.Path(sys.argv[1]).write_text(os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
time.sleep(200)
"""
KEPT = ("-m", "launch.restart", "--meet=127.0.0.1:0", "--restarts=2", "--patience=200", sys.executable)
ONE = ("-m", "launch.torchrun", "--nnodes=1:1", "--nproc-per-node=1", "--rdzv-backend=c10d")


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in latest_events(folder / "events.jsonl") if event["event"] == "evaluation"]


@pytest.mark.timeout(900)
@pytest.mark.distributed
def test_printed_commands_run_as_printed_and_the_launch_folder_makes_the_run_again(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data")
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump(SETTINGS | {"run": {"folder": str(tmp_path / "first")}, "data": {"folder": str(data)}})
    )
    printed = llmsys("launch", tmp_path / "toy.yaml", "nodes=127.0.0.1:2", "--print").stdout
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["bash", "-c", printed], check=True, cwd=tmp_path, env=environment, capture_output=True, timeout=400)
    kept = tmp_path / "first" / "launch" / "config.yaml"
    again = (f"run.folder={tmp_path / 'again'}", "engine.kind=deepspeed", "nodes=127.0.0.1:2")
    llmsys("launch", kept, *again)
    [first], [second] = losses(tmp_path / "first"), losses(tmp_path / "again")
    assert second == pytest.approx(first, abs=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("status", "starts", "ending"), [(3, "xx", 0), (STOPPED, "x", STOPPED)], ids=["lost", "stopped"]
)
def test_a_lost_rank_is_started_again_and_a_stopped_one_is_not(
    tmp_path: Path, status: int, starts: str, ending: int
) -> None:
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    words = [*KEPT, *ONE, "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1"]
    words += [str(script), str(tmp_path / "starts"), str(status)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, timeout=240, check=False)
    assert (tmp_path / "starts").read_text() == starts
    assert done.returncode == ending


@pytest.mark.distributed
def test_torchrun_that_is_asked_to_stop_waits_for_its_ranks_to_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PATIENT)
    words = [*KEPT, *ONE, "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1"]
    process = subprocess.Popen([sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path / "ready")], cwd=ROOT)
    wait_until((tmp_path / "ready").exists, "the rank did not start")
    process.terminate()
    assert process.wait(100) == STOPPED
    assert "SIGTERM" not in (tmp_path / "ready").read_text()  # torch would end the ranks after half a minute

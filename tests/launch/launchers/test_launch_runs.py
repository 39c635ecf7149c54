"""Printed commands run as printed, a launch folder makes its run again, and only what was lost
is started again.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmsys.launch.train import STOPPED
from llmsys.train.checkpoint_record import read_record
from tests.helpers.dataset import VOCABULARY, make_dataset
from tests.helpers.paths import ROOT
from tests.helpers.process import PATIENCE_SECONDS, wait_until

SETTINGS = {
    "tokenizer": {"vocab_size": VOCABULARY},
    "model": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    },
    "batch": {"sequence_length": 32, "sequences": 8, "micro_sequences": 2},
    "optimizer": {"learning_rate": 0.01},
    "train": {"tokens": 3 * 8 * 32, "precision": "fp32", "reproducibility": "bitwise",
        "threads_per_process": 1},
}  # fmt: skip
LAUNCH = [sys.executable, "-m", "llmsys.launch.main", "launch"]
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
KEPT = (
    "-m",
    "llmsys.launch.launchers.restart_agent",
    "--meet=127.0.0.1:0",
    "--restarts=2",
    "--patience=200",
    sys.executable,
)
ONE = (
    "-m",
    "llmsys.launch.launchers.torchrun",
    "--nnodes=1:1",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
)


@pytest.mark.timeout(900)
@pytest.mark.distributed
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a checkout of git")
def test_printed_commands_run_as_printed_and_the_run_folder_alone_makes_the_run_again(
    tmp_path: Path,
) -> None:
    """What code, settings and environment made a run is in its folder: from there the same bits
    come again.
    """
    data = make_dataset(tmp_path / "data")
    toy = tmp_path / "toy.yaml"
    toy.write_text(
        yaml.safe_dump(
            SETTINGS | {"run": {"folder": str(tmp_path / "first")}, "data": {"folder": str(data)}}
        )
    )
    one = checkout(tmp_path / "one", ROOT)
    (one / "llmsys" / "new.py").write_text(
        # in one write: what two processes print in pieces mixes
        "import os\nos.write(2, f\"by {os.environ['NCCL_X']}\\n\".encode())\n"
    )
    # neither is committed
    with (one / "llmsys" / "train" / "build_trainer.py").open("a") as opened:
        opened.write("\nimport llmsys.new\n")
    printed = run_in(
        one, [*LAUNCH, str(toy), "nodes=127.0.0.1:2", "--print"], NCCL_X="salt", HF_TOKEN="hush"
    ).stdout
    assert run_in(tmp_path, ["bash", "-c", printed]).stderr.count("by salt") == 2
    first = tmp_path / "first"
    shutil.move(one, tmp_path / "away")

    kit = first / "launch"
    two = checkout(tmp_path / "two", ROOT, json.loads((kit / "code.json").read_text())["commit"])
    again = f". {kit}/environment.sh && export PYTHONPATH=$PWD && git apply {kit}/code.diff && exec"
    words = (str(kit / "config.yaml"), f"run.folder={tmp_path / 'second'}", "nodes=127.0.0.1:2")
    assert (
        run_in(two, ["bash", "-c", f"{again} {shlex.join([*LAUNCH, *words])}"]).stderr.count(
            "by salt"
        )
        == 2
    )
    assert state(tmp_path / "second") == state(first)
    assert not any(b"hush" in path.read_bytes() for path in first.rglob("*") if path.is_file())


def state(run: Path) -> str:
    """The digest of what a run has come to."""
    return str(read_record(max((run / "checkpoints").glob("step-*")))["state_hash"])


def checkout(folder: Path, origin: Path, commit: str = "HEAD") -> Path:
    subprocess.run(
        ["git", "clone", "-q", "--shared", "--no-checkout", str(origin), str(folder)], check=True
    )
    subprocess.run(["git", "-C", str(folder), "checkout", "-q", "--detach", commit], check=True)
    return folder


def run_in(folder: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder, without what would lead to this checkout's code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("status", "starts", "ending"), [(3, "xx", 0), (STOPPED, "x", STOPPED)], ids=["lost", "stopped"]
)
def test_a_lost_rank_is_started_again_and_a_stopped_one_is_not(
    tmp_path: Path, status: int, starts: str, ending: int
) -> None:
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    words = [
        *KEPT,
        *ONE,
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]
    words += [str(script), str(tmp_path / "starts"), str(status)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, timeout=240, check=False)
    assert (tmp_path / "starts").read_text() == starts
    assert done.returncode == ending


@pytest.mark.distributed
def test_torchrun_that_is_asked_to_stop_waits_for_its_ranks_to_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PATIENT)
    words = [
        *KEPT,
        *ONE,
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
    ]
    process = subprocess.Popen(
        [sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path / "ready")], cwd=ROOT
    )
    wait_until((tmp_path / "ready").exists, "the rank did not start")
    process.terminate()
    assert process.wait(PATIENCE_SECONDS) == STOPPED
    # torch would end the ranks after half a minute
    assert "SIGTERM" not in (tmp_path / "ready").read_text()

"""A run whose first host is killed ends on the others with its name and the next step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.run import parse_args

from llmsys.launch.launchers import torchrun
from llmsys.launch.launchers.restart_agent import Rendezvous
from llmsys.launch.train import LOST_PEER, UNMET
from llmsys.parallel.port import find_free_port
from tests.helpers.paths import ROOT
from tests.helpers.process import PATIENCE_SECONDS, wait_until

# A rank without torch: what is tested are the agents, which meet and watch each other.
RANK = """
import os, pathlib, sys, time
agent = os.getppid()
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while os.getppid() == agent:
    time.sleep(0.1)
"""


def start_host(number: int, port: int, script: Path, log: Path) -> "subprocess.Popen[bytes]":
    words = [
        "--nnodes=2:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=run",
        f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(number == 1)}",
        f"--local-addr=127.0.0.{number}", "--monitor-interval=0.1",
    ]  # fmt: skip
    module = [sys.executable, "-m", "llmsys.launch.launchers.torchrun"]
    with log.open("wb") as written:
        return subprocess.Popen(
            [*module, *words, str(script), str(script.parent)],
            cwd=ROOT, start_new_session=True, stdout=written, stderr=written,
        )  # fmt: skip


@pytest.mark.distributed
def test_the_other_host_names_the_first_one_when_that_was_killed(tmp_path: Path) -> None:
    script, port = tmp_path / "rank.py", find_free_port()
    script.write_text(RANK)
    first, other = (
        start_host(number, port, script, tmp_path / f"{number}.log") for number in (1, 2)
    )
    try:
        wait_until(
            lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "no rank started"
        )
        os.killpg(first.pid, signal.SIGKILL)
        assert other.wait(PATIENCE_SECONDS) == UNMET
    finally:
        for process in (first, other):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "2.log").read_text()
    assert said.strip() == (
        f"error: 127.0.0.1, the first host of the run, does not answer at 127.0.0.1:{port}. "
        "Checkpoints are intact: bring it back, or leave it out of nodes=; the same command then "
        "continues from the newest one."
    )


@pytest.mark.parametrize("answers", [False, True], ids=["gone", "there"])
def test_a_rank_that_lost_its_peer_is_no_message_where_the_first_host_is_gone(
    answers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Rendezvous, "is_open", lambda self: answers)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=LOST_PEER, error_file="none")
    failure.message = "rank 1 lost contact"
    first = Rendezvous("10.9.8.1", 29500)
    assert torchrun._report_first_failure([(1, failure)], first) == LOST_PEER
    assert ("rank 1 lost contact" in caplog.text) is answers
    assert ("10.9.8.1, the first host of the run, does not answer" in caplog.text) is not answers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rdzv-endpoint=10.9.8.1:29500"], Rendezvous("10.9.8.1", 29500)),
        (["--rdzv-endpoint=127.0.0.1:29500"], None),
        (
            ["--rdzv-endpoint=127.0.0.1:29500", "--rdzv-conf=is_host=0"],
            Rendezvous("127.0.0.1", 29500),
        ),
        (["--rdzv-endpoint=10.9.8.1:29500", "--rdzv-conf=is_host=true"], None),
        (["--standalone"], None),
        ([], None),
    ],
)
def test_only_another_host_can_be_the_lost_first_one(
    words: list[str], expected: Rendezvous | None
) -> None:
    options = parse_args([*words, "train.py"])
    assert torchrun.find_first_host(options) == expected

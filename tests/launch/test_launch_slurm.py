"""The job that `llmsys launch` submits, under Slurm itself: before the time limit it saves and is queued again."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from llmsys.doctor.toy_data import make_toy_data, toy_config
from llmsys.log import latest_events
from tests.helpers.process import wait_until
from tests.helpers.real_slurm import real_slurm, why_not
from tests.train.test_run import ROOT


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_job_that_nears_its_time_limit_saves_and_is_queued_again(tmp_path: Path) -> None:
    make_toy_data(tmp_path / "data")
    folder = tmp_path / "run"
    config = toy_config(
        tmp_path, run={"folder": str(folder)}, train={"tokens": 10**8}, checkpoint={"every_steps": 10**5}
    )
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with real_slurm(tmp_path / "slurm") as found:

        def said(*words: str) -> str:
            done = subprocess.run(words, env=os.environ | found, cwd=ROOT, capture_output=True, text=True, check=True)
            return done.stdout

        def happened(kind: str) -> Callable[[], bool]:
            path = folder / "events.jsonl"
            return lambda: path.exists() and any(event["event"] == kind for event in latest_events(path))

        llmsys = [sys.executable, "-m", "launch.main", "launch", str(tmp_path / "toy.yaml")]
        assert "Submitted batch job 1" in said(*llmsys, "nodes=1", "launch.processes=1", "--gpus", "0")
        wait_until(happened("step"), "no step was made")
        said("scancel", "--batch", "--signal=USR1", "1")  # what --signal=B:USR1@300 does
        wait_until(happened("stopped"), "the run did not stop")
        wait_until(lambda: "Restarts=1" in said("scontrol", "show", "job", "1"), "the job was not queued again")
        said("scancel", "1")
    assert list((folder / "checkpoints").glob("step-*"))

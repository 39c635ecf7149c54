"""`llmsys launch` on two real hosts: over ssh by torchrun, which outlives a host, and over pdsh by DeepSpeed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.doctor.toy_data import make_toy_data, toy_config
from tests.helpers.hosts import Hosts, real_hosts, why_not
from tests.helpers.process import wait_until
from tests.train.test_run import llmsys

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    make_toy_data(folder / "data")
    with real_hosts(folder, ["alpha", "beta"]) as made:
        yield made


def config_file(hosts: Hosts, name: str, **changes: dict[str, Any]) -> Path:
    config = toy_config(hosts.folder, run={"folder": str(hosts.folder / name)}, **changes)
    path = hosts.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def events(hosts: Hosts, name: str, kind: str) -> list[dict[str, Any]]:
    path = hosts.folder / name / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.skipif(not Path("/usr/bin/pdsh").exists(), reason="apt-get install pdsh is wanted")
def test_deepspeed_reaches_both_hosts_by_pdsh_with_their_environment(hosts: Hosts) -> None:
    path = config_file(hosts, "zero", engine={"kind": "deepspeed"}, train={"reproducibility": "fast"})
    done = hosts.run("alpha", sys.executable, "-m", "launch.main", "launch", str(path), "nodes=alpha:1,beta:1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [start["world_size"] for start in events(hosts, "zero", "start")] == [2]
    assert len(events(hosts, "zero", "finish")) == 1


def test_a_lost_host_leads_to_the_same_bits_on_what_is_left(hosts: Hosts) -> None:
    path = config_file(hosts, "lost", train={"tokens": 24 * 256})
    words = ["-m", "launch.main", "launch", str(path), "nodes=alpha:1,beta:1", "--least", "1"]
    process = hosts.start("alpha", sys.executable, *words, log=hosts.folder / "log")
    wait_until(lambda: bool(events(hosts, "lost", "checkpoint")), "nothing was saved")
    listed = subprocess.run(["ip", "netns", "pids", f"{hosts.prefix}beta"], capture_output=True, text=True, check=True)
    for pid in map(int, listed.stdout.split()):
        if pid != hosts.daemons["beta"].pid:
            os.kill(pid, signal.SIGKILL)
    assert process.wait(400) == 0
    assert "the run ended on what was left; lost: beta" in (hosts.folder / "log").read_text()
    assert [start["world_size"] for start in events(hosts, "lost", "start")] == [2, 1]
    llmsys("train", path, f"run.folder={hosts.folder / 'calm'}", "launch.processes=1")
    assert events(hosts, "lost", "evaluation")[-1]["loss"] == events(hosts, "calm", "evaluation")[-1]["loss"]

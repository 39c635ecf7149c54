"""Laws that hold on real, separate hosts with real ssh: what is wrong is named, and a run goes on after a cut cable."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.doctor.toy_data import LENGTH, SEQUENCES, make_toy_data, toy_config
from llmsys.log import latest_events
from llmsys.train.checkpoint_record import read_record
from tests.helpers.hosts import ROOT, Hosts, real_hosts, why_not
from tests.helpers.process import wait_until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]

TRAIN = ROOT / "launch" / "train.py"
NO_EVALUATION = {"every_steps": 0}
# A host with another version of llmsys and a folder of its own where the others share one.
ODD = "mount --bind {folder}/other_init.py {root}/llmsys/__init__.py\nmount -t tmpfs tmpfs {folder}/shared"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts on which all is well, one where much is wrong, and one that refuses ssh."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "shared").mkdir()
    make_toy_data(folder / "data")
    train = {"tokens": 24 * SEQUENCES * LENGTH, "hang_timeout_seconds": 15}
    config = toy_config(folder, run={"folder": str(folder / "shared" / "run")}, train=train, evaluation=NO_EVALUATION)
    (folder / "toy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "other_init.py").write_text((ROOT / "llmsys" / "__init__.py").read_text() + '__version__ = "0.0.7"\n')
    before = {"odd": ODD.format(folder=folder, root=ROOT)}
    with real_hosts(folder, ["alpha", "beta", "odd", "closed"], before) as made:
        date = folder / "bin" / "odd" / "date"
        date.write_text('#!/bin/sh\nexec /bin/date -d "90 seconds" "$@"\n')
        date.chmod(0o755)
        made.stop_sshd("closed")
        yield made


def preflight(hosts: Hosts, nodes: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    words = ["-m", "launch.main", "preflight", str(hosts.folder / "toy.yaml"), f"nodes={nodes}", "--json"]
    words += ["--patience", "120"]  # a test machine may have other work
    done = hosts.run("alpha", sys.executable, *words)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["findings"]
    return done.returncode, {(one["host"], one["check"]): one for one in found}


def test_hosts_on_which_all_is_well_are_found_so(hosts: Hosts) -> None:
    status, found = preflight(hosts, "alpha:1,beta:1")
    assert not [one for one in found.values() if one["fails"]]
    assert status == 0
    assert "alpha is 10.77.0.1" in found["beta", "address"]["finding"]
    assert "sees what 2 hosts wrote" in found["alpha", "shared"]["finding"]
    for host in ("alpha", "beta"):
        assert "over eth0 (gloo)" in found[host, "exchange"]["finding"]
        assert "all-reduce" in found[host, "exchange"]["finding"]
    assert not list((hosts.folder / "shared").iterdir())


def test_what_is_wrong_is_told_by_host_with_its_remedy(hosts: Hosts) -> None:
    status, found = preflight(hosts, "alpha:1,odd:1,closed:1")
    assert status == 1
    wanted = {
        ("closed", "reach"): ("Connection refused", "Start sshd there"),
        ("closed", "exchange"): ("no exchange was tried, because closed", "Mend what stands above"),
        ("odd", "clock"): ("s ahead of this host; 2 s is the most", "Set it by a time service"),
        ("odd", "versions"): ("llmsys is 0.0.7, elsewhere 0.1.0", "Install llmsys 0.1.0 there"),
        ("odd", "code"): ("files of code differ: digest", "Bring it to the same commit there"),
        ("odd", "shared"): ("does not see in {run} what alpha wrote there", "Mount one shared folder"),
        ("alpha", "shared"): ("does not see in {run} what odd wrote there", "set run.folder to a path in it"),
        ("all", "batch"): ("", ""),
    }
    for place, (finding, remedy) in wanted.items():
        assert finding.format(run=hosts.folder / "shared" / "run") in found[place]["finding"]
        assert remedy in found[place]["remedy"]
    failed = {place for place, one in found.items() if one["fails"]}
    assert wanted.keys() >= failed - {("alpha", "dry batch"), ("odd", "dry batch")}


def test_a_cable_that_is_cut_and_mended_costs_nothing_but_time(hosts: Hosts, tmp_path: Path) -> None:
    """FSDP2 with experts over two hosts: the hang is named, both agents start again, and every bit is as in peace."""
    toy, run = str(hosts.folder / "toy.yaml"), hosts.folder / "shared" / "run"
    words = [sys.executable, "-m", "launch.torchrun", "--nnodes=2:2", "--nproc-per-node=1", "--max-restarts=5"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=toy", "--rdzv-endpoint=alpha:29517", str(TRAIN), toy, "layout.expert=2"]
    logs = {name: tmp_path / name for name in ("alpha", "beta")}
    started = [hosts.start(name, *words, log=log) for name, log in logs.items()]

    def said() -> str:
        return "".join(log.read_text() for log in logs.values())

    wait_until(lambda: steps_done(run) >= 3 or any(one.poll() is not None for one in started), "no step was made")
    hosts.cut("beta")
    wait_until(lambda: "no step was finished for 15 s" in said(), "nobody noticed")
    hosts.mend("beta")
    assert [one.wait(180) for one in started] == [0, 0], said()
    assert "resuming from" in said()

    calm = subprocess.run([sys.executable, str(TRAIN), toy, f"run.folder={tmp_path / 'calm'}"], capture_output=True)
    assert calm.returncode == 0, calm.stderr
    last = "checkpoints/step-00000024"
    assert read_record(run / last)["state_hash"] == read_record(tmp_path / "calm" / last)["state_hash"]


def steps_done(run: Path) -> int:
    """The last step in a run's events; 0 before there is one."""
    events = latest_events(run / "events.jsonl") if (run / "events.jsonl").exists() else []
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh not installed")
def test_deepspeed_reaches_its_hosts_by_pdsh_under_zero_2_and_3(hosts: Hosts) -> None:
    """`llmsys launch` as a person types it on the first host: one command, and what the ranks need travels along."""
    losses = []
    for stage in (2, 3):
        run = hosts.folder / "shared" / f"zero-{stage}"
        words = ["nodes=alpha:1,beta:1", f"run.folder={run}", "engine.kind=deepspeed", f"engine.zero_stage={stage}"]
        words += [
            "train.reproducibility=fast",
            f"train.tokens={4 * SEQUENCES * LENGTH}",
            f"launch.port={29520 + stage}",
        ]
        toy = str(hosts.folder / "toy.yaml")
        done = hosts.run("alpha", sys.executable, "-m", "launch.main", "launch", toy, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        events = latest_events(run / "events.jsonl")
        assert [one["world_size"] for one in events if one["event"] == "start"] == [2]
        losses.append([one["loss"] for one in events if one["event"] == "step"])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

"""Slurm's own daemons run the jobs of `llmsys launch` on real hosts, which lose nodes, near their
time limit and are
cancelled: nothing is lost, and every bit is that of an undisturbed run in one process."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmsys.doctor.toy_dataset import LENGTH, SEQUENCES, build_toy_config, write_toy_dataset
from llmsys.events import read_events, read_latest_events
from tests.helpers import hosts as hosts_of
from tests.helpers import process, real_slurm
from tests.helpers.forked_commands import run_forked
from tests.helpers.hosts import Hosts, real_hosts
from tests.helpers.paused_run import pause_run
from tests.helpers.real_slurm import LOOK, Slurm, start_slurm

WHY_NOT = hosts_of.find_missing_requirement() or real_slurm.find_missing_requirement()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(WHY_NOT), reason=f"no Slurm on several hosts can be made here: {WHY_NOT}"
    ),
]

NODES = [f"n{number}" for number in range(1, 8)]
wait_until = partial(process.wait_until, patience_seconds=500)
"""Three jobs start at once, each with two torchruns and two ranks: that takes minutes where
others work too.
"""
STEPS, ENDLESS = 48, 10**5


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("slurm")
    write_toy_dataset(folder / "data")
    with real_hosts(folder, ["head", *NODES]) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    with start_slurm(hosts, hosts.folder / "daemons") as made:
        yield made


def toy(folder: Path, name: str, steps: int) -> Path:
    """A config of so many steps that trains into `folder / name`."""
    train = {"tokens": steps * SEQUENCES * LENGTH, "hang_timeout_seconds": 120}
    config = build_toy_config(
        folder, run={"folder": str(folder / name)}, train=train, evaluation={"every_steps": 0}
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@dataclass
class Job:
    """A job of two nodes with one rank on each, and its run folder."""

    slurm: Slurm
    run: Path
    number: str

    def shows(self, field: str) -> str:
        """A field of `scontrol show job`."""
        return self.slurm.job(self.number, field)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of one kind, over all starts."""
        path = self.run / "events.jsonl"
        return (
            [event for event in read_events(path) if event["event"] == kind]
            if path.exists()
            else []
        )

    def steps(self, kind: str) -> list[int]:
        return [event["step"] for event in self.events(kind)]

    def nodes(self) -> list[str]:
        return self.slurm.said("scontrol", "show", "hostnames", self.shows("NodeList")).split()

    def wait_for(self, state: str, restarts: int) -> None:
        wanted = (state, str(restarts))
        wait_until(
            lambda: (self.shows("JobState"), self.shows("Restarts")) == wanted,
            f"{self.run.name} did not become {state}",
            look_seconds=LOOK,
        )

    def start_again(self) -> None:
        """Slurm lets a job that was queued again rest for two minutes; seconds are enough for
        nodes to forget it.
        """
        self.wait_for("PENDING", restarts=1)
        self.slurm.said(
            "scontrol", "update", f"JobId={self.number}", "StartTime=now+5", "TimeLimit=UNLIMITED"
        )


def submit(
    slurm: Slurm, folder: Path, name: str, steps: int, *options: str, before: Sequence[str] = ()
) -> Job:
    words = [
        "launch",
        str(toy(folder, name, steps)),
        "nodes=2",
        "launch.processes=1",
        "--gpus=0",
        "--sbatch=--hold",
        *options,
    ]
    said = slurm.said(*before, sys.executable, "-m", "llmsys.launch.main", *words)
    assert "Submitted batch job" in said
    return Job(slurm, folder / name, said.split()[-1])


def processes_of(run: Path) -> list[int]:
    """Processes that name the run's config: ranks and what starts them."""
    kept = str(run / "launch" / "config.yaml")
    return [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if kept in " ".join(one.info["cmdline"] or [])
    ]


def states(run: Path) -> dict[int, str]:
    """The hash of all weights and moments at each step that was saved."""
    return {
        event["step"]: event["state_hash"]
        for event in read_latest_events(run / "events.jsonl")
        if event["event"] == "state_hash"
    }


def test_jobs_outlive_lost_nodes_and_time_limits_and_a_cancelled_one_saves_and_rests(
    hosts: Hosts, slurm: Slurm
) -> None:
    """Three jobs at once, since most of this is waiting. `whole` needs both of its nodes and loses
    the one where its
    script runs; `fewer` may go on with what is left and loses the other; `timed` nears its time
    limit, and then has a spare for the node that it loses."""
    middles = {
        name: pause_run(hosts.folder / f"middle-{name}", STEPS // 2) for name in ("whole", "fewer")
    }
    whole = submit(slurm, hosts.folder, "whole", STEPS, before=middles["whole"].words)
    fewer = submit(
        slurm, hosts.folder, "fewer", STEPS, "--min-hosts", "1", before=middles["fewer"].words
    )
    timed = submit(slurm, hosts.folder, "timed", ENDLESS, "spares=1")
    slurm.said("scontrol", "release", whole.number, fewer.number, timed.number)
    lost: dict[str, str] = {}

    def lose_nodes_of_what_stands_still() -> bool:
        for job, which in ((whole, 0), (fewer, 1)):
            middle = middles[job.run.name]
            if job.run.name not in lost and middle.reached:
                lost[job.run.name] = job.nodes()[which]
                hosts.crash(lost[job.run.name])
                middle.go_on()
        return len(lost) == 2

    wait_until(lose_nodes_of_what_stands_still, "no step was made")
    wait_until(lambda: timed.steps("checkpoint"), "no step was made")
    # its notice is as long
    slurm.said("scontrol", "update", f"JobId={timed.number}", "TimeLimit=5")
    slurm.notice_silence(*lost.values())
    for name in lost.values():
        slurm.start_node(name)

    timed.start_again()
    assert [event["reason"] for event in timed.events("stopped")] == ["SIGUSR1 came"]
    whole.start_again()
    stopped = timed.steps("stopped")[0]
    wait_until(lambda: timed.steps("checkpoint")[-1] > stopped, "timed did not resume")
    assert timed.steps("prediction") == [0, stopped]  # the steps where its starts began
    second = timed.nodes()[1]
    hosts.crash(second)
    slurm.notice_silence(second)
    wait_until(lambda: len(timed.events("start")) == 3, "no spare took the place of a lost node")
    saved = timed.steps("checkpoint")[-1]
    wait_until(
        lambda: timed.steps("checkpoint")[-1] > saved, "timed did not continue with its spare"
    )
    assert [event["world_size"] for event in timed.events("start")] == [2, 2, 2]
    slurm.said("scancel", timed.number)
    timed.wait_for("CANCELLED", restarts=1)
    assert [event["reason"] for event in timed.events("stopped")] == [
        "SIGUSR1 came",
        "SIGTERM came",
    ]
    assert timed.steps("checkpoint")[-1] == timed.steps("stopped")[1]
    assert not processes_of(timed.run)

    whole.wait_for("COMPLETED", restarts=1)
    fewer.wait_for("COMPLETED", restarts=0)
    assert [event["world_size"] for event in fewer.events("start")] == [2, 1]
    assert [event["world_size"] for event in whole.events("start")] == [2, 2]
    run_forked("train", toy(hosts.folder, "calm", STEPS))
    wanted = states(hosts.folder / "calm")
    assert len(wanted) == STEPS // 2
    assert states(whole.run) == states(fewer.run) == wanted

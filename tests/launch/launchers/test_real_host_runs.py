"""`llmsys launch` on three real hosts: losses cost time and no bit, and printed commands run as
printed.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from llmsys.doctor.toy_dataset import LENGTH, SEQUENCES, build_toy_config, write_toy_dataset
from llmsys.events import read_events
from llmsys.launch.train import STOPPED
from llmsys.train.checkpoint_record import read_record
from tests.helpers.forked_commands import run_forked
from tests.helpers.hosts import Hosts, find_missing_requirement, real_hosts
from tests.helpers.paused_run import Standstill, pause_run
from tests.helpers.process import wait_until
from tests.helpers.step_losses import list_step_losses

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(find_missing_requirement()),
        reason=f"no hosts can be made here: {find_missing_requirement()}",
    ),
]

PDSH = pytest.mark.skipif(
    not Path("/usr/bin/pdsh").exists(), reason="apt-get install pdsh is wanted"
)
STEPS = 40
# starts of four ranks follow each other, on a machine that may have other work
PATIENCE_SECONDS = 500.0
FAST = {"reproducibility": "fast"}
BOTH = "alpha:1,beta:1"


patiently = partial(wait_until, patience_seconds=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    write_toy_dataset(folder / "data")
    with real_hosts(folder, ["alpha", "beta", "gamma"]) as made:
        yield made


def config_file(hosts: Hosts, name: str, **changes: dict[str, Any]) -> Path:
    train = {"tokens": STEPS * SEQUENCES * LENGTH, "hang_timeout_seconds": 120} | changes.pop(
        "train", {}
    )
    run = {"folder": str(hosts.folder / name)}
    config = build_toy_config(
        hosts.folder, run=run, train=train, evaluation={"every_steps": 0}, **changes
    )
    path = hosts.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def launch(config: Path, nodes: str, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "llmsys.launch.main",
        "launch",
        str(config),
        f"nodes={nodes}",
        *more,
    ]


def worlds(hosts: Hosts, name: str) -> list[int]:
    """How many ranks each start of a run had."""
    return [event["world_size"] for event in told(hosts, name) if event["event"] == "start"]


def saved_or_ended(
    hosts: Hosts, name: str, start: int, processes: list[subprocess.Popen[bytes]]
) -> bool:
    """Whether a run's start of this number has saved a checkpoint, or a process that should make
    one has ended.
    """
    kinds = [
        event["event"] for event in told(hosts, name) if event["event"] in ("start", "checkpoint")
    ]
    saved = kinds.count("start") >= start and kinds[-1:] == ["checkpoint"]
    return saved or any(process.poll() is not None for process in processes)


def losses(hosts: Hosts, name: str) -> list[float]:
    return list_step_losses(hosts.folder / name)


def ranks(hosts: Hosts, name: str) -> list[psutil.Process]:
    """The ranks of a host."""
    return [
        one
        for one, words in hosts.commands(name)
        if _is(words, "launch/train.py") and not _is(words, "-m")
    ]


def agents(hosts: Hosts, name: str) -> list[psutil.Process]:
    """Agents of torch on a host, without what keeps them going."""
    commands = hosts.commands(name)
    return [
        one
        for one, words in commands
        if _is(words, "llmsys.launch.launchers.torchrun")
        and not _is(words, "llmsys.launch.launchers.restart_agent")
    ]


def _is(words: list[str], wanted: str) -> bool:
    return any(word.endswith(wanted) for word in words)


def told(hosts: Hosts, name: str) -> list[dict[str, Any]]:
    path = hosts.folder / name / "events.jsonl"
    return read_events(path) if path.exists() else []


def state(folder: Path) -> str:
    """The digest of what a run has come to."""
    return str(read_record(folder / "checkpoints" / f"step-{STEPS:08d}")["state_hash"])


def train_calmly(config: Path) -> None:
    """In one process of this machine, to compare with."""
    run_forked("train", config)


def heard_or_gone(hosts: Hosts, middle: Standstill) -> bool:
    """Whether rank 0 has heard that it is to stop, or was ended."""
    return middle.heard(signal.SIGTERM) or not ranks(hosts, "alpha")


def typed(
    hosts: Hosts, config: Path, *more: str, before: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """What `llmsys launch --print` says, typed on each host into a shell that knows nothing."""
    printed = hosts.run("alpha", *before, *launch(config, BOTH, *more, "--print"))
    lines = re.findall(r"^# on (\w+):\n(.*)$", printed.stdout, flags=re.MULTILINE)
    assert [host for host, _ in lines] == BOTH.replace(":1", "").split(","), printed.stderr
    return [
        hosts.start(host, "env", "-u", "PYTHONPATH", "bash", "-c", line, log=hosts.log)
        for host, line in lines
    ]


@PDSH
def test_one_run_goes_from_launcher_to_launcher_and_loses_nothing(hosts: Hosts) -> None:
    """ZeRO-2 by pdsh until SIGTERM, ZeRO-3 by pdsh until Ctrl-C, then what --print says, typed on
    each host: DeepSpeed
    without ssh until SIGTERM, and accelerate. After each, no rank is left anywhere, and at last no
    step is another."""
    for start, (number, status) in enumerate(((signal.SIGTERM, STOPPED), (signal.SIGINT, 130)), 1):
        path = config_file(
            hosts, "passed", engine={"kind": "deepspeed", "zero_stage": start + 1}, train=FAST
        )
        middle = pause_run(hosts.folder / f"middle-{start}", 8 * start)
        process = hosts.start("alpha", *middle.words, *launch(path, BOTH), log=hosts.log)
        middle.wait(process, patience_seconds=PATIENCE_SECONDS)
        process.send_signal(number)
        patiently(partial(heard_or_gone, hosts, middle), "the ranks heard nothing")
        middle.go_on()
        assert process.wait(PATIENCE_SECONDS) == status, hosts.log.read_text()
        patiently(lambda: not any(ranks(hosts, name) for name in hosts.names), "ranks are left")
    middle = pause_run(hosts.folder / "middle-3", 24)
    started = typed(hosts, path, "--no-ssh", before=middle.words)
    middle.wait(*started, patience_seconds=PATIENCE_SECONDS)
    [rank] = ranks(hosts, "beta")
    rank.send_signal(signal.SIGTERM)
    patiently(partial(middle.heard, signal.SIGTERM, rank=1), "the rank heard nothing")
    middle.go_on()
    assert [process.wait(PATIENCE_SECONDS) for process in started] == [STOPPED, STOPPED], (
        hosts.log.read_text()
    )
    path = config_file(hosts, "passed", engine={"kind": "accelerate"}, train=FAST)
    assert [process.wait(PATIENCE_SECONDS) for process in typed(hosts, path)] == [0, 0], (
        hosts.log.read_text()
    )
    assert worlds(hosts, "passed") == [2, 2, 2, 2]
    train_calmly(config_file(hosts, "fast", train=FAST))
    assert len(losses(hosts, "passed")) == STEPS
    assert losses(hosts, "passed") == pytest.approx(losses(hosts, "fast"), rel=1e-5)


def test_a_halted_host_a_dead_one_and_a_cut_cable_cost_nothing_but_time(hosts: Hosts) -> None:
    """FSDP2 with experts across hosts. One host of three halts and dies: two go on. Then a cable is
    out until the agent
    behind it has been given up: the run waits, and goes on by itself."""
    path = config_file(hosts, "lost", layout={"expert": 2}, train={"hang_timeout_seconds": 15})
    words = launch(path, "alpha:1,beta:1,gamma:2", "--min-hosts", "2", "--restarts", "20")
    late = pause_run(hosts.folder / "late", STEPS - 4)  # no further before the cable is out
    process = hosts.start("alpha", *late.words, *words, log=hosts.log)

    def trains_with(ranks: int) -> bool:
        assert process.poll() is None, hosts.log.read_text()
        return worlds(hosts, "lost")[-1:] == [ranks] and saved_or_ended(hosts, "lost", 1, [process])

    patiently(lambda: trains_with(4), "three hosts did not begin")
    hosts.signal("gamma", signal.SIGSTOP)
    patiently(lambda: trains_with(2), "two hosts did not go on")
    hosts.signal("gamma", signal.SIGKILL)
    hosts.cut("beta")
    late.go_on()
    patiently(lambda: not agents(hosts, "beta"), "the agent behind the cut cable was not ended")
    assert process.poll() is None, hosts.log.read_text()
    starts = len(worlds(hosts, "lost"))
    hosts.mend("beta")
    assert process.wait(PATIENCE_SECONDS) == 0, hosts.log.read_text()
    assert "no step has finished for 15 s" in hosts.log.read_text()
    assert (
        "the run finished on the remaining hosts; lost: gamma lost its ssh connection, or could "
        "not be reached"
    ) in hosts.log.read_text()
    assert len(worlds(hosts, "lost")) > starts
    train_calmly(config_file(hosts, "calm"))
    assert state(hosts.folder / "lost") == state(hosts.folder / "calm")

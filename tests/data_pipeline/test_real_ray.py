"""Preparation on a Ray cluster of two real hosts: what a worker or a whole host takes along is done again."""

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from data_pipeline.pipeline import prepare
from tests.helpers.hosts import Hosts, real_hosts, why_not
from tests.helpers.process import wait_until
from tests.helpers.tiny_crawl import fingerprints, make_crawl, tiny_config

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]

OWN_PLACES = "mkdir -p /tmp/ray\nmount -t tmpfs tmpfs /tmp/ray\nmount -t tmpfs tmpfs /dev/shm"
RAY = ["ray", "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
RAY += ["--num-cpus=1", "--object-store-memory=80000000"]
HEAD = "10.77.0.1:6379"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # what a head makes up, the other hosts do not know
    with real_hosts(tmp_path, ["alpha", "beta"], dict.fromkeys(("alpha", "beta"), OWN_PLACES)) as hosts:
        start_ray(hosts, "alpha", "--head", "--port=6379", "--include-dashboard=false")
        start_ray(hosts, "beta", f"--address={HEAD}")
        yield hosts


def start_ray(hosts: Hosts, name: str, *words: str) -> None:
    """Ray gives its own daemons half a minute to start, which a busy machine may not keep: then again, three times."""
    log = hosts.folder / f"ray-{name}.log"
    for _ in range(3):
        started = hosts.start(name, *RAY, f"--node-ip-address={hosts.addresses[name]}", *words, log=log)
        wait_until(lambda s=started: "runtime started" in log.read_text() or s.poll() is not None, "Ray did not start")
        if started.poll() is None:
            return
        hosts.crash(name)
    raise AssertionError(log.read_text())


def halt_in_a_task(hosts: Hosts, name: str) -> int:
    """Stop a worker of a host in the middle of a task, where it stays; its process id."""
    found: list[int] = []

    def look() -> list[int]:
        for worker in map(psutil.Process, filter(psutil.pid_exists, hosts.pids(name))):
            with suppress(psutil.NoSuchProcess):
                if works(worker):
                    worker.suspend()
                    if works(worker):
                        found.append(worker.pid)
                    else:
                        worker.resume()
        return found

    wait_until(look, f"no worker of {name} had a task")
    return found[0]


def works(worker: psutil.Process) -> bool:
    """Ray names a worker after the function that it runs."""
    return "ray::_attempt" in " ".join(worker.cmdline())


def test_a_worker_and_then_a_host_may_be_lost_in_the_middle_and_the_bytes_are_those_of_one_process(
    cluster: Hosts, tmp_path: Path
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=4, pages=10)
    config = tiny_config(tmp_path / "ray", crawl, executor={"kind": "ray", "address": HEAD})
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    log = tmp_path / "log"
    preparing = cluster.start("alpha", sys.executable, "-m", "launch.main", "prepare", f"{tmp_path}/ray.yaml", log=log)
    held = halt_in_a_task(cluster, "alpha")  # while it stands still, every other task of the stage must run on beta
    os.kill(halt_in_a_task(cluster, "beta"), signal.SIGKILL)
    wait_until(lambda: "was lost by Ray" in log.read_text(), "nobody missed the worker")
    halt_in_a_task(cluster, "beta")
    cluster.crash("beta")
    os.kill(held, signal.SIGCONT)
    assert preparing.wait(600) == 0, log.read_text()
    assert log.read_text().count("was lost by Ray") == 2
    prepare(tiny_config(tmp_path / "here", crawl))
    assert fingerprints(tmp_path / "ray") == fingerprints(tmp_path / "here")

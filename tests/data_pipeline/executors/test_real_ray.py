"""Preparation on a Ray cluster of two real hosts: what a worker or a whole host takes along is
done again.
"""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from tests.helpers.hosts import Hosts, find_missing_requirement, real_hosts
from tests.helpers.process import wait_until
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(find_missing_requirement()),
        reason=f"no hosts can be made here: {find_missing_requirement()}",
    ),
]

OWN_PLACES = "mkdir -p /tmp/ray\nmount -t tmpfs tmpfs /tmp/ray\nmount -t tmpfs tmpfs /dev/shm"
RAY = ["ray", "start", "--block", "--disable-usage-stats", "--include-log-monitor=false"]
RAY += ["--num-cpus=1", "--object-store-memory=80000000"]
HEAD = "10.77.0.1:6379"
SITE = """
import os, sys, time
def hold(event, arguments):
    while event == "open" and str(arguments[0]).endswith(".warc.gz") and not os.path.exists({go!r}):
        time.sleep(0.05)
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    sys.addaudithook(hold)
"""
"""No task of the cluster reads a crawl before `go` is there: however fast or slow a host is, it
has one to lose.
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    # what a head makes up, the other hosts do not know
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(go=str(tmp_path / "go")))
    with real_hosts(
        tmp_path, ["alpha", "beta"], dict.fromkeys(("alpha", "beta"), OWN_PLACES)
    ) as hosts:
        start_ray(hosts, "alpha", "--head", "--port=6379", "--include-dashboard=false")
        start_ray(hosts, "beta", f"--address={HEAD}")
        yield hosts


def start_ray(hosts: Hosts, name: str, *words: str) -> None:
    """Ray gives its own daemons half a minute to start, which a busy machine may not keep: then
    again, three times.
    """
    log = hosts.folder / f"ray-{name}.log"
    for _ in range(3):
        path = f"PYTHONPATH={hosts.folder / 'site'}:{hosts.env['PYTHONPATH']}"
        started = hosts.start(
            name, "env", path, *RAY, f"--node-ip-address={hosts.addresses[name]}", *words, log=log
        )
        wait_until(
            lambda s=started: "runtime started" in log.read_text() or s.poll() is not None,
            "Ray did not start",
        )
        if started.poll() is None:
            return
        hosts.crash(name)
    raise AssertionError(log.read_text())


def in_a_task(hosts: Hosts, name: str) -> psutil.Process:
    """A worker of a host in the middle of a task: Ray names it after the function that it runs."""
    from llmsys.data_pipeline.executors.ray import _try_job_on_node

    found: list[psutil.Process] = []

    def look() -> list[psutil.Process]:
        found.extend(
            worker
            for worker, words in hosts.commands(name)
            if f"ray::{_try_job_on_node.__name__}" in " ".join(words)
        )
        return found

    wait_until(look, f"no worker of {name} had a task")
    return found[0]


def test_a_worker_and_then_a_host_may_be_lost_in_the_middle_and_the_bytes_are_those_of_one_process(
    cluster: Hosts, tmp_path: Path
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=4, pages=10)
    config = build_tiny_config(tmp_path / "ray", crawl, executor={"kind": "ray", "address": HEAD})
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    log = tmp_path / "log"
    preparing = cluster.start(
        "alpha",
        sys.executable,
        "-m",
        "llmsys.launch.main",
        "prepare",
        f"{tmp_path}/ray.yaml",
        log=log,
    )
    in_a_task(cluster, "beta").kill()
    wait_until(lambda: "was lost by Ray" in log.read_text(), "nobody missed the worker")
    in_a_task(cluster, "beta")
    cluster.crash("beta")
    (tmp_path / "go").touch()
    assert preparing.wait(600) == 0, log.read_text()
    assert log.read_text().count("was lost by Ray") == 2
    prepare_dataset(build_tiny_config(tmp_path / "here", crawl))
    assert hash_files(tmp_path / "ray") == hash_files(tmp_path / "here")

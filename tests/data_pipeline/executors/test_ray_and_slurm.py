"""Laws of clusters: Ray and Slurm do the same jobs with the same bytes, and lose a job when its
process is lost.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.executor import SlurmExecutorConfig
from llmsys.data_pipeline.executors.base import (
    EagerTaskEvent,
    Event,
    Executor,
    Job,
    Report,
    TaskDone,
    TaskFailed,
    TaskProgress,
)
from llmsys.data_pipeline.executors.slurm import SlurmExecutor
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError, LaunchError
from llmsys.events import read_events
from llmsys.launch.hosts.hostfile import Host
from tests.helpers import fake_slurm
from tests.helpers.failing_tasks import (
    count,
    die_until,
    meet,
    pass_gate,
    raise_failure,
    sleep_for_ever,
)
from tests.helpers.process import has_ended, wait_for_pid, wait_until
from tests.helpers.real_slurm import find_missing_requirement, real_slurm
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl

SLURM = SlurmExecutorConfig(poll_seconds=0.1, jobs_per_task=2, array_tasks=2)


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), files=2, pages=10)


def ended(events: Sequence[Event | EagerTaskEvent]) -> dict[int, TaskDone | TaskFailed]:
    return {event.index: event for event in events if not isinstance(event, TaskProgress)}


def require_the_laws_of_an_executor(executor: Executor, folder: Path) -> None:
    """Every job is done or failed once, with its own cause, and progress arrives."""
    jobs: list[Job] = [
        partial(count, 3),
        partial(die_until, folder / "dying", 9),
        raise_failure,
        partial(count, 4),
        partial(count, 5),
    ]
    events = list(executor.run_jobs(jobs))
    ends = ended(events)
    assert {
        index: end.result["counted"] for index, end in ends.items() if isinstance(end, TaskDone)
    } == {
        0: 3,
        3: 4,
        4: 5,
    }
    failed = {index: end for index, end in ends.items() if isinstance(end, TaskFailed)}
    assert {index: end.cause for index, end in failed.items()} == {1: "lost", 2: "error"}
    assert "in raise_failure" in failed[2].traceback
    assert failed[1].message.startswith("its process ")
    assert sum(event.amount for event in events if isinstance(event, TaskProgress)) == 3 + 4 + 5
    assert (folder / "dying").read_text() == "x"


# --- Ray ---


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray", reason="Ray is not installed")
    cluster = start_ray()
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def start_ray(tries: int = 6) -> Any:
    """Two nodes. Ray gives its daemons half a minute to start, which a busy machine may not
    keep: then once more.
    """
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster()
    try:
        cluster.add_node(**node, include_dashboard=False)
        cluster.add_node(**node)
    except Exception as error:
        cluster.shutdown()
        if tries == 1 or "timed out during startup" not in str(error):
            raise
        return start_ray(tries - 1)
    return cluster


@pytest.mark.distributed
def test_two_nodes_of_ray_give_the_same_bytes_and_share_the_work(
    crawl: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmsys.data_pipeline.executors.ray import RayExecutor

    cluster = RayExecutor(ray_address, workers=0)
    try:
        assert cluster.limit == 2
        require_the_laws_of_an_executor(cluster, tmp_path)
        assert (
            len(
                ended(
                    list(
                        cluster.run_jobs(
                            [partial(meet, tmp_path / "meeting", name, 2) for name in "ab"]
                        )
                    )
                )
            )
            == 2
        )
        assert len(cluster.nodes) == 2
        events = cluster.run_jobs([partial(count, 1), partial(count, 2)])
        assert any(isinstance(event, TaskDone) for event in events)
        # which a finished task makes possible
        cluster.eager_jobs.next_jobs.append((7, partial(count, 9)))
        early = [event.event for event in events if isinstance(event, EagerTaskEvent)]
        assert TaskDone(7, {"counted": 9}) in early
        # Both nodes have a worker now, whose start would otherwise take longer than this task may.
        slow = ended(
            list(cluster.run_jobs([partial(sleep_for_ever, tmp_path / "pid")], seconds=1.0))
        )
        assert isinstance(slow[0], TaskFailed)
        assert slow[0].cause == "slow"
        pid = wait_for_pid(tmp_path / "pid")
        wait_until(lambda: has_ended(pid), "the process of a slow try outlived it")
        # relative paths begin where the command was given, on every node
        monkeypatch.chdir(tmp_path)
        prepare_dataset(
            build_tiny_config(Path("ray"), crawl, executor={"kind": "ray", "address": ray_address})
        )
    finally:
        cluster.close()
    prepare_dataset(build_tiny_config(tmp_path / "here", crawl))
    assert hash_files(tmp_path / "ray") == hash_files(tmp_path / "here")
    assert any(event.get("eager") for event in read_events(tmp_path / "ray" / "events.jsonl")), (
        "stages overlap"
    )


@pytest.mark.distributed
def test_training_on_ray_has_a_command_on_every_node_and_forwards_a_stop(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests launch/launchers/ray_job.py; it is here because this file has a cluster."""
    ray = pytest.importorskip("ray")
    from llmsys.launch.launchers import ray_job
    from llmsys.launch.launchers.host_commands import HostCommand, LaunchPlan
    from llmsys.launch.launchers.ray_job import run_on_nodes

    plan = LaunchPlan(build_hosts(2), tmp_path, tmp_path, 29500, "toy", 2, 3, 60, 60)
    ready = "trap 'exit 75' TERM; touch ready-$$; while :; do sleep 0.05; done"
    monkeypatch.setattr(
        ray_job, "build_torchrun_command", lambda plan, host: HostCommand("", ("bash", "-c", ready))
    )
    monkeypatch.setenv("RAY_ADDRESS", ray_address)

    def stop_when_ready() -> None:
        wait_until(
            lambda: len(list(tmp_path.glob("ready-*"))) == 2, "not every node started its command"
        )
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    stopping = threading.Thread(target=stop_when_ready, daemon=True)
    try:
        stopping.start()
        assert run_on_nodes(plan, 0) == 75
        with pytest.raises(
            LaunchError, match=r"nodes=3: Ray had no 3 nodes with \{'CPU': 1\} free within 1 s"
        ):
            run_on_nodes(replace(plan, hosts=build_hosts(3), patience_seconds=1), 0)
    finally:
        ray.shutdown()
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)


def build_hosts(count: int) -> tuple[Host, ...]:
    return tuple(Host(f"node-{number}", 1) for number in range(count))


def test_a_missing_ray_is_named_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from llmsys.errors import ConfigError\n"
        "try:\n    import llmsys.data_pipeline.executors.ray\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert told.strip() == (
        "data.executor.kind=ray needs Ray, which is not installed. Install it with: pip install "
        "'llmsys[ray]'"
    )


# --- Slurm ---


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in fake_slurm.install(tmp_path / "fake").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "fake"


def test_the_next_array_does_not_wait_for_the_slowest_task_and_its_results_get_arrays_of_their_own(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of six jobs ends when a job that the second one enables has run; two tasks may
    be in Slurm.
    """
    config = SLURM.model_copy(update={"jobs_per_task": 1, "array_tasks": 1, "workers": 2})
    arrays = SlurmExecutor(config, tmp_path / "slurm")
    most = 0
    submit = arrays._submit_array

    def submit_array(*arguments: Any) -> Any:
        nonlocal most
        array = submit(*arguments)
        # A process of Slurm may outlive the result that it wrote.
        busy = [folder for folder in arrays.folder.iterdir() if not list(folder.glob("*.result"))]
        most = max(most, len(busy))
        return array

    monkeypatch.setattr(arrays, "_submit_array", submit_array)
    jobs: list[Job] = [partial(pass_gate, tmp_path / "gate"), *[partial(count, 1)] * 5]
    done, early = set[int](), set[int]()
    for event in arrays.run_jobs(jobs):
        if isinstance(event, EagerTaskEvent):
            early.add(event.event.index)
        elif isinstance(event, TaskDone):
            done.add(event.index)
            if event.index == 1:
                arrays.eager_jobs.later_jobs.append((7, partial(touch, tmp_path / "gate")))
    assert (done, early, most) == (set(range(6)), {7}, 2)


def touch(path: Path, report: Report) -> dict[str, Any]:
    path.touch()
    return {}


def test_arrays_of_slurm_give_the_same_bytes(crawl: Path, tmp_path: Path, fake: Path) -> None:
    plain = {"rules": [], "deduplicate": {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}}
    executor = SLURM.model_dump() | {"jobs_per_task": 8}
    prepare_dataset(
        build_tiny_config(tmp_path / "slurm", crawl, executor=executor, **plain), until="documents"
    )
    prepare_dataset(build_tiny_config(tmp_path / "here", crawl, **plain), until="documents")
    assert hash_files(tmp_path / "slurm") == hash_files(tmp_path / "here")
    assert any(event.get("eager") for event in read_events(tmp_path / "slurm" / "events.jsonl")), (
        "stages overlap"
    )
    assert not (tmp_path / "slurm" / "slurm").exists()


def test_an_array_fails_only_the_jobs_that_were_lost_and_ends_with_its_driver(
    tmp_path: Path, fake: Path
) -> None:
    arrays = SlurmExecutor(
        SLURM.model_copy(update={"jobs_per_task": 1, "array_tasks": 3}), tmp_path / "slurm"
    )
    require_the_laws_of_an_executor(arrays, tmp_path)
    events = arrays.run_jobs([partial(sleep_for_ever, tmp_path / "pid")])
    array = arrays._submit_array([(0, partial(sleep_for_ever, tmp_path / "pid"))], 0)
    assert array.folder.stat().st_mode & 0o777 == 0o700  # the jobs are pickles
    pid = wait_for_pid(tmp_path / "pid")
    assert isinstance(events, Generator)
    # a driver that is killed says nothing to Slurm; the next one of the same folder cleans up
    events.close()
    SlurmExecutor(SLURM, tmp_path / "slurm")
    wait_until(lambda: has_ended(pid), "a task outlived its driver's successor")


def test_a_missing_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        DataError,
        match=r"needs sbatch, which is not on the PATH of this machine\. Run llmsys on a submit "
        r"host",
    ):
        SlurmExecutor(SLURM, tmp_path / "slurm")


@pytest.mark.distributed
@pytest.mark.skipif(
    bool(find_missing_requirement()), reason=f"no Slurm here: {find_missing_requirement()}"
)
def test_the_daemons_of_slurm_run_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_slurm(tmp_path / "daemons") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        arrays = SlurmExecutor(
            SLURM.model_copy(update={"jobs_per_task": 1, "array_tasks": 9}), tmp_path / "slurm"
        )
        require_the_laws_of_an_executor(arrays, tmp_path)
        assert os.listdir(tmp_path).count("slurm") == 0

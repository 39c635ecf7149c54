"""A group knows its device and its timeout, and so do the groups of its meshes."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.parallel import device_mesh, process_group
from llmsys.parallel.process_group import init_process_group, set_group_timeout


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], dict[str, Any]]:
    """Return the arguments that torch gets from a rank, on the CPU or on the second of several GPUs."""

    def join_group(has_gpu: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.update(current=device))
        monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
        monkeypatch.setattr(process_group, "bind_rendezvous", lambda: None)

        def record(backend: str, **options: Any) -> None:
            found.update(options, backend=backend)

        monkeypatch.setattr(dist, "init_process_group", record)
        with init_process_group(77):
            return found

    return join_group


def test_a_rank_on_a_gpu_connects_with_its_device_and_timeout(
    join: Callable[[bool], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 1)
    wanted = {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(seconds=77), "device_id": device}
    assert join(True) == {**wanted, "current": device}
    assert join(False) == {**wanted, "backend": "gloo", "device_id": None}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_single_process_needs_no_connection(join: Callable[[bool], dict[str, Any]], has_gpu: bool) -> None:
    found = join(has_gpu)
    assert (found["world_size"], "device_id" in found) == (1, False)


@pytest.fixture
def _fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_other_groups_get_the_timeout_of_the_first() -> None:
    with init_process_group(77):
        group = dist.new_group([0])
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(minutes=30)
        set_group_timeout(group)
        assert options._timeout == timedelta(seconds=77)


@pytest.mark.usefixtures("_fake_ranks")
def test_every_group_of_every_mesh_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    monkeypatch.setattr(device_mesh, "set_group_timeout", lambda group: found.add(group.group_name))
    meshes = device_mesh.build_device_meshes(
        ParallelLayout(replicate=2, shard=2, tensor=2, expert=2), torch.device("cpu")
    )
    used = [mesh for mesh in vars(meshes).values() if isinstance(mesh, dist.DeviceMesh)]
    assert {group.group_name for mesh in used for group in mesh.get_all_groups()} == found
    assert len(found) >= 6

"""A group knows its device and its timeout, so do the groups of its meshes, and its ranks may
open enough files.
"""

import os
import resource
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.errors import LaunchError
from llmsys.parallel import device_mesh, process_group
from llmsys.parallel.process_group import init_process_group, prepare_descriptors, set_group_timeout


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], dict[str, Any]]:
    """Return the arguments that torch gets from a rank, on the CPU or on the second of several
    GPUs.
    """

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
    launched = {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 1)
    wanted = {
        "backend": "cpu:gloo,cuda:nccl",
        "timeout": timedelta(seconds=77),
        "device_id": device,
    }
    assert join(True) == {**wanted, "current": device}
    assert join(False) == {**wanted, "backend": "gloo", "device_id": None}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_single_process_needs_no_connection(
    join: Callable[[bool], dict[str, Any]], has_gpu: bool
) -> None:
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


# --- Open files ---


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of this process, soft and hard; the last entry is current."""
    found = [(256, 4_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: found.append(wanted))
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    return found


@pytest.mark.parametrize(("ranks", "lazy"), [(63, None), (64, "1"), (4_096, "1")])
def test_the_limit_is_raised_and_a_large_world_connects_when_it_communicates(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, ranks: int, lazy: str | None
) -> None:
    prepare_descriptors(1, ranks)
    assert limits[-1] == (4_000, 4_000)
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == lazy
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)


def test_only_rank_0_needs_a_file_for_every_rank_and_a_low_limit_is_named(
    limits: list[tuple[int, int]],
) -> None:
    prepare_descriptors(4_095, 4_096)
    with pytest.raises(
        LaunchError,
        match=r"rank 0 of 4096 needs 4608 open files, and this system allows 4000 \(ulimit "
        r"-Hn\)\. Raise the",
    ):
        prepare_descriptors(0, 4_096)
    limits.append((256, resource.RLIM_INFINITY))
    prepare_descriptors(0, 4_096)
    assert process_group.OWN_DESCRIPTORS == 512

"""A rank uses the processors near its accelerator among those it was given; nothing changes
where that is unknown.
"""

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmsys.parallel.device_setup import (
    bind_to_near_processors,
    parse_processor_list,
    trim_allocator,
    warn_about_unused_gpus,
)

GPU = torch.device("cuda", 3)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Affinities that are set, for a process with processors 2 to 9 and a device at PCI address
    0001:c1:02.
    """
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2, 10)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: found.append(processors))
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: {GPU: properties}[device]
    )
    return found


def write_system(folder: Path, node: str, processors: str) -> Path:
    device = folder / "bus/pci/devices/0001:c1:02.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (folder / "devices/system/node/node1").mkdir(parents=True)
    (folder / "devices/system/node/node1/cpulist").write_text(f"{processors}\n")
    return folder


def test_a_list_of_processors_is_read_as_linux_writes_it() -> None:
    assert parse_processor_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_processor_list("") == set()


def test_a_rank_gets_the_processors_of_its_node_that_it_may_use(
    tmp_path: Path, bound: list[set[int]]
) -> None:
    bind_to_near_processors(GPU, write_system(tmp_path, "1", "0-3,8-11"))
    assert bound == [{2, 3, 8, 9}]


@pytest.mark.parametrize(
    ("node", "processors", "said"),
    [
        (
            "-1",
            "0-3",
            "cuda:3 at 0001:c1:02.0: its NUMA node is unknown, so this rank may use any processor",
        ),
        ("7", "0-3", "node 7 has no list of processors"),
        ("1", "40-43", "of which this rank may use no processor; nothing is changed"),
    ],
)
def test_nothing_changes_where_the_node_is_unknown_or_forbidden(
    tmp_path: Path,
    bound: list[set[int]],
    caplog: pytest.LogCaptureFixture,
    node: str,
    processors: str,
    said: str,
) -> None:
    with caplog.at_level(logging.INFO):
        bind_to_near_processors(GPU, write_system(tmp_path, node, processors))
    assert bound == []
    assert said in caplog.text


def test_a_rank_on_the_cpu_is_left_alone(
    bound: list[set[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: trimmed.append("trimmed"))
    with caplog.at_level(logging.INFO):
        bind_to_near_processors(torch.device("cpu"))
    trim_allocator(torch.device("cpu"))
    assert (bound, caplog.text, trimmed) == ([], "", [])
    trim_allocator(GPU)
    assert trimmed == ["trimmed"]


@pytest.mark.parametrize(
    ("cuda", "cause"),
    [
        (
            None,
            r"torch 2\.13\.0\+x is a build for CPUs: the CPU is used instead\. Install torch "
            r"2\.13\.0 with CUDA",
        ),
        (
            "13.0",
            r"torch 2\.13\.0\+x is built for CUDA 13\.0: the CPU is used instead\. Check "
            r"nvidia-smi: the driver",
        ),
    ],
)
def test_gpus_that_torch_cannot_use_are_counted_unless_they_are_hidden(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str | None,
    cause: str,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+x")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    warn_about_unused_gpus(torch.device("cpu"), tmp_path)
    for number in range(2):
        (tmp_path / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
    warn_about_unused_gpus(GPU, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    warn_about_unused_gpus(torch.device("cpu"), tmp_path)
    assert not caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    warn_about_unused_gpus(torch.device("cpu"), tmp_path)
    assert re.search(f"this machine has 2 NVIDIA GPUs and {cause}", caplog.text)

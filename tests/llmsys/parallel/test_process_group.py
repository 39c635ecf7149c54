"""Open files of a rank: the limit is raised to what the system allows, and one that is too low is named."""

import os
import resource

import pytest

from llmsys.errors import LaunchError
from llmsys.parallel import process_group
from llmsys.parallel.process_group import prepare_descriptors


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


def test_only_rank_0_needs_a_file_for_every_rank_and_a_low_limit_is_named(limits: list[tuple[int, int]]) -> None:
    prepare_descriptors(4_095, 4_096)
    with pytest.raises(
        LaunchError,
        match=r"rank 0 of 4096 needs 4608 open files, and this system allows 4000 \(ulimit -Hn\)\. Raise the",
    ):
        prepare_descriptors(0, 4_096)
    limits.append((256, resource.RLIM_INFINITY))
    prepare_descriptors(0, 4_096)
    assert process_group.OWN_DESCRIPTORS == 512

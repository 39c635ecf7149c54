"""What tests on several ranks stand on: how a rank ended is told at once, and a crash leaves its
evidence.
"""

import ctypes
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import native_crash, ranks
from tests.helpers.ranks import CrashError, CrashWarning, run_ranks

pytestmark = pytest.mark.distributed


def crash(rank: int) -> None:
    if rank == 1:
        ctypes.string_at(0)
    dist.barrier()


def crash_once(rank: int, mark: Path) -> int:
    if rank == 1 and not mark.exists():
        mark.touch()
        ctypes.string_at(0)
    dist.barrier()
    return rank


def crash_after_the_answer(rank: int) -> int:
    if rank == 1:
        dist.destroy_process_group = os.abort  # type: ignore[assignment]
    return rank


def write_beyond_a_block(rank: int) -> str | None:
    """Write to the byte after a block, which other blocks do not use: only checks of the heap
    see it.
    """
    python = ctypes.pythonapi  # a look-up of malloc itself would not find the one with checks
    python.PyMem_RawMalloc.restype = ctypes.c_void_p
    python.PyMem_RawFree.argtypes = [ctypes.c_void_p]
    block = python.PyMem_RawMalloc(20)
    ctypes.memset(block + 20, 1, 1)
    python.PyMem_RawFree(block)
    return os.environ.get("MALLOC_CHECK_")


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("a bug")
    dist.barrier()


def leave(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.fixture(autouse=True)
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native_crash, "FOLDER", tmp_path)
    monkeypatch.setattr(ranks, "FORGIVEN_CRASHES", 0)
    monkeypatch.setattr(ranks, "_crashes", [])
    return tmp_path


def test_a_crash_of_native_code_fails_with_the_frames_of_its_threads(crashes: Path) -> None:
    with pytest.raises(CrashError) as crash_info:
        run_ranks(crash, 2, checks_heap=False)
    told = str(crash_info.value)
    assert told.startswith("rank 1 was killed by SIGSEGV. Evidence is in ")
    assert "Fatal Python error: Segmentation fault" in told
    assert "in crash\n" in told
    (printed,) = crashes.glob("*/rank1.stderr")
    assert "in crash\n" in printed.read_text()
    # Where the system allows a core, it is kept with its native frames; otherwise the reason is
    # told.
    cores = list(crashes.glob("*/rank1.core"))
    assert cores or "No core" in told
    if cores:
        assert cores[0].stat().st_size
        assert "\n#1 " in told or "No native frames" in told


def test_ranks_run_again_after_the_first_crash_and_fail_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(ranks, "FORGIVEN_CRASHES", 1)
    with pytest.warns(CrashWarning, match=r"the ranks ran again: rank 1 was killed by SIGSEGV"):
        assert run_ranks(crash_once, 2, tmp_path / "first", checks_heap=False) == [0, 1]
    with pytest.raises(CrashError, match=r"rank 1 was killed by SIGSEGV"):
        run_ranks(crash_once, 2, tmp_path / "second", checks_heap=False)


def test_a_crash_after_the_answer_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    told = r"rank 1 was killed by SIGABRT(.|\n)*No (core|native frames: gdb is not installed)"
    with pytest.raises(CrashError, match=told):
        run_ranks(crash_after_the_answer, 2, checks_heap=False)


def test_checks_of_the_heap_see_a_byte_beyond_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert run_ranks(write_beyond_a_block, 1, checks_heap=False) == [None]
    with pytest.raises(
        CrashError, match=r"rank 0 was killed by SIGABRT(.|\n)*write_beyond_a_block"
    ):
        run_ranks(write_beyond_a_block, 1, checks_heap=True)


def test_what_the_second_rank_raised_is_told_though_the_first_waits_for_it() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised:\n(.|\n)*ValueError: a bug"):
        run_ranks(fail, 2, checks_heap=False)


def test_a_rank_that_ends_without_an_answer_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"rank 1 raised:\nit ended without an answer|rank 0 raised"
    ):
        run_ranks(leave, 2, checks_heap=False)

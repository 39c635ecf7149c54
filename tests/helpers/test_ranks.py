"""What tests on several ranks stand on: how a rank ended is told at once, and a crash costs one
more try.
"""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.distributed


def crash_until_marked(rank: int, mark: Path) -> int:
    if rank == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return rank


def crash(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("a bug")
    dist.barrier()


def leave(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def test_a_crash_of_native_code_is_said_and_the_ranks_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rank 0 was killed by SIGSEGV; the ranks run once more"):
        assert run_ranks(crash_until_marked, 2, tmp_path / "mark") == [0, 1]


def test_a_second_crash_fails() -> None:
    told = "rank 1 was killed by SIGSEGV"
    with pytest.warns(UserWarning, match=told), pytest.raises(AssertionError, match=rf"^{told}$"):
        run_ranks(crash, 2)


def test_what_the_second_rank_raised_is_told_though_the_first_waits_for_it() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised:\n(.|\n)*ValueError: a bug"):
        run_ranks(fail, 2)


def test_a_rank_that_ends_without_an_answer_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"rank 1 raised:\nit ended without an answer|rank 0 raised"
    ):
        run_ranks(leave, 2)

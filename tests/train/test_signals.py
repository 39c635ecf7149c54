"""A wish to stop: by signal, by the run's own limit, and in time before Slurm ends the job."""

import os
import signal

import pytest

from llmsys.train.signals import RESERVE_SECONDS, SLURM_END, StopWish


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_the_own_limit_raises_the_wish_and_says_which() -> None:
    clock = Clock()
    wish = StopWish(2.0, {}, clock)
    clock.now += 119
    assert wish.raised() == 0.0
    clock.now += 1
    assert wish.raised() == 1.0
    assert wish.reason == "train.time_limit_minutes=2 are over"


def test_slurms_end_is_met_with_room_for_three_saves() -> None:
    clock = Clock()
    wish = StopWish(0.0, {SLURM_END: str(int(clock.now) + 3600)}, clock)
    wish.longest_save_seconds = 60.0
    clock.now += 3600 - RESERVE_SECONDS - 3 * 60 - 1
    assert wish.raised() == 0.0
    clock.now += 1
    assert wish.raised() == 1.0
    assert wish.reason == f"Slurm ends the job in {RESERVE_SECONDS + 180:.0f} s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_raises_the_wish_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    wish, before = StopWish(environment={}), signal.getsignal(number)
    with wish.listening():
        os.kill(os.getpid(), number)
        assert wish.raised() == 1.0
    assert wish.reason == f"{number.name} came"
    assert signal.getsignal(number) is before

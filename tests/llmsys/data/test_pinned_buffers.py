"""Pinned memory is allocated once per turn and is not overwritten while a step may still be
read.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.data.dataloader import PinnedBuffers, StepLoader

AHEAD = 2


def build_batch(step: int, rows: int = 2) -> Batch:
    documents_BT = torch.tensor([[0, 0, 1, 1]]).repeat(rows, 1)
    tokens_BT = torch.full((rows, 4), step)
    return Batch(
        tokens_BT, tokens_BT + 1, documents_BT, real_BT=documents_BT >= 0
    ).count_documents()


@pytest.fixture
def pinned_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were asked for in pinned memory, which this machine cannot pin."""
    found: list[int] = []
    empty = torch.empty

    def allocate(size: Any, *, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            found.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    return found


def list_tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    batch.map_tensors(collect)
    return found


def test_copies_are_equal_and_their_memory_is_used_again(pinned_sizes: list[int]) -> None:
    buffers = PinnedBuffers(3)
    taken = [buffers.copy_batches([build_batch(step), build_batch(step + 10)]) for step in range(6)]
    assert len(pinned_sizes) == 3
    for step, batches in enumerate(taken[3:], 3):
        for batch, wanted in zip(batches, (build_batch(step), build_batch(step + 10)), strict=True):
            assert all(
                torch.equal(a, b)
                for a, b in zip(list_tensors(batch), list_tensors(wanted), strict=True)
            )
            assert batch.token_counts == wanted.token_counts
    for early, late in zip(taken[:3], taken[3:], strict=True):
        assert [one.data_ptr() for batch in early for one in list_tensors(batch)] == [
            one.data_ptr() for batch in late for one in list_tensors(batch)
        ]


def test_a_larger_step_gets_a_larger_buffer_once(pinned_sizes: list[int]) -> None:
    buffers = PinnedBuffers(1)
    for rows in (2, 40, 39, 40, 44):
        [batch] = buffers.copy_batches([build_batch(7, rows)])
        assert torch.equal(batch.tokens_BT, build_batch(7, rows).tokens_BT)
    assert len(pinned_sizes) == 2


class Source:
    def get_micro_batches(self, step: int) -> list[Batch]:
        return [build_batch(step)]


def test_steps_in_the_queue_and_at_the_consumer_are_not_overwritten(
    pinned_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer holds a step until the loader has copied as far ahead as it can."""
    has_copied, copy_batches = threading.Semaphore(0), PinnedBuffers.copy_batches

    def copy_and_tell(buffers: PinnedBuffers, batches: list[Batch]) -> list[Batch]:
        copied = copy_batches(buffers, batches)
        has_copied.release()
        return copied

    monkeypatch.setattr(PinnedBuffers, "copy_batches", copy_and_tell)
    for step, [batch] in StepLoader(Source(), AHEAD, pinned=True).iter_steps(0, 12):  # type: ignore[arg-type]
        for _ in range(AHEAD + 2 if step == 0 else int(step + AHEAD + 1 < 12)):
            assert has_copied.acquire(timeout=60)
        assert batch.tokens_BT.unique().tolist() == [step]
    assert len(pinned_sizes) == AHEAD + 2

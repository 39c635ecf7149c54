"""Batches carry the lengths of their documents to accelerators, counted on the host."""

import pytest
import torch

from llmsys.data.batch import Batch
from llmsys.data.dataloader import PinnedBuffers, StepLoader
from tests.helpers.tiny_model import build_tiny_tokens

DOCUMENTS = torch.tensor([[0, 0, 0, 1], [7, 7, -1, -1]])
SOURCES = torch.tensor([[0, 0], [0, -1]])


def _build_batch() -> Batch:
    tokens = build_tiny_tokens(2, 4)
    return Batch(tokens, tokens, DOCUMENTS, source_BS=tokens[:, :2], source_documents_BS=SOURCES)


def test_a_batch_on_an_accelerator_has_lengths_and_one_on_a_cpu_does_not_need_them() -> None:
    batch = _build_batch()
    assert batch.to(torch.device("cpu")).document_lengths is None
    moved = batch.to(torch.device("meta"))
    assert moved.document_lengths is not None
    assert moved.source_document_lengths is not None
    assert moved.document_lengths.cu_lengths.device.type == "meta"
    assert moved.document_lengths.max_length == 4  # three, rounded up
    assert moved.to_model_inputs().keys() == batch.to_model_inputs().keys() | {
        "document_lengths",
        "source_document_lengths",
    }


def test_lengths_are_counted_once() -> None:
    counted = _build_batch().count_documents()
    assert counted.document_lengths is not None
    assert counted.document_lengths.cu_lengths.tolist() == [0, 3, 4, 6, 8]
    assert counted.source_document_lengths is not None
    assert counted.source_document_lengths.cu_lengths.tolist() == [0, 2, 3, 4, 4]
    assert counted.count_documents() is counted
    whole = Batch(DOCUMENTS, DOCUMENTS)
    assert whole.count_documents() is whole


@pytest.mark.parametrize("pinned", [False, True])
def test_the_loader_counts_for_accelerators_in_its_thread(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneBatch:
        def get_micro_batches(self, step: int) -> list[Batch]:
            return [_build_batch()]

    # needs an accelerator
    monkeypatch.setattr(PinnedBuffers, "copy_batches", lambda _, batches: batches)
    [(_, [batch])] = StepLoader(OneBatch(), pinned=pinned).iter_steps(0, 1)  # type: ignore[arg-type]
    assert (batch.document_lengths is not None) == pinned

"""Losses of targets, summed by document, on the paths of the host and of accelerators."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.target_documents import RowDocuments, build_target_documents
from llmsys.engine.engine import reduce_token_counts
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.transformer import Transformer
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.host_waits import count_host_waits
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_tokens

ROWS, LENGTH = 4, 16
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "softcap": {"head": {"kind": "lm", "softcap": 5.0}},
    "multi-token prediction": {"multi_token_prediction": {"depth": 2}},
}


def build_named_batch(num_ignored: int) -> Batch:
    """Rows of documents of which the first targets of each row are ignored."""
    tokens_BT = build_tiny_tokens(ROWS, LENGTH + 1)
    targets_BT = tokens_BT[:, 1:].clone()
    targets_BT[:, :num_ignored] = IGNORED
    documents = np.repeat(np.arange(ROWS * LENGTH // 8).reshape(ROWS, -1), 8, axis=1)
    documents[1] = 9
    rows = RowDocuments(np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64), documents)
    batch = Batch(tokens_BT[:, :-1].clone(), targets_BT, torch.from_numpy(documents))
    named = replace(batch, target_documents=build_target_documents(rows))
    assert named.token_counts  # counted by the thread that reads ahead
    return named


def compute_sums(model: Transformer, batch: Batch) -> tuple[float, list[float]]:
    """Return the loss of a micro-batch, and the sums of its spans."""
    counts = reduce_token_counts([batch], torch.device("cpu"))
    loss = build_training_loss(LossConfig())
    share, nats = compute_loss_share(model, model, batch, loss, counts)
    share.backward()
    assert batch.target_documents is not None
    sums = batch.target_documents.sums.sums_2S
    assert sums is not None
    return nats.item(), sums.numpy().tolist()


@pytest.mark.parametrize("num_ignored", [0, 3, 13])
@pytest.mark.parametrize("name", MODELS)
def test_spans_have_the_losses_of_torch_on_host_and_accelerator(
    name: str, num_ignored: int
) -> None:
    model = build_tiny_model(build_tiny_config(**MODELS[name])).train()
    batch = build_named_batch(num_ignored)
    logits_BTV = model(**batch.to_model_inputs()).detach()
    losses_BT = F.cross_entropy(
        logits_BTV.mT, batch.targets_BT, reduction="none", ignore_index=IGNORED
    )
    assert batch.target_documents is not None
    spans_BT = batch.target_documents.spans_BT.long()
    size = int(spans_BT.max()) + 1
    expected = torch.bincount(spans_BT.flatten(), losses_BT.double().flatten(), size).tolist()
    counts = torch.bincount(spans_BT[batch.targets_BT != IGNORED], minlength=size).tolist()
    nats, on_host = compute_sums(model, build_named_batch(num_ignored))
    copied = build_named_batch(num_ignored)
    with count_host_waits() as waits:
        there, on_accelerator = compute_sums(model, copied)
    assert waits.sites == []
    for found in (on_host, on_accelerator):
        assert found[:size] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert found[size:] == counts
    assert sum(on_host[:size]) == pytest.approx(nats, rel=1e-6)
    assert sum(on_accelerator[:size]) == pytest.approx(there, rel=1e-6)


def test_a_loss_is_the_same_with_and_without_its_targets() -> None:
    model = build_tiny_model(build_tiny_config()).train()
    batch = build_named_batch(3)
    named, _ = compute_sums(model, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    counts = reduce_token_counts([batch], torch.device("cpu"))
    bare = replace(batch, target_documents=None)
    loss = build_training_loss(LossConfig())
    share, nats = compute_loss_share(model, model, bare, loss, counts)
    share.backward()
    assert float(nats) == named
    for before, parameter in zip(gradients, model.parameters(), strict=True):
        if before is None or parameter.grad is None:
            assert before is parameter.grad
        else:
            assert torch.equal(before, parameter.grad)

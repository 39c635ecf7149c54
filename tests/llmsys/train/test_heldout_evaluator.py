"""Evaluation of held-out documents: windows packed as in training, bits per byte, and sources by
what they hold.
"""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.train.heldout_evaluator import HeldoutEvaluation, HeldoutEvaluator, combine_results
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.dataset import VOCABULARY, make_dataset

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenShards, Tokenizer]:
    folder = make_dataset(tmp_path_factory.mktemp("data") / "toy")
    return open_tokens(folder, "heldout"), load_tokenizer(folder / "tokenizer" / "tokenizer.model")


def compute_even_logits(batch: Batch) -> Tensor:
    return torch.zeros(*batch.tokens_BT.shape, VOCABULARY)


def evaluate(
    heldout: tuple[TokenShards, Tokenizer], scope: Literal["document", "window"]
) -> tuple[HeldoutEvaluation, list[Batch]]:
    seen: list[Batch] = []

    def compute_logits(batch: Batch) -> Tensor:
        seen.append(batch)
        return compute_even_logits(batch)

    config = RunConfig.model_validate(
        {"batch": {"sequence_length": 32, "sequences": 4, "attention_scope": scope}}
    )
    return HeldoutEvaluator(config, *heldout).evaluate(compute_logits, CPU), seen


def test_documents_see_each_other_only_where_training_lets_them(
    heldout: tuple[TokenShards, Tokenizer],
) -> None:
    _, within_documents = evaluate(heldout, "document")
    numbers = [
        batch.documents_BT[batch.targets_BT != IGNORED]
        for batch in within_documents
        if batch.documents_BT is not None
    ]
    assert torch.cat(numbers).unique().tolist() == list(range(heldout[0].num_documents))
    _, within_windows = evaluate(heldout, "window")
    assert all(batch.documents_BT is None for batch in within_windows)


def test_bits_per_byte_are_those_of_all_nats_and_bytes(
    heldout: tuple[TokenShards, Tokenizer],
) -> None:
    shards, _ = heldout
    found, _ = evaluate(heldout, "document")
    tokens, text_bytes = int(shards.lengths.sum()), int(shards.text_bytes.sum())
    assert (found.evaluated_tokens, found.evaluated_bytes) == (tokens, text_bytes)
    assert found.loss == pytest.approx(math.log(VOCABULARY), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(
        tokens * math.log2(VOCABULARY) / text_bytes, rel=1e-5
    )


def test_sources_weigh_by_their_tokens_and_bytes() -> None:
    one = HeldoutEvaluation(2.0, 1.0, math.exp(2.0), 10, 100, 3.0, 2.0)
    other = HeldoutEvaluation(4.0, 2.0, math.exp(4.0), 30, 100, 1.0, 1.0)
    assert combine_results([one, other]) == HeldoutEvaluation(
        3.5, 1.5, math.exp(3.5), 40, 200, 2.0, 1.5
    )

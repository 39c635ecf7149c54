"""The batch of an evaluation is the config's, its memory is an instant of the estimate, prompts
are refused early.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.errors import ConfigError
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.model.transformer import Transformer
from llmsys.train.evaluator import TargetEvaluator, compute_batch_row_sums
from llmsys.train.run_prediction import build_prediction
from tests.helpers.live_memory import Followed

ROWS, LENGTH, VOCABULARY = 5, 4, 7


class HeldRows:
    num_rows = ROWS

    def get_batch(self, first: int, count: int) -> Batch:
        targets_BT = torch.full((count, LENGTH), -100)
        targets_BT[: max(0, min(count, ROWS - first))] = 1
        return Batch(torch.zeros(count, LENGTH, dtype=torch.int64), targets_BT)


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_a_forward_pass_has_the_sequences_of_the_config(sequences: int) -> None:
    sizes: list[int] = []

    def compute_logits(batch: Batch) -> Tensor:
        sizes.append(len(batch.tokens_BT))
        return torch.zeros(*batch.tokens_BT.shape, VOCABULARY)

    found = TargetEvaluator(HeldRows(), sequences=sequences).evaluate(
        compute_logits, torch.device("cpu")
    )
    assert set(sizes) == {sequences}
    assert found.evaluated_targets == ROWS * LENGTH


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["batch.micro_sequences=0"], 8),
        (["batch.micro_sequences=2"], 2),
        (["batch.micro_sequences=auto"], 8),
        (["batch.sequences=4", "batch.micro_sequences=0"], 4),
        (["batch.micro_sequences=2", "evaluation.micro_sequences=16"], 16),
    ],
)
def test_left_out_it_is_a_training_micro_batch_and_at_most_eight(
    words: list[str], expected: int
) -> None:
    assert (
        load_run_config("train/demo", ["batch.sequences=32", *words]).evaluation_sequences
        == expected
    )


# --- Memory ---


def load_run(**evaluation: int) -> RunConfig:
    model = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2,
             "max_position_embeddings": 128}  # fmt: skip
    batch = {"sequence_length": 128, "sequences": 2, "attention_scope": "window"}
    return RunConfig.model_validate(
        {"model": model, "batch": batch, "train": {"precision": "fp32"}, "evaluation": evaluation}
    )


def find_instant(config: RunConfig, **system: Any) -> int:
    ledger = estimate_peak_memory(
        config,
        config.resolve_layout(1),
        system=MemoryProfile(device="cpu", measured="allocated", **system),
    )
    return next(one.bytes for one in ledger.instants if one.name == "in an evaluation")


@pytest.mark.parametrize("sequences", [4, 16])
def test_the_instant_is_what_lives_in_a_forward_pass_or_somewhat_above(sequences: int) -> None:
    config = load_run(micro_sequences=sequences)
    model = Transformer(config.model)
    tokens_BT = torch.zeros(sequences, 128, dtype=torch.int64)
    with torch.no_grad(), Followed(*model.parameters()) as followed:
        compute_batch_row_sums(model.eval()(tokens_BT), tokens_BT)
    weights = sum(one.nbytes for one in model.parameters())
    moments_and_gathered = find_instant(config) - find_instant(load_run(micro_sequences=1))
    assert followed.peak_bytes < find_instant(config)
    one = (followed.peak_bytes - weights) / sequences
    assert moments_and_gathered == pytest.approx(one * (sequences - 1), rel=0.35)


def test_a_peak_in_an_evaluation_is_told_with_what_helps() -> None:
    config = load_run(micro_sequences=64)
    ledger = estimate_peak_memory(
        config, config.resolve_layout(1), system=MemoryProfile(device="cpu")
    )
    assert ledger.peak_instant == "in an evaluation"
    text = ledger.compute_fit_result(ledger.peak_bytes - 1).text
    assert "runs out in an evaluation: " in text
    assert "evaluation.micro_sequences=32 saves" in text
    told = build_prediction(config, torch.device("cpu"), None)["memory"]
    assert told["instant"] != "in an evaluation"  # what is measured is the peak of steps
    # On a CPU both have the process itself, as what is measured has.
    tensors = {
        name: told[name] - told["process_bytes"] for name in ("evaluation_bytes", "peak_bytes")
    }
    assert tensors["evaluation_bytes"] == ledger.peak_bytes > tensors["peak_bytes"]


def test_another_system_has_no_evaluation() -> None:
    config = load_run()
    ledger = estimate_peak_memory(
        config, config.resolve_layout(1), system=MemoryProfile(evaluation="none")
    )
    assert "in an evaluation" not in [one.name for one in ledger.instants]


# --- Prompts ---


def test_prompts_that_cannot_be_continued_are_refused_before_the_run() -> None:
    words = ["model.moe.routing.kind=expert_choice", "layout.expert=1"]
    rule = (
        r"generation\.prompts: \d+ prompts cannot be completed with "
        r"model\.moe\.routing\.kind=expert_choice: .*Use generation\.prompts=\[\], or "
        r"model\.moe\.routing\.kind=token_choice or capacity\."
    )
    with pytest.raises(ConfigError, match=rule):
        load_run_config("train/demo", [*words, "generation.prompts=[The town]"])
    assert load_run_config("train/demo", [*words, "generation.prompts=[]"]).model.moe is not None

"""What `llmsys estimate` says of encoders, decoders, both together, and windows packed with
documents.
"""

import json
from typing import Any

import pytest

from llmsys.config.batch import BatchConfig
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.flops import count_flops
from llmsys.estimate.run_estimate import estimate_run, list_tensor_counts
from llmsys.estimate.summary_table import format_estimate
from llmsys.launch.main import main
from tests.helpers.model_sections import PAIRS, SHAPE, VARIANTS

BATCH = {"sequence_length": 24, "target_sequence_length": 16, "sequences": 3}


def run_of(changes: dict[str, Any]) -> RunConfig:
    model = ModelConfig.model_validate(SHAPE | changes)
    scope = "window" if model.mixes_documents else "document"
    return RunConfig(
        model=model, batch=BatchConfig.model_validate(BATCH | {"attention_scope": scope})
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_architecture_has_an_estimate_with_the_same_keys(changes: dict[str, Any]) -> None:
    config = run_of(changes)
    result = estimate_run(config)
    assert result.model_fields_set == {
        "parameters",
        "batch",
        "flops",
        "memory",
        "run",
        "precision",
        "unknown",
    }
    assert result.memory is not None
    assert result.memory.state_bytes["total"] == 16 * result.parameters.total
    assert result.memory.activation_bytes_estimated["blocks"] > 0
    explained = result.model_copy(update={"tensors": list_tensor_counts(config)})
    text = format_estimate(explained)
    assert text.count(f"{result.parameters.total:,}") >= 2, "below the tensors too"


def test_an_encoder_decoder_reads_sources_and_predicts_targets() -> None:
    config = run_of(PAIRS["original"])
    result = estimate_run(config)
    lengths = {
        "sequence_length": 24,
        "target_length": 16,
        "sequences": 3,
        "tokens": 48,
        "documents": None,
    }
    assert result.batch.model_dump() == lengths
    assert result.flops.forward == count_flops(config.model, 24, 3, target_length=16).forward
    assert "3 sequences of 24 source and 16 target tokens" in format_estimate(result)


def test_one_stack_has_one_length() -> None:
    result = estimate_run(run_of({}))
    assert (result.batch.target_length, result.batch.tokens) == (None, 3 * 24)


def test_packed_documents_cost_less(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "estimate",
        "model/demo-moe",
        "batch.sequence_length=512",
        "batch.sequences=1",
        "--json",
    ]
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out)["flops"]
    assert main([*command, "--documents", "100,28"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["batch"]["documents"] == [100, 28]
    layers, width, pairs = 4, 256, 4 * (100 * 101 // 2 + 28 * 29 // 2)
    assert alone["forward"] - packed["flops"]["forward"] == 4 * layers * width * (
        512 * 513 // 2 - pairs
    )
    assert alone["conventions"]["full"] == packed["flops"]["conventions"]["full"]


@pytest.mark.parametrize("text", ["0", "100,-1", "many", ""])
def test_what_is_no_list_of_lengths_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "model/demo-moe", f"--documents={text}"]) == 2
    assert (
        f"{text!r} is not a list of document lengths in tokens. Use, for example, 512 or 100,300."
        in capsys.readouterr().err
    )

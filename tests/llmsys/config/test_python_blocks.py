"""What a model section with attention or feed-forward of the user's own code refuses, and what
ties a checkpoint to the code.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from tests.helpers.model_sections import SHAPE as TINY

SHAPE = TINY | {"max_position_embeddings": 512}

ATTENTION: dict[str, Any] = {"attention": {"kind": "python", "path": "own.py:Own"}}
FEED: dict[str, Any] = {"feed_forward": {"kind": "python", "path": "own.py:Own"}}
both = pytest.mark.parametrize("section", [ATTENTION, FEED], ids=["attention", "feed_forward"])

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"layout": {"tensor": 2}}, "2 is not proven with a kind: python"),
    "context": ({"layout": {"context": 2}}, "2 is not proven with a kind: python"),
    "pipeline": ({"layout": {"pipeline": 2}}, "2 is not proven with a kind: python"),
    "expert": ({"layout": {"expert": 2}}, "Use expert=1 with shard or replicate"),
    "compile": ({"train": {"compile": "block"}}, "block is not proven with a kind: python"),
    "fp8": ({"train": {"matmul_dtype": "fp8"}}, "is not proven with a kind: python"),
    "bitwise": (
        {"train": {"reproducibility": "bitwise"}},
        "bitwise is not proven with a kind: python",
    ),
}


@both
@pytest.mark.parametrize(("changes", "message"), RUNS.values(), ids=RUNS)
def test_an_axis_or_mode_that_is_not_proven_is_refused_by_name(
    section: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "every": 2}
    model = SHAPE | section | {"moe": moe, "num_hidden_layers": 2}
    RunConfig.model_validate({"model": model})
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"model": model} | changes)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "recurrence": ({"recurrence": {"kind": "fixed"}}, "recurrence: .*kind=python is not proven"),
    "reversible": ({"residual": {"kind": "reversible"}}, "residual.kind: .*kind=python is not"),
    "mup": (
        {"parametrization": {"kind": "mup", "base_hidden_size": 8}},
        "parametrization.kind: .*kind=python is not proven",
    ),
    "predictions": ({"multi_token_prediction": {"depth": 1}}, "multi_token_prediction: .*python"),
    "two stacks": ({"family": "encoder_decoder"}, "python"),
}


@both
@pytest.mark.parametrize(("changes", "message"), MODELS.values(), ids=MODELS)
def test_an_architecture_that_is_not_proven_is_refused_by_name(
    section: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(SHAPE | section | changes)


@pytest.mark.parametrize("position", ["alibi", "relative_bias", "transformer_xl"])
def test_positions_that_change_scores_are_refused(position: str) -> None:
    changes = {"position": {"kind": position}, "num_key_value_heads": 4}
    with pytest.raises(ValidationError, match=f"{position} changes scores"):
        ModelConfig.model_validate(SHAPE | ATTENTION | changes)


def test_experts_are_built_in() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ValidationError, match="expert"):
        ModelConfig.model_validate(SHAPE | {"moe": moe | {"expert": FEED["feed_forward"]}})


@pytest.mark.parametrize("key", ["attention", "feed_forward"])
def test_a_changed_file_is_another_trajectory(key: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("a = 1\n")
    section = {key: {"kind": "python", "path": f"{path}:Own"}}
    config = RunConfig.model_validate({"model": SHAPE | section, "train": {"precision": "fp32"}})
    first = config.trajectory_settings["model"][key]["digest"]
    assert config.trajectory_settings["model"][key]["digest"] == first
    path.write_text("a = 2\n")
    assert config.trajectory_settings["model"][key]["digest"] != first


@both
def test_blocks_are_not_compiled_where_the_device_decides(section: dict[str, Any]) -> None:
    config = RunConfig.model_validate({"model": SHAPE | section, "train": {"precision": "fp32"}})
    assert config.resolve_compile(has_triton=True).train.compile == "none"
    plain = RunConfig.model_validate({"model": SHAPE})
    assert plain.resolve_compile(has_triton=True).train.compile == "block"

"""The estimate of attention and feed-forward of the user's own code is that of the built-in ones
that they write down again.
"""

from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.flops import CONVENTIONS, count_flops
from llmsys.estimate.model_tensors import count_parameters, list_model_tensors
from llmsys.estimate.run_estimate import estimate_run
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import ActivationCheckpointMode
from tests.helpers.counted_flops import SEQUENCES, SOURCE, count_forward_flops
from tests.helpers.device_profile import build_abacus
from tests.helpers.model_sections import SHAPE
from tests.helpers.own_blocks import GATED, NORMED, SOFTMAX
from tests.helpers.saved_bytes import compare_saved_bytes

OWN: dict[str, Any] = {"attention": SOFTMAX, "feed_forward": GATED}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "first_dense_layers": 1,
        }
    },
    "encoder": {"family": "encoder", "head": {"kind": "mlm"}},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_built_in_kinds_and_of_the_module(
    changes: dict[str, Any],
) -> None:
    own = ModelConfig.model_validate(SHAPE | changes | OWN)
    built_in = ModelConfig.model_validate(SHAPE | changes)
    assert list_model_tensors(own) == list_model_tensors(built_in)
    assert count_parameters(own) == count_parameters(built_in)
    assert count_parameters(own).total == sum(one.numel() for one in Transformer(own).parameters())


def test_weights_of_norms_are_counted_as_norms() -> None:
    own = ModelConfig.model_validate(SHAPE | {"feed_forward": NORMED})
    components = {one.name.partition(".")[2]: one.component for one in list_model_tensors(own)}
    kinds = {name.rpartition(".feed_forward.")[2]: kind for name, kind in components.items()}
    assert kinds["inner_norm.weight"] == "norms"
    assert kinds["down_proj.weight"] == "feed_forward"


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("documents", [(), (4, 5)], ids=["row", "documents"])
def test_flops_are_those_of_the_built_in_kinds(convention: Any, documents: tuple[int, ...]) -> None:
    own, built_in = (ModelConfig.model_validate(SHAPE | changes) for changes in (OWN, {}))
    found, wanted = (
        count_flops(one, 9, 3, convention, documents=documents, recompute="full")
        for one in (own, built_in)
    )
    assert found == wanted


def test_flops_are_those_that_torch_counts_in_the_whole_model() -> None:
    own = ModelConfig.model_validate(SHAPE | OWN)
    assert count_flops(own, SOURCE, SEQUENCES, "full").forward == count_forward_flops(own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_saved_bytes_are_those_that_a_pass_keeps(
    policy: ActivationCheckpointMode, documents: bool, dtype: torch.dtype
) -> None:
    measured, estimated = compare_saved_bytes(OWN, dtype, policy, documents=documents)
    assert estimated == pytest.approx(measured, rel=0.05)


def test_an_estimate_of_a_run_has_parameters_flops_memory_and_time() -> None:
    model = SHAPE | OWN
    config = RunConfig.model_validate({"model": model, "batch": {"sequence_length": 16}})
    plain = RunConfig.model_validate({"model": SHAPE, "batch": {"sequence_length": 16}})
    found, wanted = (estimate_run(one, device=build_abacus()) for one in (config, plain))
    assert found.parameters == wanted.parameters
    assert found.model_dump().keys() == wanted.model_dump().keys()

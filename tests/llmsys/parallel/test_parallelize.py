"""Sharded over two ranks, every family gives the losses and gradients of one process; tied
weights stay one tensor.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.model.initialization import build_initializer, initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.parallelize import apply_fsdp, materialize_parameters
from tests.helpers.model_choices import LATENT, build_choice_config, build_source
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)

NAMES = [
    "original",
    "t5",
    "bart",
    "two vocabularies, deepnorm",
    "sandwich, xl",
    "bert",
    "alibi",
    "latent",
]
CONFIGS = {name: build_choice_config(name) for name in NAMES}
CONFIGS["predicts further"] = build_tiny_config(
    multi_token_prediction={"depth": 2}, tie_word_embeddings=True
)
CONFIGS["deepseek"] = build_tiny_moe_config(
    {"first_dense_layers": 1}, attention=LATENT, num_key_value_heads=4, multi_token_prediction={}
)


def gradients(model: Transformer) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of fixed weights on all that the model gives, and the gradient of every
    parameter.
    """
    output = model(build_tiny_tokens(), **build_source(model.config))
    total = torch.zeros(())
    for index, logits in enumerate([output, *model.predicted]):
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(index))
        total = total + (logits * weights).sum()
    total.backward()
    return total.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def sharded(rank: int, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    device = torch.device("cpu")
    for name in names:
        config = CONFIGS[name]
        with torch.device("meta"):
            model = Transformer(config)
        apply_fsdp(
            model, build_device_meshes(ParallelLayout().resolve(2, config), device), torch.float32
        )
        materialize_parameters(model, device, build_initializer(config, 3))
        loss, found = gradients(model)
        tied = model.head is not None and model.head.weight is model.embed.weight
        results[name] = (
            loss.numpy(),
            {key: value.full_tensor().numpy() for key, value in found.items()},  # type: ignore[attr-defined]
            tied,
        )
    return results


@pytest.mark.distributed
def test_sharded_gradients_equal_those_of_one_process() -> None:
    for results in run_ranks(sharded, 2, list(CONFIGS)):
        for name, (loss, found, tied) in results.items():
            config = CONFIGS[name]
            model = Transformer(config)
            initialize_parameters(model, seed=3)
            expected_loss, expected = gradients(model)
            assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5), name
            assert tied is config.tie_word_embeddings, name
            assert found.keys() == expected.keys() == dict(model.named_parameters()).keys(), name
            largest = max(float(value.norm()) for value in expected.values())
            for key, value in expected.items():
                # Both ranks read the same rows, so the sum over ranks is twice the gradient.
                ours = torch.from_numpy(found[key]) / 2
                close = (
                    compute_relative_error(ours, value) < 1e-5
                    or float((ours - value).norm()) < 1e-7 * largest
                )
                assert close, (name, key)

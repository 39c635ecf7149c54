"""Starting values are a pure function of name and seed; meta-device construction, ties and
buffers survive.
"""

import math
import subprocess
import sys

import pytest
import torch

from llmsys.model.initialization import (
    build_initializer,
    compute_initial_value,
    initialize_parameters,
)
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import build_tiny_config, build_tiny_moe_config, build_tiny_tokens

CONFIG = build_tiny_moe_config(
    {"num_shared_experts": 1, "first_dense_layers": 1}, initializer_range=0.02
)


def test_values_depend_on_name_and_seed_and_nothing_else() -> None:
    one, other = Transformer(CONFIG), Transformer(CONFIG)
    initialize_parameters(one, seed=3)
    torch.manual_seed(99)
    initialize_parameters(other, seed=3)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, compute_initial_value(CONFIG, name, a.shape, 3)), name
    initialize_parameters(other, seed=4)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_values_are_the_same_in_another_process() -> None:
    code = (
        "from tests.helpers.tiny_model import build_tiny_config\nfrom llmsys.model.initialization "
        "import compute_initial_value\nvalue = compute_initial_value(build_tiny_config(), "
        "'blocks.1.attention.q_proj.weight', (40, 30), 7)\nprint(value.double().sum().item())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    here = (
        compute_initial_value(build_tiny_config(), "blocks.1.attention.q_proj.weight", (40, 30), 7)
        .double()
        .sum()
        .item()
    )
    assert float(there) == here


def test_no_two_parameters_start_alike() -> None:
    model = Transformer(CONFIG)
    initialize_parameters(model, seed=0)
    starts = [tuple(p.flatten()[:4].tolist()) for p in model.parameters() if p.dim() > 1]
    assert len(set(starts)) == len(starts)


def test_a_slice_has_the_bits_of_the_whole_parameter_and_nothing_is_drawn_for_a_checkpoint() -> (
    None
):
    model = Transformer(CONFIG)
    for draws in (True, False):
        initial = build_initializer(CONFIG, 3, draws=draws)
        for name, parameter in model.named_parameters():
            region = [(length // 3, length // 2) for length in parameter.shape]
            expected = compute_initial_value(CONFIG, name, parameter.shape, 3)
            for dim, (begin, size) in enumerate(region):
                expected = expected.narrow(dim, begin, size)
            found = initial(name, parameter.shape, region)
            assert found.shape == expected.shape
            assert torch.equal(found, expected) if draws else bool(found.isnan().all()), name


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embed.weight", 0.02),
        ("blocks.0.attention.q_proj.weight", 0.02),
        ("blocks.1.feed_forward.router.weight", 0.02),
        ("blocks.1.feed_forward.experts.up_proj", 0.02),
        ("blocks.0.attention.o_proj.weight", 0.02 / math.sqrt(2 * 2)),
        ("blocks.0.feed_forward.down_proj.weight", 0.02 / math.sqrt(2 * 2)),
        ("blocks.1.feed_forward.experts.down_proj", 0.02 / math.sqrt(2 * 2)),
        ("blocks.1.feed_forward.shared.down_proj.weight", 0.02 / math.sqrt(2 * 2)),
    ],
)
def test_matrices_are_normal_and_residual_outputs_are_scaled_down(
    name: str, deviation: float
) -> None:
    value = compute_initial_value(CONFIG, name, (300, 300), 0)
    assert value.dtype == torch.float32
    assert float(value.std()) == pytest.approx(deviation, rel=0.02)
    assert abs(float(value.mean())) < deviation / 50


def test_norms_start_at_one_and_biases_at_zero() -> None:
    model = Transformer(build_tiny_config(norm={"kind": "layernorm"}))
    initialize_parameters(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_the_meta_device_equals_one_built_in_memory(tied: bool) -> None:
    config = build_tiny_moe_config(tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(config)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    for tensor in model.buffers():
        tensor.fill_(torch.nan)
    initialize_parameters(model, seed=1)
    expected = Transformer(config)
    initialize_parameters(expected, seed=1)
    assert torch.equal(model(build_tiny_tokens()), expected(build_tiny_tokens()))
    assert (model.head.weight is model.embed.weight) is tied
    assert ("head.weight" in dict(model.named_parameters())) is not tied


def test_parameter_names_are_those_that_checkpoints_rely_on() -> None:
    names = set(dict(Transformer(CONFIG).named_parameters()))
    block = {f"attention.{x}_proj.weight" for x in "qkvo"} | {
        "attention_norm.weight",
        "feed_forward_norm.weight",
    }
    dense = {f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")}
    experts = {f"feed_forward.experts.{x}_proj" for x in ("gate", "up", "down")}
    shared = {f"feed_forward.shared.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert names == (
        {"embed.weight", "norm.weight", "head.weight"}
        | {f"blocks.0.{name}" for name in block | dense}
        | {f"blocks.1.{name}" for name in block | experts | shared | {"feed_forward.router.weight"}}
    )
    saved = set(Transformer(CONFIG).state_dict())
    assert saved - names == {"blocks.1.feed_forward.balance_bias_E"}

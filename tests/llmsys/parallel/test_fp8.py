"""fp8 products: which layers they are for, and who is told that there are none. (No GPU is
needed to know.)
"""

import importlib.util
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.errors import LaunchError
from llmsys.model.transformer import Transformer
from llmsys.parallel.fp8 import convert_experts_to_fp8, convert_to_fp8, list_fp8_layers, require_fp8
from llmsys.parallel.fp8_emulation import compute_fp8_matmul

MODEL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1, "multi_token_prediction": {},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_gate": True,
            "shared_intermediate_size": 48, "first_dense_layers": 1},
}  # fmt: skip


def test_linear_maps_of_blocks_whose_widths_suit_and_no_others() -> None:
    layers = list_fp8_layers(Transformer(ModelConfig.model_validate(MODEL)))
    shared = [f"feed_forward.shared.{name}_proj" for name in ("gate", "up", "down")]
    of_blocks = [
        ["attention.q_proj", "attention.o_proj"],
        ["attention.q_proj", "attention.o_proj", *shared],
    ]
    places = [
        ("blocks.0", of_blocks[0]),
        ("blocks.1", of_blocks[1]),
        ("prediction.0.block", of_blocks[1]),
    ]
    # Not keys and values, which are 8 wide, nor the dense feed-forward with its 40 channels.
    assert layers == [f"{place}.{name}" for place, names in places for name in names]


def test_a_cpu_is_told_that_it_has_none() -> None:
    with pytest.raises(
        LaunchError, match=r"fp8: this run uses cpu, which has no fp8 matmuls\. Use an Ada"
    ):
        require_fp8(torch.device("cpu"))


def test_an_older_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(
        get_device_capability=lambda device: (8, 0), get_device_name=lambda device: "A100"
    )
    monkeypatch.setattr(torch, "cuda", known)
    with pytest.raises(
        LaunchError,
        match=r"A100 has compute capability 8\.0, but fp8 matmuls need 8\.9\. Use an Ada",
    ):
        require_fp8(torch.device("cuda"))


def test_a_machine_without_torchao_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (9, 0)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError,
        match=r"torchao is not installed\. Install llmsys\[fp8\], or set train\.matmul_dtype=",
    ):
        require_fp8(torch.device("cuda"))


def test_block_scales_need_a_gpu_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(
        get_device_capability=lambda device: (8, 9), get_device_name=lambda device: "L40"
    )
    monkeypatch.setattr(torch, "cuda", known)
    message = (
        r"train\.expert_matmul_dtype=fp8_block: L40 has compute capability 8\.9, but fp8 matmuls "
        r"need 9\.0\. Use a"
    )
    with pytest.raises(LaunchError, match=message):
        require_fp8(torch.device("cuda"), "fp8_block", "train.expert_matmul_dtype")


def test_shards_of_matrices_must_suit_too() -> None:
    model = Transformer(ModelConfig.model_validate(MODEL))
    assert len(list_fp8_layers(model, "fp8", 2)) < len(list_fp8_layers(model))
    assert not list_fp8_layers(model, "fp8_block")


def test_converted_layers_keep_names_and_shapes_and_round_a_little() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig.model_validate(MODEL)).bfloat16()
    tokens = torch.arange(12).view(2, 6)
    before, outputs = (
        {name: p.shape for name, p in model.named_parameters()},
        [model(tokens).detach()],
    )
    convert_to_fp8(model, emulate=True)
    outputs.append(model(tokens).detach())
    convert_experts_to_fp8(model, "fp8", emulate=True)
    outputs.append(model(tokens).detach())
    assert before == {name: p.shape for name, p in model.named_parameters()}
    for plain, rounded in pairwise(outputs):
        assert 0 < float((rounded - plain).norm() / plain.norm()) < 0.1


ALL = 10**6


def round_one_by_one(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix rounded to e4m3 in rectangles of up to `rows` × `columns`, each with its own
    scale: the plain twin.
    """
    result = torch.empty_like(x)
    for top in range(0, len(x), rows):
        for left in range(0, x.shape[1], columns):
            part = x[top : top + rows, left : left + columns]
            scale = part.abs().max().clamp(min=1e-12) / 448
            if ALL in (rows, columns):
                scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
            result[top : top + rows, left : left + columns] = (part / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    return result


@pytest.mark.parametrize(
    ("in_blocks", "length", "forward_tile", "backward_tile"),
    [(True, 128, (128, 128), (128, 128)), (False, ALL, (ALL, 1), (1, ALL))],
)
def test_every_product_rounds_along_the_dim_that_it_sums_over(
    in_blocks: bool, length: int, forward_tile: tuple[int, int], backward_tile: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    ends = [0, 130, 130, 200]  # the second of three experts has no rows
    x, weight = torch.randn(200, 256).requires_grad_(), torch.randn(3, 256, 128).requires_grad_()
    gradient = torch.randn(200, 128)
    y = compute_fp8_matmul(x, weight, torch.tensor(ends[1:], dtype=torch.int32), in_blocks)
    y.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    for expert, (start, end) in enumerate(pairwise(ends)):
        rows, w, dy = x.detach()[start:end], weight.detach()[expert], gradient[start:end]
        expected = round_one_by_one(rows, 1, length) @ round_one_by_one(w, *forward_tile)
        torch.testing.assert_close(y[start:end], expected)
        expected = round_one_by_one(dy, 1, length) @ round_one_by_one(w, *backward_tile).T
        torch.testing.assert_close(x.grad[start:end], expected)
        expected = round_one_by_one(rows, length, 1).T @ round_one_by_one(dy, length, 1)
        torch.testing.assert_close(weight.grad[expert], expected)


def test_the_emulation_rounds_as_torchao_does() -> None:
    """Where torchao is installed. Its block scales need a GPU, also where it emulates the
    product.
    """
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    x, linear = (
        torch.randn(256, 256, dtype=torch.bfloat16),
        torch.nn.Linear(256, 128, bias=False, dtype=torch.bfloat16),
    )
    config = replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    theirs = Float8Linear.from_float(linear, config)(x)
    ours = compute_fp8_matmul(
        x, linear.weight.t()[None], torch.tensor([256], dtype=torch.int32), False
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)

"""fp8 products: which layers they are for, and who is told that there are none. (No GPU is needed to know.)"""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.errors import LaunchError
from llmsys.model.transformer import Transformer
from llmsys.parallel.fp8 import convert_to_fp8, list_fp8_layers, require_fp8

MODEL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "multi_token_prediction": {},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_gate": True,
            "shared_intermediate_size": 48, "first_dense_layers": 1},
}  # fmt: skip


def test_linear_maps_of_blocks_whose_widths_suit_and_no_others() -> None:
    layers = list_fp8_layers(Transformer(ModelConfig.model_validate(MODEL)))
    shared = [f"feed_forward.shared.{name}_proj" for name in ("gate", "up", "down")]
    of_blocks = [["attention.q_proj", "attention.o_proj"], ["attention.q_proj", "attention.o_proj", *shared]]
    places = [("blocks.0", of_blocks[0]), ("blocks.1", of_blocks[1]), ("prediction.0.block", of_blocks[1])]
    # Not keys and values, which are 8 wide, nor the dense feed-forward with its 40 channels.
    assert layers == [f"{place}.{name}" for place, names in places for name in names]


def test_a_cpu_is_told_that_it_has_none() -> None:
    with pytest.raises(LaunchError, match=r"fp8: this run uses cpu, which has no fp8 matmuls\. Use an Ada"):
        require_fp8(torch.device("cpu"))


def test_an_older_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(get_device_capability=lambda device: (8, 0), get_device_name=lambda device: "A100")
    monkeypatch.setattr(torch, "cuda", known)
    with pytest.raises(LaunchError, match=r"A100 has compute capability 8\.0, but fp8 matmuls need 8\.9\. Use an Ada"):
        require_fp8(torch.device("cuda"))


def test_a_machine_without_torchao_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (9, 0)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError, match=r"torchao is not installed\. Install llmsys\[fp8\], or set train\.matmul_dtype="
    ):
        require_fp8(torch.device("cuda"))


def test_converted_layers_keep_names_and_shapes_and_round_a_little() -> None:
    pytest.importorskip("torchao")
    model = Transformer(ModelConfig.model_validate(MODEL)).bfloat16()
    tokens = torch.arange(12).view(2, 6)
    before, exact = {name: p.shape for name, p in model.named_parameters()}, model(tokens)
    convert_to_fp8(model, emulate=True)
    assert before == {name: p.shape for name, p in model.named_parameters()}
    error = float(((model(tokens) - exact).norm() / exact.norm()).detach())
    assert 0 < error < 0.1

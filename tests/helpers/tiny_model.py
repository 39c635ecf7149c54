"""Tiny models with random weights large enough to matter, and tokens for them."""

from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer

DENSE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide enough that attention, gates and routers leave their linear range.
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def build_tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(DENSE | changes)


def build_tiny_moe_config(experts: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return build_tiny_config(moe=EXPERTS | (experts or {}), **changes)


def build_tiny_model(config: ModelConfig, seed: int = 0) -> Transformer:
    model = Transformer(config)
    initialize_parameters(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # ones and zeros would hide a missing weight or bias
            if parameter.dim() == 1 or not parameter.any():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            elif "router" in name:
                parameter *= 3
        if hasattr(model.head, "fixed_bias_V"):
            model.head.fixed_bias_V += 0.2 * torch.randn(
                model.head.fixed_bias_V.shape,  # type: ignore[arg-type]
                generator=generator,
            )
        for layer in model.list_moe_layers():
            if layer.config.balance.kind == "bias":
                layer.balance_bias_E += 0.2 * torch.randn(
                    layer.balance_bias_E.shape, generator=generator
                )
    return model


def build_tiny_tokens(
    rows: int = 2, length: int = 7, vocab_size: int = 37, seed: int = 0
) -> Tensor:
    return torch.randint(
        0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def compute_relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    assert value is not None
    assert reference is not None
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))

"""Linear maps, norms, activations and feed-forward layers, for one vector at a time."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig

Parameters = Mapping[str, Tensor]


def apply_linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    y = p[f"{name}.weight"] @ x
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def compute_rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt()


def apply_norm(config: ModelConfig, p: Parameters, name: str, x: Tensor) -> Tensor:
    weight = p[f"{name}.weight"]
    if config.norm.kind == "rmsnorm":
        return compute_rms(x, config.norm.eps) * (weight + 1 if config.norm.unit_offset else weight)
    centred = x - x.mean()
    scaled = centred / (centred.pow(2).mean() + config.norm.eps).sqrt() * weight
    return scaled + p[f"{name}.bias"] if config.norm.bias else scaled


def apply_activation(kind: str, x: Tensor) -> Tensor:
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "squared_relu":
        return x.clamp(min=0) ** 2
    if kind == "silu":
        return x / (1 + (-x).exp())
    if kind == "gelu_tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def apply_dense(config: ModelConfig, p: Parameters, name: str, x: Tensor) -> Tensor:
    kind = config.feed_forward.kind
    up = apply_linear(p, f"{name}.up_proj", x)
    if f"{name}.gate_proj.weight" not in p:
        return apply_linear(p, f"{name}.down_proj", apply_activation(kind, up))
    gate = apply_linear(p, f"{name}.gate_proj", x)
    if kind == "clamped_swiglu":
        limit, alpha = config.feed_forward.limit, config.feed_forward.alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return apply_linear(p, f"{name}.down_proj", (up + 1) * gate / (1 + (-alpha * gate).exp()))
    plain = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[kind]
    return apply_linear(p, f"{name}.down_proj", apply_activation(plain, gate) * up)

"""Train a dense decoder by a loop as people write it themselves: AdamW, warm-up, cosine, clipping.

    python -m tools.bench.race.plain_loop SPEC

Reads rows of `rows.py` and the spec, a JSON object; writes the result. Imports nothing of llmsys.
The model is a decoder as LLaMA in torch alone; matrices decay, vectors do not, and maps into the
residual stream start smaller, as in GPT-2.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.bench.race.judge import EvaluationSteps, Judge, write_result

# B rows, T positions, D channels, H heads, C channels of a head


class Block(nn.Module):
    """Causal attention and SwiGLU, each behind a norm, around a residual stream."""

    def __init__(self, width: int, inner: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.channels = heads, pairs, width // heads
        self.before_attention = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * pairs * self.channels, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """Return the stream after the block."""
        rows, length, _ = x_BTD.shape
        normed_BTD = self.before_attention(x_BTD)
        q = self.q(normed_BTD).view(rows, length, self.heads, -1).transpose(1, 2)
        kv = self.kv(normed_BTD).view(rows, length, 2 * self.pairs, -1).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos_TC, sin_TC),
            rotate(k, cos_TC, sin_TC).repeat_interleave(self.heads // self.pairs, dim=1),
            v.repeat_interleave(self.heads // self.pairs, dim=1),
            is_causal=True,
        )
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x_BTD)).chunk(2, dim=-1)
        out: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return out


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Return queries or keys rotated by their positions."""
    first, second = x_BHTC.chunk(2, dim=-1)
    return x_BHTC * cos_TC + torch.cat([-second, first], dim=-1) * sin_TC


class Decoder(nn.Module):
    """A decoder with a tied embedding."""

    def __init__(self, shape: dict[str, int], length: int) -> None:
        super().__init__()
        width, layers = shape["hidden_size"], shape["num_hidden_layers"]
        heads, pairs = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.embed = nn.Embedding(shape["vocab_size"], width)
        inner = shape["intermediate_size"]
        self.blocks = nn.ModuleList(Block(width, inner, heads, pairs) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        channels = width // heads
        rates_C = 10_000.0 ** -(torch.arange(0, channels, 2) / channels)
        angles_TC = torch.outer(torch.arange(length).float(), torch.cat([rates_C, rates_C]))
        self.register_buffer("cos_TC", angles_TC.cos(), persistent=False)
        self.register_buffer("sin_TC", angles_TC.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if is_output else 1))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        x_BTD = self.embed(ids_BT)
        length = ids_BT.shape[1]
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TC[:length], self.sin_TC[:length])  # type: ignore[index]
        return F.linear(self.norm(x_BTD), self.embed.weight)


def compute_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then a cosine to a tenth."""
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def build_optimizer(model: Decoder) -> torch.optim.AdamW:
    """Return AdamW that decays matrices alone, in torch's fused form."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def train(spec: dict[str, Any]) -> None:
    """Train to the target or the end of the budget, and write the result."""
    torch.manual_seed(spec["seed"])
    judge = Judge(Path(spec["rows"]), spec["target"])
    with np.load(spec["rows"]) as file:
        rows = torch.from_numpy(file["train"].astype(np.int64))
    sequences, length = spec["sequences"], rows.shape[1] - 1
    looks = EvaluationSteps(spec["steps"], spec["look_every"], spec["look_first"])
    model = Decoder(spec["shape"], length)
    optimizer = build_optimizer(model)
    for step in range(1, spec["steps"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = compute_rate(step, spec["steps"], spec["warmup"], spec["learning_rate"])
        batch = rows[(step - 1) * sequences : step * sequences]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} of {spec['steps']}, loss {float(loss.detach()):.3f}", flush=True)
        is_last = step == spec["steps"]
        if looks.is_due(step) and judge.look(model, step * sequences * length, is_last=is_last):
            break
    write_result(Path(spec["result"]), spec, judge, sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

"""The experts of one layer: E independent SwiGLU networks, computed for all their tokens by grouped matrix products.

Traps of grouped_mm that this file keeps from its callers: offsets are int32; every row must start on a multiple of 16
bytes; rows behind the last offset are not written; the backward refuses gradients with stride 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.errors import ConfigError

# M rows grouped by expert, E experts (of this process), D width, F width inside an expert

# 16 bytes are 8 numbers of bfloat16, the narrowest dtype we train in.
ROW_MULTIPLE = 8


class Experts(nn.Module):
    """E SwiGLU networks with stacked weights; the weights may be DTensors sharded over E."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        """Refuse widths whose rows grouped_mm cannot address, with ConfigError."""
        super().__init__()
        _check_width("hidden_size", hidden_size)
        _check_width("moe.moe_intermediate_size", intermediate_size)
        self.gate_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply expert e to its `counts_E[e]` consecutive rows; the counts must sum to M, and any of them may be 0."""
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        gate_MF = F.grouped_mm(x_MD, _local(self.gate_proj), offs=offsets_E)
        up_MF = F.grouped_mm(x_MD, _local(self.up_proj), offs=offsets_E)
        y_MD = F.grouped_mm(F.silu(gate_MF) * up_MF, _local(self.down_proj), offs=offsets_E)
        if y_MD.requires_grad:
            y_MD.register_hook(_with_plain_strides)
        return y_MD

    def extra_repr(self) -> str:
        """Counts and widths, for printing the module."""
        experts, hidden, intermediate = self.gate_proj.shape
        return f"{experts} experts, {hidden} -> {intermediate} -> {hidden}"


def _local(weight: Tensor) -> Tensor:
    """This process's part of a distributed weight; a plain weight is returned as it is."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def _with_plain_strides(gradient: Tensor) -> Tensor:
    """A gradient that the backward of grouped_mm accepts: `y.sum().backward()` sends one that is expanded."""
    # Without rows, `contiguous` sees nothing to do.
    return gradient.contiguous() if gradient.numel() else gradient.new_zeros(gradient.shape)


def _check_width(field: str, width: int) -> None:
    if width % ROW_MULTIPLE:
        nearest = max(ROW_MULTIPLE, round(width / ROW_MULTIPLE) * ROW_MULTIPLE)
        raise ConfigError(
            f"model.{field}={width} cannot be used with experts: grouped matrix products need a multiple of "
            f"{ROW_MULTIPLE}. Use {nearest}."
        )

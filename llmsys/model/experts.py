"""The experts of one layer: E independent feed-forward networks, computed by grouped matrix
products.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.feed_forward import FeedForwardConfig, SwigluConfig
from llmsys.model import cpu_kernels
from llmsys.model.feed_forward import apply_gated_activation
from llmsys.model.local_tensor import get_local_tensor

# M rows grouped by expert, E experts (of this process), D width, F width inside an expert

# grouped_mm wants rows that start on a multiple of 16 bytes: 8 elements of bfloat16, the narrowest
# dtype we train in.
ROW_MULTIPLE = 8


class GroupedExperts(nn.Module):
    """E feed-forward networks of one kind, with weights stacked as (E, in, out) and biases as (E,
    out).

    The parameters may be DTensors sharded over E. Widths that are not multiples of 8 are computed
    by a slower loop over the experts.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        config: FeedForwardConfig | None = None,
    ) -> None:
        """Build E experts with `width` inner channels each; `config` None is SwiGLU."""
        super().__init__()
        self.config = config or SwigluConfig()
        self.num_experts = num_experts
        self.widths = (hidden_size, width)
        self.multiply_groups: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Product of rows with the weights of their expert, given the end of each expert's rows;
        set from outside.
        """
        self.grouped = hidden_size % ROW_MULTIPLE == 0 and width % ROW_MULTIPLE == 0
        projections = self.config.projections
        shapes = dict.fromkeys(projections, (hidden_size, width)) | {"down": (width, hidden_size)}
        for name in projections:
            self.register_parameter(
                f"{name}_proj", nn.Parameter(torch.empty(num_experts, *shapes[name]))
            )
            nn.init.normal_(getattr(self, f"{name}_proj"), std=shapes[name][0] ** -0.5)
        for name in projections if self.config.bias else ():
            self.register_parameter(
                f"{name}_bias", nn.Parameter(torch.zeros(num_experts, shapes[name][1]))
            )

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            x_MD: rows sorted by expert.
            counts_E: rows of each expert; any of them may be 0, and they sum to M.

        Returns:
            (M, D) in the order of the input.
        """
        apply = (
            _GroupedLinear(self, counts_E, len(x_MD))
            if self.grouped
            else _LoopedLinear(self, counts_E)
        )
        gate_MF = apply("gate", x_MD) if self.config.is_gated else None
        return apply("down", self.apply_activation(gate_MF, apply("up", x_MD)))

    def apply_activation(self, gate_MF: Tensor | None, up_MF: Tensor) -> Tensor:
        """Return the element-wise operation between the projections."""
        return apply_gated_activation(self.config, gate_MF, up_MF)

    def get_weight(self, name: str) -> Tensor:
        """Return this rank's weights of `gate`, `up` or `down`, (E, in, out)."""
        return get_local_tensor(getattr(self, f"{name}_proj"))

    def get_bias(self, name: str) -> Tensor | None:
        """Return this rank's biases of `gate`, `up` or `down`, (E, out); None without biases."""
        return get_local_tensor(getattr(self, f"{name}_bias")) if self.config.bias else None

    def extra_repr(self) -> str:
        """Return the counts and widths that `print(module)` shows."""
        hidden, width = self.widths
        return f"{self.num_experts} experts, {hidden} -> {width} -> {hidden}, {self.config.kind}"


class _GroupedLinear:
    """x W_e + b_e for the rows of every expert e, in one call."""

    def __init__(self, experts: GroupedExperts, counts_E: Tensor, num_rows: int) -> None:
        self.experts = experts
        self.counts_E = counts_E
        self.num_rows = num_rows
        self.offsets_E = counts_E.cumsum(0).to(torch.int32)  # grouped_mm takes int32 only

    def __call__(self, name: str, x_MD: Tensor) -> Tensor:
        weight_EDF = self.experts.get_weight(name)
        bias_EF = self.experts.get_bias(name)
        y_MF = self._compute_products(x_MD, weight_EDF)
        if y_MF.requires_grad:
            y_MF.register_hook(_make_contiguous)
        if bias_EF is None:
            return y_MF
        bias_MF: Tensor = _RowBiasFunction.apply(bias_EF, self.counts_E, self.num_rows)  # type: ignore[no-untyped-call]
        return y_MF + bias_MF

    def _compute_products(self, x_MD: Tensor, weight_EDF: Tensor) -> Tensor:
        if self.experts.multiply_groups is not None:
            return self.experts.multiply_groups(x_MD, weight_EDF, self.offsets_E)
        # Compiled, torch's own takes bfloat16 only.
        is_unsupported = torch.compiler.is_compiling() and x_MD.dtype != torch.bfloat16
        if is_unsupported or cpu_kernels.is_cpu_grouped_mm_supported(x_MD):
            y_MF: Tensor = cpu_kernels.compute_grouped_mm(x_MD, weight_EDF, self.offsets_E)
            return y_MF
        return F.grouped_mm(x_MD, weight_EDF, offs=self.offsets_E)


class _LoopedLinear:
    """x W_e + b_e for the rows of every expert e, one expert at a time, for any width."""

    def __init__(self, experts: GroupedExperts, counts_E: Tensor) -> None:
        self.experts = experts
        self.counts = counts_E.tolist()

    def __call__(self, name: str, x_MD: Tensor) -> Tensor:
        weight_EDF = self.experts.get_weight(name)
        bias_EF = self.experts.get_bias(name)
        parts = [
            x @ weight
            for x, weight in zip(x_MD.split(self.counts), weight_EDF.unbind(), strict=True)
        ]
        if bias_EF is not None:
            parts = [y + bias for y, bias in zip(parts, bias_EF.unbind(), strict=True)]
        return torch.cat(parts)


class _RowBiasFunction(torch.autograd.Function):
    """The bias of each row's expert, with a deterministic backward: autograd's would add
    atomically, in any order.
    """

    @staticmethod
    def forward(ctx: Any, bias_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(counts_E)
        return bias_EF.repeat_interleave(counts_E, dim=0, output_size=num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (counts_E,) = ctx.saved_tensors
        # float32 sums, as of any weight. Not `unsafe`, torch would read the lengths on the host to
        # check them.
        sums_EF = torch.segment_reduce(
            gradients[0].float().contiguous(),
            "sum",
            lengths=counts_E,
            axis=0,
            initial=0,
            unsafe=True,
        )
        return sums_EF.to(gradients[0].dtype), None, None


def _make_contiguous(gradient: Tensor) -> Tensor:
    """Return a gradient that the backward of grouped_mm accepts: not the expanded one of
    `y.sum().backward()`.
    """
    # An empty tensor counts as contiguous whatever its strides.
    return gradient.contiguous() if gradient.numel() else gradient.new_zeros(gradient.shape)

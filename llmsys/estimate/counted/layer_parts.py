"""Parameter tensors of the parts of a block: attention, feed-forward, experts, norms,
convolutions and scans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsys.config.module_tensors import Component, Input, ParameterTensor, iter_linear_parameters

Rows = Iterator[ParameterTensor]


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of grouped-query attention."""

    hidden: int
    heads: int
    pairs: int
    width: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"

    @property
    def products(self) -> int:
        """Channels that a pair of query and key multiplies, in scores and in the weighted sum."""
        return 2 * self.heads * self.width


def iter_attention(name: str, sizes: AttentionSizes) -> Rows:
    """Yield queries, keys, values, output, and the norms of queries and keys."""
    queries, pairs = sizes.heads * sizes.width, sizes.pairs * sizes.width
    outputs = {"q_proj": queries, "k_proj": pairs, "v_proj": pairs}
    for part, width in outputs.items():
        yield from iter_linear_parameters(
            f"{name}.{part}", width, sizes.hidden, sizes.bias, "attention"
        )
    yield from iter_linear_parameters(
        f"{name}.o_proj", sizes.hidden, queries, sizes.output_bias, "attention"
    )
    if sizes.qk_norm != "none":
        norms = {
            "head": ((sizes.width,), (sizes.width,)),
            "full": ((queries,), (pairs,)),
            "per_head": ((sizes.heads, sizes.width), (sizes.pairs, sizes.width)),
        }[sizes.qk_norm]
        for part, shape in zip(("q_norm", "k_norm"), norms, strict=True):
            yield ParameterTensor(f"{name}.{part}.weight", shape, "norms")


def iter_feed_forward(
    name: str,
    hidden: int,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    component: Component = "feed_forward",
    input_kind: Input = "token",
) -> Rows:
    """Yield a dense feed-forward: three matrices, or two without a gate."""
    for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
        yield from iter_linear_parameters(
            f"{name}.{part}", width, hidden, bias, component, input_kind
        )
    yield from iter_linear_parameters(
        f"{name}.down_proj", hidden, width, bias, component, input_kind
    )


def iter_experts(name: str, experts: int, hidden: int, width: int, *, gated: bool = True) -> Rows:
    """Yield the matrices of all experts, without biases."""
    up = 2 * width if gated else width
    yield ParameterTensor(
        f"{name}.experts.up_proj", (experts, up, hidden), "experts", input="visit"
    )
    yield ParameterTensor(
        f"{name}.experts.down_proj", (experts, hidden, width), "experts", input="visit"
    )


def iter_router(name: str, experts: int, hidden: int) -> Rows:
    """Yield the router of a layer of experts."""
    yield ParameterTensor(f"{name}.gate.weight", (experts, hidden), "router", input="token")


def iter_norm(name: str, channels: int, *, bias: bool = False) -> Rows:
    """Yield the weight of a norm, and its bias."""
    yield ParameterTensor(f"{name}.weight", (channels,), "norms")
    if bias:
        yield ParameterTensor(f"{name}.bias", (channels,), "norms")


def iter_convolution(name: str, channels: int, kernel: int, *, bias: bool) -> Rows:
    """Yield a causal convolution of each channel on its own."""
    yield ParameterTensor(f"{name}.weight", (channels, 1, kernel), "recurrent", input="token")
    if bias:
        yield ParameterTensor(f"{name}.bias", (channels,), "recurrent")


@dataclass(frozen=True)
class SelectiveScanSizes:
    """Sizes of a Mamba mixer (Gu 2023). `norms`: time steps, inputs and outputs are normalized,
    as in Jamba.
    """

    hidden: int
    inner: int
    state: int
    kernel: int
    rank: int
    conv_bias: bool
    bias: bool
    norms: bool = False


def iter_selective_scan(name: str, sizes: SelectiveScanSizes) -> Rows:
    """Yield the tensors of a Mamba mixer."""
    inner = sizes.inner
    yield ParameterTensor(f"{name}.A_log", (inner, sizes.state), "recurrent")
    yield ParameterTensor(f"{name}.D", (inner,), "recurrent")
    yield from iter_convolution(f"{name}.conv1d", inner, sizes.kernel, bias=sizes.conv_bias)
    yield from iter_linear_parameters(
        f"{name}.in_proj", 2 * inner, sizes.hidden, sizes.bias, "recurrent"
    )
    yield from iter_linear_parameters(
        f"{name}.x_proj", sizes.rank + 2 * sizes.state, inner, False, "recurrent"
    )
    yield from iter_linear_parameters(f"{name}.dt_proj", inner, sizes.rank, True, "recurrent")
    yield from iter_linear_parameters(
        f"{name}.out_proj", sizes.hidden, inner, sizes.bias, "recurrent"
    )
    if sizes.norms:
        for part, width in (("dt", sizes.rank), ("b", sizes.state), ("c", sizes.state)):
            yield from iter_norm(f"{name}.{part}_layernorm", width)

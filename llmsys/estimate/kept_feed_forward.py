"""The tensors that feed-forward layers make for one block: dense ones, and mixtures of experts."""

from collections.abc import Iterator

from llmsys.config.feed_forward import GATED, FeedForwardConfig
from llmsys.config.model import ModelConfig
from llmsys.config.moe import MoeConfig
from llmsys.estimate.kept import Extent, Tensor
from llmsys.estimate.kept_attention import reduced_product
from llmsys.estimate.parameters import visits_of


def feed_forward_tensors(model: ModelConfig, layer: int, extent: Extent, *, output_saved: bool) -> Iterator[Tensor]:
    """The feed-forward layer of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _mixture(model, model.moe, extent, output_saved)
        return
    dropped = model.dropout.activation > 0
    yield from _inside(model.feed_forward, "", extent.inner(model.intermediate_size), dropped)
    if dropped:
        yield Tensor("dropped channels", extent.inner(model.intermediate_size), "pointwise")
    yield from reduced_product("feed-forward projection", model, extent, output_saved)


def _inside(config: FeedForwardConfig, of: str, size: int, dropped: bool = False) -> Iterator[Tensor]:
    """Between the outer maps; `size` are the bytes of one tensor."""
    if config.kind == "relu":  # keeps its output, not its input
        yield Tensor(f"up{of}", size, "product", saved=False)
        yield Tensor(f"activated{of}", size, "pointwise")
        return
    if config.kind not in GATED:
        yield Tensor(f"up{of}", size, "product")
        yield Tensor(f"activated{of}", size, "pointwise", saved=not dropped)
        return
    yield Tensor(f"gate{of}", size, "product")
    yield Tensor(f"up{of}", size, "product")
    if config.kind == "clamped_swiglu":  # clamped gate, its sigmoid, up + 1
        yield Tensor(f"clamped gate and up{of}", 3 * size, "fused")
    yield Tensor(f"activated gate{of}", size, "fused")
    yield Tensor(f"gate times up{of}", size, "pointwise", saved=not dropped)


def _mixture(model: ModelConfig, moe: MoeConfig, extent: Extent, output_saved: bool) -> Iterator[Tensor]:
    """Router, sorted visits, experts, and the weighted sum. Visits are taken to be even over the ranks."""
    visits, hidden, width = visits_of(moe), model.hidden_size, moe.moe_intermediate_size
    yield from _router(moe, visits, hidden, extent)
    yield Tensor("sorted visits", extent.stream(visits * hidden), "collective" if extent.dealt else "pointwise")
    yield from _inside(moe.expert, " of experts", extent.stream(visits * width))
    yield Tensor("expert outputs", extent.stream(visits * hidden), "product")
    if moe.shared_width:
        yield from _inside(moe.expert, " of shared experts", extent.stream(moe.shared_width))
        saved = moe.shared_gate
        yield Tensor("shared expert output", extent.stream(hidden), "product", saved=saved, needed=saved)
    yield Tensor("sum of experts", extent.stream(hidden), "pointwise", saved=output_saved)


def _router(moe: MoeConfig, visits: float, hidden: int, extent: Extent) -> Iterator[Tensor]:
    """Everything about the choice is in float32; a visit has its expert, weight and place."""
    if extent.value != 4:
        yield Tensor("float32 input of the router", extent.stream(hidden, 4), "fused")
        yield Tensor("float32 weight of the router", 4 * hidden * moe.num_experts, "fused")
    yield Tensor("router logits", extent.stream(moe.num_experts, 4), "product", saved=False)
    balanced = moe.balance.kind == "auxiliary_loss"
    yield Tensor("router scores", extent.stream(moe.num_experts * (4 if balanced else 1), 4), "pointwise")
    yield Tensor("chosen experts and weights", extent.stream(visits, 28), "pointwise")
    yield Tensor("visits of each expert", 4 * moe.num_experts, "pointwise")

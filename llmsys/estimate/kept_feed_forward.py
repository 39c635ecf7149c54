"""The tensors that feed-forward layers make for one block: dense ones, and mixtures of experts."""

from collections.abc import Iterator

from llmsys.config.feed_forward import GATED, FeedForwardConfig
from llmsys.config.model import ModelConfig
from llmsys.config.moe import MoeConfig
from llmsys.estimate.kept import ActivationShape, SavedTensor
from llmsys.estimate.kept_attention import iter_output_projection
from llmsys.estimate.parameters import count_expert_visits


def iter_feed_forward_tensors(model: ModelConfig, layer: int, extent: ActivationShape, *, output_saved: bool) -> Iterator[SavedTensor]:
    """The feed-forward layer of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _iter_moe_tensors(model, model.moe, extent, output_saved)
        return
    dropped = model.dropout.activation > 0
    yield from _iter_inner_tensors(model.feed_forward, "", extent.compute_sharded_bytes(model.intermediate_size), dropped)
    if dropped:
        yield SavedTensor("dropped channels", extent.compute_sharded_bytes(model.intermediate_size), "pointwise")
    yield from iter_output_projection("feed-forward projection", model, extent, output_saved)


def _iter_inner_tensors(config: FeedForwardConfig, of: str, size: int, dropped: bool = False) -> Iterator[SavedTensor]:
    """Between the outer maps; `size` are the bytes of one tensor."""
    if config.kind == "relu":  # keeps its output, not its input
        yield SavedTensor(f"up{of}", size, "product", saved=False)
        yield SavedTensor(f"activated{of}", size, "pointwise")
        return
    if config.kind not in GATED:
        yield SavedTensor(f"up{of}", size, "product")
        yield SavedTensor(f"activated{of}", size, "pointwise", saved=not dropped)
        return
    yield SavedTensor(f"gate{of}", size, "product")
    yield SavedTensor(f"up{of}", size, "product")
    if config.kind == "clamped_swiglu":  # clamped gate, its sigmoid, up + 1
        yield SavedTensor(f"clamped gate and up{of}", 3 * size, "fused")
    yield SavedTensor(f"activated gate{of}", size, "fused")
    yield SavedTensor(f"gate times up{of}", size, "pointwise", saved=not dropped)


def _iter_moe_tensors(model: ModelConfig, moe: MoeConfig, extent: ActivationShape, output_saved: bool) -> Iterator[SavedTensor]:
    """Router, sorted visits, experts, and the weighted sum. Visits are taken to be even over the ranks."""
    visits, hidden, width = count_expert_visits(moe), model.hidden_size, moe.moe_intermediate_size
    yield from _iter_router_tensors(moe, visits, hidden, extent)
    yield SavedTensor("sorted visits", extent.compute_residual_bytes(visits * hidden), "collective" if extent.is_sharded else "pointwise")
    yield from _iter_inner_tensors(moe.expert, " of experts", extent.compute_residual_bytes(visits * width))
    yield SavedTensor("expert outputs", extent.compute_residual_bytes(visits * hidden), "product")
    if moe.shared_expert_size:
        yield from _iter_inner_tensors(moe.expert, " of shared experts", extent.compute_residual_bytes(moe.shared_expert_size))
        saved = moe.shared_gate
        yield SavedTensor("shared expert output", extent.compute_residual_bytes(hidden), "product", saved=saved, is_needed=saved)
    yield SavedTensor("sum of experts", extent.compute_residual_bytes(hidden), "pointwise", saved=output_saved)


def _iter_router_tensors(moe: MoeConfig, visits: float, hidden: int, extent: ActivationShape) -> Iterator[SavedTensor]:
    """Everything about the choice is in float32; a visit has its expert, weight and place."""
    if extent.value != 4:
        yield SavedTensor("float32 input of the router", extent.compute_residual_bytes(hidden, 4), "fused")
        yield SavedTensor("float32 weight of the router", 4 * hidden * moe.num_experts, "fused")
    yield SavedTensor("router logits", extent.compute_residual_bytes(moe.num_experts, 4), "product", saved=False)
    balanced = moe.balance.kind == "auxiliary_loss"
    yield SavedTensor("router scores", extent.compute_residual_bytes(moe.num_experts * (4 if balanced else 1), 4), "pointwise")
    yield SavedTensor("chosen experts and weights", extent.compute_residual_bytes(visits, 28), "pointwise")
    yield SavedTensor("visits of each expert", 4 * moe.num_experts, "pointwise")

"""The tensors that feed-forward layers make for one block: dense ones, and mixtures of experts.

All tensors of one block: norms and the residual stream around attention and feed-forward.
"""

from collections.abc import Iterator

from llmsys.config.feed_forward import GATED, FeedForwardConfig
from llmsys.config.model import ModelConfig
from llmsys.config.moe import MoeConfig
from llmsys.estimate.parameter_count import count_expert_visits
from llmsys.estimate.saved_attention import (
    compute_norm_statistics_bytes,
    iter_attention_tensors,
    iter_cross_attention_tensors,
    iter_output_projection,
)
from llmsys.estimate.saved_tensors import ActivationShape, Maker, SavedTensor


def iter_feed_forward_tensors(
    model: ModelConfig, layer: int, extent: ActivationShape, *, output_saved: bool
) -> Iterator[SavedTensor]:
    """The feed-forward layer of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _iter_moe_tensors(model, model.moe, extent, output_saved)
        return
    dropped = model.dropout.activation > 0
    yield from _iter_inner_tensors(
        model.feed_forward, "", extent.compute_sharded_bytes(model.intermediate_size), dropped
    )
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


def _iter_moe_tensors(
    model: ModelConfig, moe: MoeConfig, extent: ActivationShape, output_saved: bool
) -> Iterator[SavedTensor]:
    """Router, sorted visits, experts, and the weighted sum. Visits are taken to be even over the ranks."""
    visits, hidden, width = count_expert_visits(moe), model.hidden_size, moe.moe_intermediate_size
    yield from _iter_router_tensors(moe, visits, hidden, extent)
    yield SavedTensor(
        "sorted visits",
        extent.compute_residual_bytes(visits * hidden),
        "collective" if extent.is_sharded else "pointwise",
    )
    yield from _iter_inner_tensors(moe.expert, " of experts", extent.compute_residual_bytes(visits * width))
    yield SavedTensor("expert outputs", extent.compute_residual_bytes(visits * hidden), "product")
    if moe.shared_expert_size:
        yield from _iter_inner_tensors(
            moe.expert, " of shared experts", extent.compute_residual_bytes(moe.shared_expert_size)
        )
        saved = moe.shared_gate
        yield SavedTensor(
            "shared expert output", extent.compute_residual_bytes(hidden), "product", saved=saved, is_needed=saved
        )
    yield SavedTensor("sum of experts", extent.compute_residual_bytes(hidden), "pointwise", saved=output_saved)


def _iter_router_tensors(moe: MoeConfig, visits: float, hidden: int, extent: ActivationShape) -> Iterator[SavedTensor]:
    """Everything about the choice is in float32; a visit has its expert, weight and place."""
    if extent.value != 4:
        yield SavedTensor("float32 input of the router", extent.compute_residual_bytes(hidden, 4), "fused")
        yield SavedTensor("float32 weight of the router", 4 * hidden * moe.num_experts, "fused")
    yield SavedTensor("router logits", extent.compute_residual_bytes(moe.num_experts, 4), "product", saved=False)
    balanced = moe.balance.kind == "auxiliary_loss"
    yield SavedTensor(
        "router scores", extent.compute_residual_bytes(moe.num_experts * (4 if balanced else 1), 4), "pointwise"
    )
    yield SavedTensor("chosen experts and weights", extent.compute_residual_bytes(visits, 28), "pointwise")
    yield SavedTensor("visits of each expert", 4 * moe.num_experts, "pointwise")


def list_saved_block_tensors(model: ModelConfig, layer: int, extent: ActivationShape) -> list[list[SavedTensor]]:
    """The tensors of block `layer`, in the order in which they are made, branch by branch.

    What enters the block belongs to its first branch; what it gives belongs to the block behind it.
    """
    names = ["attention", *(["cross_attention"] if model.family == "encoder_decoder" else []), "feed_forward"]
    return [list(_iter_branch_tensors(model, layer, name, extent, first=not index)) for index, name in enumerate(names)]


def _iter_branch_tensors(
    model: ModelConfig, layer: int, name: str, extent: ActivationShape, *, first: bool
) -> Iterator[SavedTensor]:
    kind = model.residual.kind
    behind = kind in ("sandwich", "output")  # a norm directly behind the branch keeps what the branch gives
    own_input = first or kind not in ("parallel", "post", "deepnorm")
    if own_input:  # a sum of the stream, which a norm or the products keep
        yield SavedTensor(
            "block input" if first else f"stream before {name}",
            _compute_residual_bytes(model, extent),
            "input" if first else "sum",
        )
    if kind in ("pre", "sandwich") or (kind == "parallel" and (first or getattr(model.residual, "norms", 1) == 2)):
        yield from iter_saved_norm_tensors(model, f"{name} norm", extent)
        maker: Maker = "gather" if extent.tensor > 1 else "pointwise"
        saved = name != "feed_forward" or _is_input_saved(model, layer, extent)
        yield SavedTensor(f"normed input of {name}", extent.compute_input_bytes(model.hidden_size), maker, saved)
    elif extent.tensor > 1 and extent.system.gathered == "kept":
        yield SavedTensor(f"gathered input of {name}", extent.compute_gathered_bytes(model.hidden_size), "gather")
    if name == "attention":
        yield from iter_attention_tensors(model, layer, extent, output_saved=behind)
    elif name == "cross_attention":
        yield from iter_cross_attention_tensors(model, extent, output_saved=behind)
    else:
        yield from iter_feed_forward_tensors(model, layer, extent, output_saved=behind)
    if behind:
        yield from iter_saved_norm_tensors(model, f"{name} output norm", extent)
    if model.dropout.residual:
        yield SavedTensor(
            f"dropout mask behind {name}",
            extent.compute_residual_bytes(1) * model.hidden_size
            if extent.is_on_cpu
            else extent.compute_residual_bytes(model.hidden_size, 1),
            "pointwise",
        )
    if kind in ("post", "deepnorm"):
        yield SavedTensor(f"sum behind {name}", _compute_residual_bytes(model, extent), "sum")
        yield from iter_saved_norm_tensors(model, f"{name} norm", extent)
        if name != "feed_forward":
            yield SavedTensor(f"normed sum behind {name}", _compute_residual_bytes(model, extent), "pointwise")


def iter_saved_norm_tensors(model: ModelConfig, name: str, extent: ActivationShape) -> Iterator[SavedTensor]:
    """What a norm keeps beside its input: statistics, and where it is made of several operations an unscaled copy."""
    norm, hidden = model.norm, model.hidden_size
    yield SavedTensor(
        f"statistics of {name}",
        extent.compute_residual_bytes(1, compute_norm_statistics_bytes(model, extent)),
        "pointwise",
    )
    if norm.kind == "layernorm":
        return
    if norm.unit_offset and extent.value != 4:
        yield SavedTensor(f"float32 input of {name}", extent.compute_residual_bytes(hidden, 4), "fused")
    if extent.is_on_cpu and (norm.unit_offset or extent.value == 4):
        yield SavedTensor(f"unscaled {name}", extent.compute_residual_bytes(hidden, 4), "fused")


def _compute_residual_bytes(model: ModelConfig, extent: ActivationShape) -> int:
    return extent.compute_residual_bytes(model.hidden_size)


def _is_input_saved(model: ModelConfig, layer: int, extent: ActivationShape) -> bool:
    """Whether a feed-forward keeps its input: experts keep sorted copies, and their router one in float32."""
    moe = model.moe if model.is_moe_layer(layer) else None
    return moe is None or extent.value == 4 or bool(moe.shared_expert_size)

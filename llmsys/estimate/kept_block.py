"""All tensors of one block: norms and the residual stream around attention and feed-forward."""

from collections.abc import Iterator

from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import ActivationShape, Maker, SavedTensor
from llmsys.estimate.kept_attention import iter_attention_tensors, iter_cross_attention_tensors, compute_norm_statistics_bytes
from llmsys.estimate.kept_feed_forward import iter_feed_forward_tensors


def list_saved_block_tensors(model: ModelConfig, layer: int, extent: ActivationShape) -> list[list[SavedTensor]]:
    """The tensors of block `layer`, in the order in which they are made, branch by branch.

    What enters the block belongs to its first branch; what it gives belongs to the block behind it.
    """
    names = ["attention", *(["cross_attention"] if model.family == "encoder_decoder" else []), "feed_forward"]
    return [list(_iter_branch_tensors(model, layer, name, extent, first=not index)) for index, name in enumerate(names)]


def _iter_branch_tensors(model: ModelConfig, layer: int, name: str, extent: ActivationShape, *, first: bool) -> Iterator[SavedTensor]:
    kind = model.residual.kind
    behind = kind in ("sandwich", "output")  # a norm directly behind the branch keeps what the branch gives
    own_input = first or kind not in ("parallel", "post", "deepnorm")
    if own_input:  # a sum of the stream, which a norm or the products keep
        yield SavedTensor(
            "block input" if first else f"stream before {name}", _compute_residual_bytes(model, extent), "input" if first else "sum"
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
            extent.compute_residual_bytes(1) * model.hidden_size if extent.is_on_cpu else extent.compute_residual_bytes(model.hidden_size, 1),
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
    yield SavedTensor(f"statistics of {name}", extent.compute_residual_bytes(1, compute_norm_statistics_bytes(model, extent)), "pointwise")
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

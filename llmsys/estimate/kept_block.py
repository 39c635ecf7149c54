"""All tensors of one block: norms and the residual stream around attention and feed-forward."""

from collections.abc import Iterator

from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import Extent, Maker, Tensor
from llmsys.estimate.kept_attention import attention_tensors, cross_attention_tensors, statistics_bytes
from llmsys.estimate.kept_feed_forward import feed_forward_tensors


def block_kept(model: ModelConfig, layer: int, extent: Extent) -> list[list[Tensor]]:
    """The tensors of block `layer`, in the order in which they are made, branch by branch.

    What enters the block belongs to its first branch; what it gives belongs to the block behind it.
    """
    names = ["attention", *(["cross_attention"] if model.family == "encoder_decoder" else []), "feed_forward"]
    return [list(_branch(model, layer, name, extent, first=not index)) for index, name in enumerate(names)]


def _branch(model: ModelConfig, layer: int, name: str, extent: Extent, *, first: bool) -> Iterator[Tensor]:
    kind = model.residual.kind
    behind = kind in ("sandwich", "output")  # a norm directly behind the branch keeps what the branch gives
    own_input = first or kind not in ("parallel", "post", "deepnorm")
    if own_input:  # a sum of the stream, which a norm or the products keep
        yield Tensor(
            "block input" if first else f"stream before {name}", _stream(model, extent), "input" if first else "sum"
        )
    if kind in ("pre", "sandwich") or (kind == "parallel" and (first or getattr(model.residual, "norms", 1) == 2)):
        yield from norm_tensors_kept(model, f"{name} norm", extent)
        maker: Maker = "gather" if extent.tensor > 1 else "pointwise"
        saved = name != "feed_forward" or _reads_input(model, layer, extent)
        yield Tensor(f"normed input of {name}", extent.read(model.hidden_size), maker, saved)
    elif extent.tensor > 1 and extent.system.gathered == "kept":
        yield Tensor(f"gathered input of {name}", extent.gathered(model.hidden_size), "gather")
    if name == "attention":
        yield from attention_tensors(model, layer, extent, output_saved=behind)
    elif name == "cross_attention":
        yield from cross_attention_tensors(model, extent, output_saved=behind)
    else:
        yield from feed_forward_tensors(model, layer, extent, output_saved=behind)
    if behind:
        yield from norm_tensors_kept(model, f"{name} output norm", extent)
    if model.dropout.residual:
        yield Tensor(
            f"dropout mask behind {name}",
            extent.stream(1) * model.hidden_size if extent.on_cpu else extent.stream(model.hidden_size, 1),
            "pointwise",
        )
    if kind in ("post", "deepnorm"):
        yield Tensor(f"sum behind {name}", _stream(model, extent), "sum")
        yield from norm_tensors_kept(model, f"{name} norm", extent)
        if name != "feed_forward":
            yield Tensor(f"normed sum behind {name}", _stream(model, extent), "pointwise")


def norm_tensors_kept(model: ModelConfig, name: str, extent: Extent) -> Iterator[Tensor]:
    """What a norm keeps beside its input: statistics, and where it is made of several operations an unscaled copy."""
    norm, hidden = model.norm, model.hidden_size
    yield Tensor(f"statistics of {name}", extent.stream(1, statistics_bytes(model, extent)), "pointwise")
    if norm.kind == "layernorm":
        return
    if norm.unit_offset and extent.value != 4:
        yield Tensor(f"float32 input of {name}", extent.stream(hidden, 4), "fused")
    if extent.on_cpu and (norm.unit_offset or extent.value == 4):
        yield Tensor(f"unscaled {name}", extent.stream(hidden, 4), "fused")


def _stream(model: ModelConfig, extent: Extent) -> int:
    return extent.stream(model.hidden_size)


def _reads_input(model: ModelConfig, layer: int, extent: Extent) -> bool:
    """Whether a feed-forward keeps its input: experts keep sorted copies, and their router one in float32."""
    moe = model.moe if model.is_moe_layer(layer) else None
    return moe is None or extent.value == 4 or bool(moe.shared_width)

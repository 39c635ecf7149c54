"""What one micro-batch keeps on one rank from its forward to its backward, block by block.

The tensors themselves are listed in `kept_attention`, `kept_feed_forward` and `kept_block`; here they meet the batch,
the layout and the recompute policy of a run. It depends on kernels, so it is named an estimate wherever it is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmsys.config.layout import Layout
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.kept import Extent, Tensor
from llmsys.estimate.kept_block import block_kept
from llmsys.estimate.memory import compute_bytes
from llmsys.estimate.system import OURS, System

Branches = list[list[Tensor]]


@dataclass(frozen=True)
class BlockKind:
    """Blocks with equal tensors: `count` of them, first of the model's order. `place` is their parameters' name."""

    name: str
    place: str
    layers: tuple[int, ...]
    branches: Branches

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of one of these blocks."""
        return [tensor for branch in self.branches for tensor in branch]


def batch_lengths(config: RunConfig) -> tuple[int, int]:
    """Tokens of one window at the encoder and at the decoder; the same number where there is one stack."""
    length = config.batch.sequence_length
    target = getattr(config.batch, "target_length", None)
    return length, target if target is not None and config.model.family == "encoder_decoder" else length


def micro_batch(config: RunConfig, layout: Layout) -> tuple[int, int]:
    """Sequences of one forward pass of a rank, and how many such passes a step has."""
    share = -(-config.batch.sequences_per_step // layout.data_ranks)
    sequences = config.batch.micro_of(share)
    return sequences, -(-share // sequences)


def extent_of(config: RunConfig, layout: Layout, system: System = OURS) -> Extent:
    """The size of a micro-batch at the decoder, or at the one stack there is."""
    source, length = batch_lengths(config)
    return Extent(
        sequences=micro_batch(config, layout)[0],
        length=length,
        source=source,
        parts=layout.context,
        tensor=layout.tensor,
        value=compute_bytes(config),
        table=_table(config) if system.masks == "table" else "none",
        dealt=layout.expert > 1,
        system=system,
    )


def block_kinds(config: RunConfig, extent: Extent) -> Iterator[BlockKind]:
    """The blocks of every stack, in the order of the forward pass: encoder, decoder, prediction modules."""
    model = config.model
    if model.family == "encoder_decoder":
        source = replace(extent, length=extent.source)
        yield from _stack(model.encoder_shape, "encoder.blocks.", source)
    yield from _stack(model, "blocks.", extent)
    if model.multi_token_prediction is not None:
        last, layers = model.num_hidden_layers - 1, tuple(range(model.multi_token_prediction.depth))
        own = [Tensor("two normed inputs of a prediction module", 2 * extent.stream(model.hidden_size), "pointwise")]
        yield BlockKind("prediction", "prediction.", layers, [own, *block_kept(model, last, extent)])


def _stack(model: ModelConfig, place: str, extent: Extent) -> Iterator[BlockKind]:
    kinds: dict[tuple[bool, bool, str], list[int]] = {}
    for layer in range(model.num_hidden_layers):
        key = (bool(model.moe and model.is_moe_layer(layer)), model.rotates(layer), model.layer_type(layer))
        kinds.setdefault(key, []).append(layer)
    for (mixture, _, layer_type), layers in kinds.items():
        window = model.sliding_window if layer_type == "sliding_attention" else None
        cut = window is not None and window < extent.length and extent.system.masks == "table"
        own = replace(extent, table="windows") if cut and extent.table == "none" else extent
        name = "mixture" if mixture else "dense"
        yield BlockKind(name, place, tuple(layers), block_kept(model, layers[0], own))


def _table(config: RunConfig) -> Literal["none", "documents", "numbers"]:
    """What attention gets: documents or padding to tell apart, or numbers by distance."""
    if config.model.position.kind in ("alibi", "relative_bias"):
        return "numbers"
    separate = config.batch.attend == "document" or config.objective.kind in ("translation", "classification")
    return "documents" if separate else "none"

"""What one micro-batch keeps on one rank from its forward to its backward, block by block.

The tensors themselves are listed in `kept_attention`, `kept_feed_forward` and `kept_block`; here they meet the batch,
the layout and the recompute policy of a run. It depends on kernels, so it is named an estimate wherever it is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.saved_block import list_saved_block_tensors
from llmsys.estimate.saved_tensors import ActivationShape, SavedTensor
from llmsys.estimate.software_profile import OURS, MemoryProfile
from llmsys.estimate.state_memory import get_compute_dtype_bytes

Branches = list[list[SavedTensor]]


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with equal tensors: `count` of them, first of the model's order. `place` is their parameters' name."""

    name: str
    place: str
    layers: tuple[int, ...]
    branches: Branches

    @property
    def saved_tensors(self) -> list[SavedTensor]:
        """All tensors of one of these blocks."""
        return [tensor for branch in self.branches for tensor in branch]


def get_sequence_lengths(config: RunConfig) -> tuple[int, int]:
    """Tokens of one window at the encoder and at the decoder; the same number where there is one stack."""
    length = config.batch.sequence_length
    target = getattr(config.batch, "target_sequence_length", None)
    return length, target if target is not None and config.model.family == "encoder_decoder" else length


def compute_micro_batch(config: RunConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Sequences of one forward pass of a rank, and how many such passes a step has."""
    share = -(-config.batch.sequences_per_step // layout.data_parallel_size)
    sequences = config.batch.resolve_micro_sequences(share)
    return sequences, -(-share // sequences)


def build_activation_shape(config: RunConfig, layout: ParallelLayout, system: MemoryProfile = OURS) -> ActivationShape:
    """The size of a micro-batch at the decoder, or at the one stack there is."""
    source, length = get_sequence_lengths(config)
    return ActivationShape(
        sequences=compute_micro_batch(config, layout)[0],
        length=length,
        source=source,
        parts=layout.context,
        tensor=layout.tensor,
        value=get_compute_dtype_bytes(config),
        table=_get_mask_table_kind(config) if system.masks == "table" else "none",
        is_sharded=layout.expert > 1,
        system=system,
    )


def iter_block_groups(config: RunConfig, extent: ActivationShape) -> Iterator[BlockGroup]:
    """The blocks of every stack, in the order of the forward pass: encoder, decoder, prediction modules."""
    model = config.model
    if model.family == "encoder_decoder":
        source = replace(extent, length=extent.source)
        yield from _iter_stack_groups(model.encoder_model, "encoder.blocks.", source)
    yield from _iter_stack_groups(model, "blocks.", extent)
    if model.multi_token_prediction is not None:
        last, layers = model.num_hidden_layers - 1, tuple(range(model.multi_token_prediction.depth))
        own = [
            SavedTensor(
                "two normed inputs of a prediction module",
                2 * extent.compute_residual_bytes(model.hidden_size),
                "pointwise",
            )
        ]
        yield BlockGroup("prediction", "prediction.", layers, [own, *list_saved_block_tensors(model, last, extent)])


def _iter_stack_groups(model: ModelConfig, place: str, extent: ActivationShape) -> Iterator[BlockGroup]:
    kinds: dict[tuple[bool, bool, str], list[int]] = {}
    for layer in range(model.num_hidden_layers):
        key = (bool(model.moe and model.is_moe_layer(layer)), model.uses_rope(layer), model.get_layer_type(layer))
        kinds.setdefault(key, []).append(layer)
    for (mixture, _, layer_type), layers in kinds.items():
        window = model.sliding_window if layer_type == "sliding_attention" else None
        cut = window is not None and window < extent.length and extent.system.masks == "table"
        own = replace(extent, table="windows") if cut and extent.table == "none" else extent
        name = "mixture" if mixture else "dense"
        yield BlockGroup(name, place, tuple(layers), list_saved_block_tensors(model, layers[0], own))


def _get_mask_table_kind(config: RunConfig) -> Literal["none", "documents", "numbers"]:
    """What attention gets: documents or padding to tell apart, or numbers by distance."""
    if config.model.position.kind in ("alibi", "relative_bias"):
        return "numbers"
    separate = config.batch.attention_scope == "document" or config.objective.kind in ("translation", "classification")
    return "documents" if separate else "none"

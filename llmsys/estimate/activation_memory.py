"""List the tensors that one micro-batch saves on one rank for its backward, block by block.

Combines the tensors of saved_tensors.py with the batch and the layout of a run. The result depends on kernels, so it is
called an estimate wherever it is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.saved_tensor import ActivationShape, SavedTensor
from llmsys.estimate.saved_tensors import list_saved_block_tensors
from llmsys.estimate.software_profile import OURS, MemoryProfile
from llmsys.estimate.state_memory import get_compute_dtype_bytes

Branches = list[list[SavedTensor]]


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with equal tensors; `prefix` is that of their parameters' names."""

    name: str
    prefix: str
    layers: tuple[int, ...]
    branches: Branches

    @property
    def saved_tensors(self) -> list[SavedTensor]:
        """All tensors of one of these blocks."""
        return [tensor for branch in self.branches for tensor in branch]


def get_sequence_lengths(config: RunConfig) -> tuple[int, int]:
    """Return the tokens of one window at the encoder and at the decoder.

    Args:
        config: resolved config of a run.

    Returns:
        (source, target) in tokens; equal where there is one stack.
    """
    length = config.batch.sequence_length
    target = getattr(config.batch, "target_sequence_length", None)
    return length, target if target is not None and config.model.family == "encoder_decoder" else length


def compute_micro_batch(config: RunConfig, layout: ParallelLayout) -> tuple[int, int]:
    """Return the sequences of one forward pass of a rank, and the number of such passes in a step."""
    share = -(-config.batch.sequences_per_step // layout.data_parallel_size)
    sequences = config.batch.resolve_micro_sequences(share)
    return sequences, -(-share // sequences)


def build_activation_shape(config: RunConfig, layout: ParallelLayout, system: MemoryProfile = OURS) -> ActivationShape:
    """Return the size of a micro-batch at the decoder, or at the only stack."""
    source, length = get_sequence_lengths(config)
    return ActivationShape(
        sequences=compute_micro_batch(config, layout)[0],
        length=length,
        source=source,
        context=layout.context,
        tensor=layout.tensor,
        value_bytes=get_compute_dtype_bytes(config),
        mask_table=_get_mask_table_kind(config) if system.masks == "table" else "none",
        are_experts_sharded=layout.expert > 1,
        is_on_cpu=system.device == "cpu",
        uses_mask_tables=system.masks == "table",
        has_explicit_scores=system.attention == "explicit",
        is_stream_sharded=system.residual_dtype == "divided",
        saves_gathered_inputs=system.gathered == "kept",
    )


def iter_block_groups(config: RunConfig, shape: ActivationShape) -> Iterator[BlockGroup]:
    """Yield the blocks of every stack in the order of the forward pass: encoder, decoder, prediction modules."""
    model = config.model
    if model.family == "encoder_decoder":
        source = replace(shape, length=shape.source)
        yield from _iter_stack_groups(model.encoder_model, "encoder.blocks.", source)
    yield from _iter_stack_groups(model, "blocks.", shape)
    if model.multi_token_prediction is not None:
        last, layers = model.num_hidden_layers - 1, tuple(range(model.multi_token_prediction.depth))
        normed = 2 * shape.compute_residual_bytes(model.hidden_size)
        inputs = [SavedTensor("two normed inputs of a prediction module", normed, "pointwise")]
        yield BlockGroup("prediction", "prediction.", layers, [inputs, *list_saved_block_tensors(model, last, shape)])


def _iter_stack_groups(model: ModelConfig, prefix: str, shape: ActivationShape) -> Iterator[BlockGroup]:
    groups: dict[tuple[bool, bool, str], list[int]] = {}
    for layer in range(model.num_hidden_layers):
        key = (model.is_moe_layer(layer), model.uses_rope(layer), model.get_layer_type(layer))
        groups.setdefault(key, []).append(layer)
    for (is_moe, _, _), layers in groups.items():
        window = model.get_attention_window(layers[0])
        # a window as long as the sequence hides nothing, and needs no table
        is_cut = window is not None and window < shape.length and shape.uses_mask_tables
        own = replace(shape, mask_table="windows") if is_cut and shape.mask_table == "none" else shape
        name = "mixture" if is_moe else "dense"
        yield BlockGroup(name, prefix, tuple(layers), list_saved_block_tensors(model, layers[0], own))


def _get_mask_table_kind(config: RunConfig) -> Literal["none", "documents", "numbers"]:
    """Return the table that attention gets: documents or padding to tell apart, or numbers by distance."""
    if config.model.position.has_score_table:
        return "numbers"
    is_separate = config.batch.attention_scope == "document" or config.objective.has_padding
    return "documents" if is_separate else "none"

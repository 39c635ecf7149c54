"""The pipeline stages that are looked at: the first, which holds most micro-batches, and the last, which has the loss.

Our trainer has one stage that is both. More are for published rows of other systems.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.estimate.model_tensors import is_head_tied, list_model_tensors
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import is_in_block

OF_FIRST = frozenset({"embedding", "positions"})


@dataclass(frozen=True)
class PipelineStage:
    """Blocks of the decoder that a rank has, what stands around them, and micro-batches whose activations it holds."""

    layers: frozenset[int]
    first: bool
    last: bool
    in_flight: float

    def iter_parameters(self, model: ModelConfig) -> Iterator[ParameterTensor]:
        """The parameter tensors of this stage."""
        for row in list_model_tensors(model):
            if row.name.startswith("blocks."):
                layers = tuple(layer for layer in row.layers if layer in self.layers)
                if layers:
                    yield replace(row, layers=layers)
            elif self._has_parameter(model, row):
                yield row

    def _has_parameter(self, model: ModelConfig, row: ParameterTensor) -> bool:
        tied = self.last and row.name == "embed.weight" and is_head_tied(model)
        first = row.component in OF_FIRST or row.name.startswith(("encoder.", "embedding_norm"))
        return tied or (self.first if first and not is_in_block(row) else self.last if not first else self.first)


def list_pipeline_stages(model: ModelConfig, system: MemoryProfile) -> list[PipelineStage]:
    """One stage, or the first and the last of several.

    Under 1F1B the first holds as many micro-batches as there are stages; with the blocks of a stage in m chunks
    (p - 1) / m more (Korthikanti 2022, 4.2.3).
    """
    count, layers = system.pipeline, model.num_hidden_layers
    if count == 1:
        return [PipelineStage(frozenset(range(layers)), True, True, 1.0)]
    own = -(-layers // count)
    interleaved = (count - 1) / system.pipeline_chunks if system.pipeline_chunks > 1 else 0.0
    held = system.in_flight or count + interleaved
    last = PipelineStage(frozenset(range(layers - own, layers)), False, True, min(held, 1 + interleaved))
    return [PipelineStage(frozenset(range(own)), True, False, held), last]

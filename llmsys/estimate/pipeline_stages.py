"""The stages of our pipeline: how layers are cut, and what each rank has of them.

Invariants:
- A cut is a function of the model, the stages and the sequence length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import Input, ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.estimate.flops import count_visible_pairs
from llmsys.estimate.model_tensors import is_head_tied, list_model_tensors, needs_embedding_copy
from llmsys.estimate.rank_parameters import OF_FIRST, PipelineStage


def list_rank_stages(
    model: ModelConfig, layout: ParallelLayout, sequence_length: int, micro_batches: int
) -> list[PipelineStage]:
    """Return what each rank of our pipeline has, its stages together.

    Args:
        model: the architecture.
        layout: resolved layout.
        sequence_length: tokens of a window.
        micro_batches: micro-batches of a rank in one step.

    Returns:
        One entry per rank of the pipeline. `in_flight` counts micro-batches of all its layers.
    """
    cut, schedule = cut_layers(model, layout, sequence_length), layout.pipeline_schedule
    found = []
    for rank in range(cut.ranks):
        stages = cut.list_rank_stages(rank)
        layers = frozenset(layer for stage in stages for layer in cut.stages[stage])
        sizes = [len(cut.stages[stage]) for stage in stages]
        held, waiting = (
            count / max(1, len(layers))
            for count in schedule.count_held_layers(cut.ranks, rank, micro_batches, sizes)
        )
        first, last = rank == 0, cut.is_last(stages[-1])
        # Each stage receives hidden states, but for the first, and their gradients, but for the
        # last.
        found.append(
            PipelineStage(layers, first, last, held, waiting, 2 * len(stages) - first - last)
        )
    return found


@dataclass(frozen=True)
class PipelineCut:
    """The layers of every stage, first to last, and the ranks that have them: stage s is on rank s
    mod `ranks`.

    Attributes:
        stages: layers of each stage; together all layers in order.
        ranks: size of the pipeline axis.
    """

    stages: tuple[range, ...]
    ranks: int

    def list_rank_stages(self, rank: int) -> list[int]:
        """Return the stages on one rank of the pipeline.

        Args:
            rank: Index on the pipeline axis.

        Returns:
            Indices of stages, in order: one, or several in an interleaved schedule.
        """
        return list(range(rank, len(self.stages), self.ranks))

    def is_last(self, stage: int) -> bool:
        """Return whether a stage has the head and the loss.

        Args:
            stage: Index of the stage among all, not among those of a rank.
        """
        return stage == len(self.stages) - 1


def cut_layers(model: ModelConfig, layout: ParallelLayout, sequence_length: int) -> PipelineCut:
    """Cut the layers of a model into the stages of a pipeline.

    The cut is `layout.layers_per_stage`, or the one whose costliest stage has the fewest
    operations; among those, the one whose largest stage has the fewest parameters. Operations count
    the head and multi-token prediction, parameters the embedding as well. A remaining tie gives
    fewer layers to earlier stages, which hold more micro-batches.

    Args:
        model: the architecture.
        layout: the layout, with its pipeline axis and schedule.
        sequence_length: tokens of a window, on which the cost of attention depends.

    Returns:
        The layers of every stage.
    """
    count = layout.pipeline * layout.pipeline_schedule.num_chunks
    if (sizes := layout.layers_per_stage) is None:
        sizes = _cut_by_cost(model, count, sequence_length)
    ends = [0, *accumulate(sizes)]
    return PipelineCut(tuple(range(first, last) for first, last in pairwise(ends)), layout.pipeline)


@lru_cache(maxsize=256)  # a plan asks for the same few cuts thousands of times
def _cut_by_cost(model: ModelConfig, stages: int, sequence_length: int) -> tuple[int, ...]:
    costs = LayerCosts(model, sequence_length)
    most = _minimize_largest(costs.operations, stages, [0] * len(costs.operations), None)[0]
    return _minimize_largest(costs.parameters, stages, costs.operations, most)[1]


def compute_imbalance(model: ModelConfig, layout: ParallelLayout, sequence_length: int) -> float:
    """Return the operations of the costliest rank of our pipeline over the mean of its ranks; 1
    without a pipeline.

    Args:
        model: the architecture.
        layout: resolved layout.
        sequence_length: tokens of a window.
    """
    if layout.pipeline == 1:
        return 1.0
    # The cut does not depend on the other axes, of which a plan tries thousands.
    stages = ParallelLayout(
        pipeline=layout.pipeline,
        pipeline_schedule=layout.pipeline_schedule,
        layers_per_stage=layout.layers_per_stage,
    )
    return _compute_stage_imbalance(model, stages, sequence_length)


@lru_cache(maxsize=256)
def _compute_stage_imbalance(
    model: ModelConfig, layout: ParallelLayout, sequence_length: int
) -> float:
    cut, costs = (
        cut_layers(model, layout, sequence_length),
        LayerCosts(model, sequence_length).operations,
    )
    sums = [
        sum(costs[layer] for stage in cut.list_rank_stages(rank) for layer in cut.stages[stage])
        for rank in range(cut.ranks)
    ]
    return max(sums) * cut.ranks / sum(sums)


class LayerCosts:
    """The cost of each layer; the first one bears the embedding, the last one the head and
    multi-token prediction.
    """

    def __init__(self, model: ModelConfig, sequence_length: int) -> None:
        """List the tensors of the model.

        Args:
            model: The full model.
            sequence_length: Positions of a sequence, by which products and scores are counted.
        """
        self._model, self._length = model, sequence_length
        self._rows = list_model_tensors(model)

    @cached_property
    def operations(self) -> list[int]:
        """Multiplications of a forward pass over one sequence, by layer."""
        model, layers = self._model, self._model.num_hidden_layers
        counts = [
            sum(self._count_multiplications(row) for row in self._rows if _is_of_layer(row, layer))
            + self._count_scores(layer)
            for layer in range(layers)
        ]
        depth = 0 if model.multi_token_prediction is None else model.multi_token_prediction.depth
        logits = model.vocab_size * model.hidden_size * self._length
        # A tied head has no row, and each prediction module goes through the head once
        # more.
        counts[-1] += logits * (
            depth * model.head.has_logits + is_head_tied(model)
        ) + depth * self._count_scores(layers - 1)
        counts[-1] += sum(
            self._count_multiplications(row) * row.num_copies
            for row in self._rows
            if not row.name.startswith("blocks.")
        )
        return counts

    @cached_property
    def parameters(self) -> list[int]:
        """Parameters by layer; those of a tied embedding twice, because first and last stage
        have a copy.
        """
        counts = [
            sum(row.elements_per_copy for row in self._rows if _is_of_layer(row, layer))
            for layer in range(self._model.num_hidden_layers)
        ]
        for row in self._rows:
            if not row.name.startswith("blocks."):
                counts[0 if _is_before_blocks(row) else -1] += row.num_elements
                if row.name == "embed.weight" and needs_embedding_copy(self._model):
                    counts[-1] += row.num_elements
        return counts

    def _count_multiplications(self, row: ParameterTensor) -> int:
        moe = self._model.moe
        vectors: dict[Input | None, int] = {
            "token": self._length,
            "sequence": 1,
            "distance": self._length,
            "visit": 0 if moe is None else moe.count_sequence_visits(self._length),
        }
        return row.elements_per_vector // row.num_copies * vectors.get(row.input, 0)

    def _count_scores(self, layer: int) -> int:
        model, causal = self._model, self._model.family != "encoder"
        total, length = 0, self._length
        if model.linear_attention is not None and model.is_linear_layer(layer):
            linear = model.linear_attention
            total += linear.count_products(model, layer, length, None)
            total += linear.count_solve_products(length)
        if not model.has_attention(layer):
            return total
        scores = model.attention.build_score_shape(model, 0, is_causal=causal)
        pairs = count_visible_pairs(length, model.get_attention_window(layer), causal=causal)
        kernel = scores.heads * (scores.key_channels + scores.value_channels) * pairs
        return total + kernel + model.attention.count_plain_products(model, length)


def _is_of_layer(row: ParameterTensor, layer: int) -> bool:
    return row.name.startswith("blocks.") and layer in row.layers


def _is_before_blocks(row: ParameterTensor) -> bool:
    return row.component in OF_FIRST or row.name.startswith("embedding_norm")


def _minimize_largest(
    values: Sequence[int], count: int, limited: Sequence[int], limit: int | None
) -> tuple[int, tuple[int, ...]]:
    """Cut a list into `count` runs such that the largest sum is smallest, and `limited` sums to
    `limit` at most.

    Returns:
        The largest sum, and the length of each run. Among equal cuts, earlier runs are shorter.
    """
    totals, bounds, layers = [0, *accumulate(values)], [0, *accumulate(limited)], len(values)
    # best[last]: the cut of the layers from `last` on into as many runs as were added so far
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for left in range(count - 1, -1, -1):
        added: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first in range(left, layers):
            found = [
                (max(totals[last] - totals[first], best[last][0]), (last - first, *best[last][1]))
                for last in best
                if last > first and (limit is None or bounds[last] - bounds[first] <= limit)
            ]
            if found:
                # Of equal cuts, the one with fewer layers in its earlier stages.
                added[first] = min(found)
        best = added
    return best[0]

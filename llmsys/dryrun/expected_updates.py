"""Expected messages of optimizers that need whole matrices, and of a limit on attention logits.

Muon sends each matrix to one rank, which orthogonalizes it, and back: two all-to-alls for the
matrices of a group of parameters; with `neuron_beta` ranks add up sums over neurons. Adafactor and
SOAP gather a parameter, its gradient and its state.

Invariants:
- Everything follows from the config and the tensors that it lists.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import assert_never

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.expert_sharding import select_shard_dim
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.optimizer import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    PythonOptimizerConfig,
    ScheduleFreeConfig,
    SoapConfig,
)
from llmsys.dryrun.collective_log import OPTIMIZER, Message
from llmsys.dryrun.expected_messages import Expectation, RankContext, find_shard_axis
from llmsys.estimate.rank_parameters import SPLIT_BY_INPUTS, count_tensor_shards
from llmsys.model.parametrization import compute_rate_factor

# Power of the width on the rate of an orthogonal update, as in optim/parameter_groups.py.
MUON_EXPONENT = 0.5


def add_update_messages(context: RankContext, expected: Expectation) -> None:
    """Add what the optimizer of a step sends.

    Args:
        context: The rank and its config.
        expected: Gets the messages.
    """
    optimizer = context.config.optimizer
    engine = context.config.engine
    assert isinstance(engine, TorchEngineConfig)
    has_shards = engine.data_parallel != "ddp"
    match optimizer:
        case MuonConfig():
            if has_shards:
                _add_owner_messages(context, optimizer, expected)
                if optimizer.neuron_beta is not None:
                    _add_neuron_sums(context, optimizer, expected)
        case AdafactorConfig() | SoapConfig():
            if has_shards:
                _add_gathers(context, optimizer, expected)
        case AdamConfig() | AdamWConfig() | AdEMAMixConfig() | LionConfig() | ScheduleFreeConfig():
            pass
        case PythonOptimizerConfig():
            pass  # it is asked for the change of each element alone
        case unreachable:
            assert_never(unreachable)
    if optimizer.max_attention_logit is not None:
        # The largest logit of each head, over all ranks.
        model = context.config.model
        depth = model.multi_token_prediction.depth if model.multi_token_prediction else 0
        layers = model.num_hidden_layers + depth
        size = 4 * layers * model.num_attention_heads
        expected.add(OPTIMIZER, Message("all_reduce", context.list_ranks("world"), "float32", size))


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter over ranks.

    Attributes:
        shape: Of the part of a tensor or expert rank.
        dim: Dim that is sharded.
        shards: Ranks that share this part.
        outer: Ranks of the tensor or expert axis, each with a part; this rank alone where there is
            one part.
        outer_dim: Dim of the parts.
    """

    shape: tuple[int, ...]
    dim: int
    shards: tuple[int, ...]
    outer: tuple[int, ...]
    outer_dim: int

    def count_local(self, rank: int) -> int:
        """Count the elements that a rank holds."""
        own = count_chunk(self.shape[self.dim], len(self.shards), self.shards.index(rank))
        return prod(self.shape) // self.shape[self.dim] * own


def count_chunk(size: int, parts: int, place: int) -> int:
    """Count the rows of one of equal chunks, of which the last ones are shorter.

    Args:
        size: Rows of all chunks.
        parts: Number of chunks.
        place: The chunk.

    Returns:
        Its rows, 0 where those before it have all.
    """
    longest = -(-size // parts)
    return max(0, min(longest, size - place * longest))


def pad_size(size: int, parts: int) -> int:
    """Return the rows of chunks that are padded to the longest of them.

    Args:
        size: Rows of all chunks.
        parts: Number of chunks.

    Returns:
        A multiple of `parts`.
    """
    return -(-size // parts) * parts


def find_cut(context: RankContext, row: ParameterTensor) -> Cut:
    """Return how a parameter is cut.

    Args:
        context: The rank and its config.
        row: The parameter.

    Returns:
        The part of this rank, and the ranks that share it.
    """
    layout = context.layout
    shape = [*row.shape]
    shards = context.list_ranks(find_shard_axis(row))
    outer: tuple[int, ...] = (context.rank,)
    dim = outer_dim = 0
    if row.is_routed:
        shape[0] //= layout.expert
        dim = select_shard_dim(shape, len(shards))
        outer = context.list_ranks("expert")
    elif (parts := count_tensor_shards(row, layout, context.config.model)) > 1:
        outer_dim = int(row.name.rpartition(".")[0].rpartition(".")[2] in SPLIT_BY_INPUTS)
        shape[outer_dim] //= parts
        outer = context.list_ranks("tensor")
    return Cut(tuple(shape), dim, shards, outer, outer_dim)


def _add_owner_messages(context: RankContext, optimizer: MuonConfig, expected: Expectation) -> None:
    """Expect two all-to-alls for the matrices of each group of parameters; a gather of each matrix
    that two axes cut.
    """
    dtype, itemsize = ("float32", 4) if context.dtype == "float32" else ("bfloat16", 2)
    matrices: dict[tuple[bool, float, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    local: dict[tuple[bool, float, tuple[int, ...]], int] = defaultdict(int)
    for row in context.rows:
        if optimizer.select_update_rule(row.name, len(row.shape)) != "muon":
            continue
        cut = find_cut(context, row)
        is_stack = len(row.shape) > 2
        if is_stack and cut.dim == 0:
            continue  # a rank has whole matrices
        if not is_stack and len(cut.outer) > 1:
            _add_gather(expected, context, cut, row.shape, (dtype, itemsize), row.num_copies)
            continue
        if len(cut.shards) == 1:
            continue
        factor = compute_rate_factor(context.config.model, row.name, MUON_EXPONENT)
        key = (row.is_routed, factor, cut.shards)
        # Columns, where those are cut, count as the rows of the transposed matrix.
        sides = cut.shape[-2:][:: -1 if cut.dim == 2 else 1]
        count = row.num_copies * (cut.shape[0] if is_stack else 1)
        matrices[key] += [(sides[0], sides[1])] * count
        local[key] += row.num_copies * cut.count_local(context.rank)
    for key, shapes in matrices.items():
        shards = key[-1]
        own = shards.index(context.rank)
        owners = assign_owners(shapes, len(shards))
        owned = [shape for shape, owner in zip(shapes, owners, strict=True) if owner == own]
        size = itemsize * max(sum(map(prod, owned)), local[key])
        expected.add(OPTIMIZER, Message("all_to_all", shards, dtype, size), 2)


def _add_neuron_sums(context: RankContext, optimizer: MuonConfig, expected: Expectation) -> None:
    """Expect the sums of a step of NorMuon over cut matrices: one number for each neuron where its
    inputs are cut, and one for each matrix where its neurons are. A message has those of a group of
    parameters.
    """
    sizes: dict[tuple[bool, float, bool, tuple[int, ...], tuple[int, ...]], int]
    sizes = defaultdict(int)
    for row in context.rows:
        if optimizer.select_update_rule(row.name, len(row.shape)) != "muon":
            continue
        cut = find_cut(context, row)
        local = [*cut.shape]
        local[cut.dim] = count_chunk(
            cut.shape[cut.dim], len(cut.shards), cut.shards.index(context.rank)
        )
        # A matrix is (out, in), a stack of experts (E, in, out).
        inputs, neurons = (1, 0) if len(row.shape) == 2 else (1, 2)
        stack = prod(local[:-2])
        factor = compute_rate_factor(context.config.model, row.name, MUON_EXPONENT)
        for ranks, dim in ((cut.shards, cut.dim), (cut.outer, cut.outer_dim)):
            if len(ranks) > 1 and dim in (inputs, neurons):
                count = stack * (local[neurons] if dim == inputs else 1)
                key = (row.is_routed, factor, dim == inputs, ranks, cut.outer)
                sizes[key] += 4 * row.num_copies * count
    for (_, _, _, ranks, _), size in sizes.items():
        expected.add(OPTIMIZER, Message("all_reduce", ranks, "float32", size))


def assign_owners(shapes: list[tuple[int, int]], ranks: int) -> list[int]:
    """Deal matrices to the ranks that orthogonalize them: the costliest first, each to the rank
    with the least work (Graham 1969). A product of the shorter side costs min² · max.

    Args:
        shapes: Rows and columns of each matrix.
        ranks: Number of ranks.

    Returns:
        The rank of each matrix.
    """
    cost = [min(shape) ** 2 * max(shape) for shape in shapes]
    load = [0] * ranks
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -cost[number]):
        owners[number] = load.index(min(load))
        load[owners[number]] += cost[number]
    return owners


def _add_gathers(
    context: RankContext, optimizer: AdafactorConfig | SoapConfig, expected: Expectation
) -> None:
    """Expect a gather of every parameter, its gradient and its state, but for stacks of which a
    rank has whole matrices.
    """
    for row in context.rows:
        if optimizer.select_update_rule(row.name, len(row.shape)) != "matrix":
            continue
        cut = find_cut(context, row)
        if len(row.shape) > 2 and cut.dim == 0:
            continue
        for shape in [row.shape, row.shape, *list_state_shapes(optimizer, row.shape)]:
            _add_gather(expected, context, cut, shape, ("float32", 4), row.num_copies)


def list_state_shapes(
    optimizer: AdafactorConfig | SoapConfig, shape: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return the shapes of the state of a parameter.

    Args:
        optimizer: Adafactor (Shazeer 2018, algorithm 4), which has the row and column means of a
            matrix and all of a vector; or SOAP (Vyas 2024, algorithm 3), which has two moments, and
            a preconditioner and its eigenvectors for each side.
        shape: Of the parameter.

    Returns:
        Shapes.
    """
    match optimizer:
        case AdafactorConfig():
            if len(shape) < 2:
                return [shape]
            return [(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]
        case SoapConfig():
            sides = [shape[dim] for dim in optimizer.list_rotated_sides(shape)]
            return [shape, shape, *((*shape[:-2], side, side) for side in sides for _ in range(2))]
        case unreachable:
            assert_never(unreachable)


def _add_gather(
    expected: Expectation,
    context: RankContext,
    cut: Cut,
    shape: tuple[int, ...],
    dtype: tuple[str, int],
    count: int,
) -> None:
    """Expect a tensor to be gathered over its shards and the ranks of another axis, which pad it.

    The cut that was made last is undone first: of one dim that of the shards, else by torch's order
    that of the inner axis, the tensor or expert axis.
    """
    name, itemsize = dtype
    shards, outer = len(cut.shards), len(cut.outer)
    sizes = [*shape]
    if cut.dim == cut.outer_dim:
        place = cut.outer.index(context.rank)
        sizes[cut.dim] = pad_size(count_chunk(shape[cut.dim], outer, place), shards)
        first = prod(sizes)
        sizes[cut.dim] = pad_size(shape[cut.dim], outer)
        gathers = ((cut.shards, first), (cut.outer, prod(sizes)))
    else:
        place = cut.shards.index(context.rank)
        sizes[cut.dim] = count_chunk(shape[cut.dim], shards, place)
        sizes[cut.outer_dim] = pad_size(shape[cut.outer_dim], outer)
        first = prod(sizes)
        sizes[cut.outer_dim] = shape[cut.outer_dim]
        sizes[cut.dim] = pad_size(shape[cut.dim], shards)
        gathers = ((cut.outer, first), (cut.shards, prod(sizes)))
    for ranks, elements in gathers:
        expected.add(OPTIMIZER, Message("all_gather", ranks, name, itemsize * elements), count)

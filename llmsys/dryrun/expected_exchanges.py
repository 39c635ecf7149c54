"""Expected messages of activations: the tensor and context axes, experts, and a pipeline.

Sizes are those of the full side: what a gather writes and a reduce-scatter reads.

Invariants:
- Everything follows from the config; rows of experts from the choice that a dry run forces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.expert_sharding import must_send_once_per_rank
from llmsys.config.linear_mixer import BaseLinearAttentionConfig
from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, MoeConfig
from llmsys.dryrun.collective_log import DIRECTED, Message
from llmsys.dryrun.expected_messages import Expectation, RankContext
from llmsys.dryrun.expected_passes import ONCE, Pass
from llmsys.dryrun.expected_rings import add_ring_messages, count_key_heads
from llmsys.dryrun.expected_routing import choose_expected_experts
from llmsys.dryrun.rank_groups import Axis
from llmsys.estimate.flops import iter_recomputed_matrices
from llmsys.estimate.model_tensors import needs_embedding_copy
from llmsys.estimate.rank_parameters import count_local_elements


@dataclass(frozen=True)
class Exchange:
    """A message of the forward of a branch, and what its backward sends.

    Attributes:
        forward: Operation of the forward.
        backward: Operation of its gradient; empty where nothing has one.
        axis: Ranks.
        elements: Elements of the full side.
        dtype: Of what travels; empty: of activations.
        is_saved: Selective activation checkpointing saves what it delivers.
        is_last: Nothing after it asks for what it delivers, so a block that runs again stops
            before it.
        is_repeated: The backward pass of its layer computes it again, under every policy.
    """

    forward: str
    backward: str
    axis: Axis
    elements: int
    dtype: str = ""
    itemsize: int = 0
    is_saved: bool = False
    is_last: bool = False
    is_repeated: bool = False


def add_activation_messages(context: RankContext, expected: Expectation) -> None:
    """Add the messages that the passes of blocks send.

    Args:
        context: The rank and its config.
        expected: Gets the messages.
    """
    model = context.config.model
    if not _has_plain_blocks(context, expected):
        return
    policy = context.config.train.activation_checkpoint
    depth = model.multi_token_prediction.depth if model.multi_token_prediction else 0
    last = model.num_hidden_layers - 1
    for one in context.passes:
        layers = [*context.stages[one.stage]]
        if context.part.last and one.stage == len(context.stages) - 1:
            layers += [last] * depth
        for layer in layers:
            for exchange in _iter_exchanges(context, layer):
                _add_exchange(context, expected, one, exchange, policy)
        add_ring_messages(context, expected, one, layers)


def _has_plain_blocks(context: RankContext, expected: Expectation) -> bool:
    """Return whether messages of blocks are known; name those that are not."""
    model = context.config.model
    layout = context.layout
    if layout.tensor == layout.context == layout.expert == 1:
        return False
    known = isinstance(model.attention, MultiHeadAttentionConfig | LatentAttentionConfig)
    if layout.tensor * layout.context > 1 and not known:
        expected.leave_unchecked(f"attention of kind {model.attention.kind}", all_messages=True)
        return False
    return True


def _add_exchange(
    context: RankContext, expected: Expectation, one: Pass, exchange: Exchange, policy: str
) -> None:
    """Add what an exchange sends in a pass: in a backward also what runs again."""
    ranks = context.list_ranks(exchange.axis)
    dtype = exchange.dtype or context.dtype
    size = exchange.elements * (exchange.itemsize or context.itemsize)
    forward = Message(exchange.forward, ranks, dtype, size)
    if not one.is_backward:
        expected.add(one.part, forward)
        return
    if exchange.backward:
        expected.add(one.part, Message(exchange.backward, ranks, dtype, size))
    runs_again = (policy == "full" and not exchange.is_last) or (
        policy == "selective" and not exchange.is_saved
    )
    expected.add(one.part, forward, runs_again + exchange.is_repeated)


def _iter_exchanges(context: RankContext, layer: int) -> Iterator[Exchange]:
    """Yield the exchanges of the forward of a block."""
    model = context.config.model
    layout = context.layout
    # Positions that the tensor ranks of a context rank hold together.
    positions = context.sequences * context.length // layout.context
    stream = positions * model.hidden_size
    feeds_forward = model.has_feed_forward(layer)
    mixers = model.list_mixers(layer) if layout.tensor * layout.context > 1 else []
    for number, mixer in enumerate(mixers, start=1):
        if isinstance(mixer, BaseLinearAttentionConfig):
            yield from _iter_state_exchanges(context, mixer, positions)
        elif isinstance(mixer, LatentAttentionConfig):
            yield from _iter_latent_exchanges(context, mixer, positions)
        else:
            yield from _iter_head_exchanges(context, positions)
        is_last = number == len(mixers) and not feeds_forward
        yield Exchange(
            "reduce_scatter", "all_gather", "tensor", stream, is_saved=True, is_last=is_last
        )
    is_sparse = model.moe is not None and model.is_moe_layer(layer)
    # Dense layers, or the shared experts beside routed ones.
    is_divided = not is_sparse or (model.moe is not None and model.moe.shared_expert_size)
    if is_sparse and model.moe is not None:
        yield from _iter_expert_exchanges(context, model.moe)
    if feeds_forward and is_divided and layout.tensor > 1:
        yield Exchange("all_gather", "reduce_scatter", "tensor", stream)
        yield Exchange(
            "reduce_scatter",
            "all_gather",
            "tensor",
            stream,
            is_saved=True,
            is_last=not _is_computed_again(context, "shared" if is_sparse else "feed_forward"),
        )


def _is_computed_again(context: RankContext, feed_forward: str) -> bool:
    """Return whether full activation checkpointing computes the last projection of a feed-forward
    again.
    """
    if feed_forward == "shared" and context.layout.expert > 1:
        return True  # it is computed while rows travel, before the experts
    rows = iter_recomputed_matrices(context.config.model, context.rows, "full")
    return any(row.name.endswith(f".{feed_forward}.down_proj.weight") for row in rows)


def _iter_head_exchanges(context: RankContext, positions: int) -> Iterator[Exchange]:
    """Yield the exchanges around heads: positions of the tensor axis before them,
    heads for positions over the ulysses axis, and back.
    """
    model = context.config.model
    layout = context.layout
    yield Exchange("all_gather", "reduce_scatter", "tensor", positions * model.hidden_size)
    heads = model.num_attention_heads // layout.tensor
    groups = count_key_heads(context)
    has_gate = isinstance(model.attention, MultiHeadAttentionConfig) and model.attention.output_gate
    for count in (heads, groups, groups, *[heads] * has_gate):
        yield _build_head_exchange(positions * count * model.head_dim)
    yield from _iter_norm_exchanges(context)
    yield _build_head_exchange(positions * heads * model.head_dim)


def _iter_state_exchanges(
    context: RankContext, linear: BaseLinearAttentionConfig, positions: int
) -> Iterator[Exchange]:
    """Yield the exchanges of linear attention: heads for positions and back, and over a ring the
    last inputs of the convolution and the maps of the states.
    """
    members = context.layout.ring_size
    ranks = context.layout.context // members
    out, back = linear.count_exchanged_channels(ranks)
    yield _build_head_exchange(positions * out)
    if members > 1:
        rows = members * context.sequences
        tail = rows * linear.count_tail_values(context.length // members, ranks)
        if tail:
            yield Exchange("all_gather", "reduce_scatter", "ring", tail)
        maps = rows * linear.count_map_values(ranks)
        yield Exchange(
            "all_gather",
            "reduce_scatter",
            "ring",
            maps,
            "float32",
            4,
            is_repeated=True,
        )
    yield _build_head_exchange(positions * back)


def _build_head_exchange(elements: int) -> Exchange:
    return Exchange("all_to_all", "all_to_all", "ulysses", elements, is_saved=True)


def _iter_norm_exchanges(context: RankContext) -> Iterator[Exchange]:
    """Yield the sums of squares over all heads, where one norm spans them."""
    model = context.config.model
    attention = model.attention
    if not isinstance(attention, MultiHeadAttentionConfig) or attention.qk_norm != "full":
        return
    rows = context.sequences * context.length // context.layout.ring_size
    sums = 1 if model.norm.kind == "rmsnorm" else 2
    for _ in range(2 * sums):
        yield Exchange("all_reduce", "all_reduce", "member", rows, "float32", 4)


def _iter_latent_exchanges(
    context: RankContext, attention: LatentAttentionConfig, positions: int
) -> Iterator[Exchange]:
    """Yield the exchanges of latent attention: queries as those of heads; latents of keys and
    values are gathered whole.
    """
    model = context.config.model
    layout = context.layout
    entering = attention.q_lora_rank or model.hidden_size
    yield Exchange("all_gather", "reduce_scatter", "tensor", positions * entering)
    heads = model.num_attention_heads // layout.tensor
    width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    yield _build_head_exchange(positions * heads * width)
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    rows = context.sequences * context.length // layout.ring_size
    yield Exchange("all_gather", "reduce_scatter", "member", rows * latent)
    yield _build_head_exchange(positions * heads * attention.v_head_dim)


def _iter_expert_exchanges(context: RankContext, moe: MoeConfig) -> Iterator[Exchange]:
    """Yield the exchanges of the experts of a layer, and of the counts that balance them."""
    layout = context.layout
    sequences = layout.tensor * layout.context
    if sequences > 1 and _uses_sequence_balance(moe):
        elements = context.sequences * moe.num_experts
        yield Exchange("all_reduce", "", "sequence", elements, "int64", 8)
    ranks = layout.expert
    if ranks == 1:
        return
    own = moe.num_experts // ranks
    # Read once, also where a block runs again.
    yield Exchange(
        "all_to_all", "", "expert", ranks * (1 + own), "int64", 8, is_saved=True, is_last=True
    )
    place = context.list_ranks("expert").index(context.rank)
    chosen_NK = choose_expected_experts(context, moe)
    once = must_send_once_per_rank(moe, ranks)
    # NO_EXPERT is -1, and so is its rank.
    homes = [[rank for rank in row if rank >= 0] for row in (chosen_NK // own).tolist()]
    visits = [[*set(row)] if once else row for row in homes]
    sent = sum(len(row) for row in visits)
    # Every rank is taken to choose as this one does.
    received = ranks * sum(row.count(place) for row in visits)
    rows = max(sent, received)
    if once:
        chosen = rows * chosen_NK.shape[1]
        yield Exchange("all_to_all", "", "expert", chosen, "int64", 8, is_saved=True)
        yield Exchange("all_to_all", "all_to_all", "expert", chosen, "float32", 4, is_saved=True)
    for _ in range(2):
        elements = rows * moe.get_expert_channels(context.config.model.hidden_size)
        yield Exchange("all_to_all", "all_to_all", "expert", elements, is_saved=True)


def _uses_sequence_balance(moe: MoeConfig) -> bool:
    balance = moe.balance
    if isinstance(balance, BiasBalancingConfig):
        return balance.sequence_weight > 0
    return isinstance(balance, AuxiliaryLossConfig) and balance.scope == "sequence"


def add_pipeline_messages(context: RankContext, expected: Expectation) -> None:
    """Add the messages between the stages of a pipeline.

    Args:
        context: The rank and its config.
        expected: Gets the messages.
    """
    layout = context.layout
    if layout.pipeline == 1:
        return
    model = context.config.model
    ranks = context.list_ranks("pipeline")
    positions = context.sequences * context.length // layout.sequence_parallel_size
    size = positions * model.hidden_size * context.itemsize
    place = ranks.index(context.rank)
    before = ranks[place - 1]
    after = ranks[(place + 1) % len(ranks)]
    for one in context.passes:
        begins = context.part.first and one.stage == 0
        ends = context.part.last and one.stage == len(context.stages) - 1
        # Hidden states come from the stage before; their gradients from the one after.
        has_source, has_target = (
            (not ends, not begins) if one.is_backward else (not begins, not ends)
        )
        source, target = (after, before) if one.is_backward else (before, after)
        expected.add(one.part, Message("receive", ranks, context.dtype, size, source), has_source)
        expected.add(one.part, Message("send", ranks, context.dtype, size, target), has_target)
    if needs_embedding_copy(model) and (context.part.first or context.part.last):
        row = next(row for row in context.rows if row.name == "embed.weight")
        size = 4 * count_local_elements(row, layout, model)
        other_end = ranks[-1] if place == 0 else ranks[0]
        for operation in DIRECTED:
            expected.add(ONCE, Message(operation, ranks, "float32", size, other_end))

"""Expected messages of a ring of ranks, over which keys and values travel (Liu 2023,
arXiv:2310.01889).

A rank gets the keys and values of every other rank of which some query of the ring sees a key,
straight from their owner. In a backward pass they come again, and the gradients of each go home.

Invariants:
- Positions lie in zigzag order: a row is cut into 2 · N chunks, and rank r has those with the
  numbers r and 2N - 1 - r. With layers of linear attention rank r has the r-th of N chunks. So
  which ranks see each other follows from the window alone.
"""

from collections.abc import Iterator

from llmsys.config.attention import LatentAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.dryrun.collective_log import Event, Message
from llmsys.dryrun.expected_messages import Expectation, RankContext
from llmsys.dryrun.expected_passes import Pass


def add_ring_messages(
    context: RankContext, expected: Expectation, one: Pass, layers: list[int]
) -> None:
    """Add the messages of the rings of a pass.

    Args:
        context: The rank and its config.
        expected: Gets the messages, and their order.
        one: The pass.
        layers: The layers that it runs, in the order of a forward.
    """
    if context.layout.ring_size == 1:
        return
    ranks = context.list_ranks("ring")
    place = ranks.index(context.rank)
    sizes = _list_pair_sizes(context)
    runs_again = context.config.train.activation_checkpoint == "full"
    for layer in reversed(layers) if one.is_backward else layers:
        if not context.config.model.has_attention(layer):
            continue
        distances = list_distances(context, layer)
        offsets = [*distances] if not one.is_backward or runs_again else []
        if one.is_backward:
            offsets += _iter_backward_offsets(distances)
        for offset in offsets:
            target = ranks[(place + offset) % len(ranks)]
            source = ranks[(place - offset) % len(ranks)]
            for size in sizes:
                for operation, peer in (("send", target), ("receive", source)):
                    expected.add(one.part, Message(operation, ranks, context.dtype, size, peer))
                    expected.events.append(Event(operation, ranks, peer))


def _iter_backward_offsets(distances: tuple[int, ...]) -> Iterator[int]:
    """Yield the places that a message goes on in a backward: keys and values of a rank come while
    the ones before are used, whose gradients then go home.
    """
    for number, distance in enumerate(distances):
        if number == 0:
            yield distance
        if number + 1 < len(distances):
            yield distances[number + 1]
        yield -distance


def _list_pair_sizes(context: RankContext) -> tuple[int, int]:
    """Return the bytes of the keys and of the values of a rank."""
    model = context.config.model
    layout = context.layout
    positions = context.sequences * context.length // layout.context
    attention = model.attention
    if isinstance(attention, LatentAttentionConfig):
        # Keys and values are made of their latents for each head of a rank.
        heads = model.num_attention_heads // layout.tensor
        key = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        return (
            context.itemsize * positions * heads * key,
            context.itemsize * positions * heads * attention.v_head_dim,
        )
    size = context.itemsize * positions * count_key_heads(context) * model.head_dim
    return size, size


def count_key_heads(context: RankContext) -> int:
    """Count the key-value heads of a tensor rank, where a head that several ranks of a context axis
    use counts for each.

    Args:
        context: The rank and its config.

    Returns:
        The number of heads.
    """
    layout = context.layout
    ulysses = layout.context // layout.ring_size
    groups = max(1, context.config.model.num_key_value_heads // layout.tensor)
    # A head is sent to every rank that uses it.
    return ulysses if groups % ulysses else groups


def list_distances(context: RankContext, layer: int) -> tuple[int, ...]:
    """List the distances between a rank and the owners of keys that it gets.

    Args:
        context: The rank and its config.
        layer: The layer, whose window may hide keys.

    Returns:
        Distances on the ring in ascending order, without 0. With documents a row has chunks of
        each, so every rank has keys that another sees.
    """
    ranks = context.layout.ring_size
    window = context.config.model.get_attention_window(layer)
    if window is None or context.config.batch.attention_scope == "document":
        return tuple(range(1, ranks))
    chunks = ranks if context.config.model.has_linear_layers else 2 * ranks
    found = set()
    for query in range(chunks):
        for key in range(chunks):
            if _is_seen(query, key, context.length // chunks, window, context.config.model):
                found.add((_find_owner(query, ranks) - _find_owner(key, ranks)) % ranks)
    return tuple(sorted(found - {0}))


def _is_seen(query: int, key: int, chunk: int, window: int, model: ModelConfig) -> bool:
    """Return whether some position of a chunk sees some position of another one."""
    if model.family == "decoder" and key > query:
        return False
    # From the first position of the later chunk to the last one of the earlier.
    nearest = max(0, (abs(query - key) - 1) * chunk + 1) if query != key else 0
    return nearest < window


def _find_owner(chunk: int, ranks: int) -> int:
    """Return the rank of a chunk; of N chunks each rank has its own."""
    return min(chunk, 2 * ranks - 1 - chunk)

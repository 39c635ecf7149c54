"""Compare the shards of parameters that a rank holds with those that follow from its config."""

from collections.abc import Iterator, Mapping

from llmsys.config.engine import TorchEngineConfig
from llmsys.dryrun.expected_messages import RankContext


def find_wrong_shards(local_sizes: Mapping[str, int], context: RankContext) -> Iterator[str]:
    """Find the parameters of which a rank holds more or less than its share.

    Args:
        local_sizes: Elements that the rank holds, by the name of the parameter.
        context: The rank and its config.

    Yields:
        A sentence for each of them.
    """
    engine = context.config.engine
    is_sharded = isinstance(engine, TorchEngineConfig) and engine.data_parallel == "fsdp"
    expected = {
        row.name.replace("{i}", str(layer)): context.count_shard(row)
        if is_sharded
        else row.elements_per_copy
        for row in context.rows
        for layer in row.layers or (0,)
    }
    for name in dict.fromkeys((*expected, *local_sizes)):
        wanted, found = expected.get(name), local_sizes.get(name)
        if wanted is None:
            yield f"additional parameter: {name} with {found:,} elements, which the config lacks"
        elif found is None:
            yield f"missing parameter: {name} with {wanted:,} elements"
        elif found != wanted:
            yield f"wrong shard: {name} holds {found:,} elements on this rank, expected {wanted:,}"

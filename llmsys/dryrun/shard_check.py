"""Compare the shards of parameters, masters and moments that a rank holds with those that follow
from its config.
"""

from collections.abc import Iterator, Mapping

from llmsys.config.engine import TorchEngineConfig
from llmsys.dryrun.expected_messages import RankContext

STATE = ("parameter", "first_moment", "second_moment", "slow_moment", "lookahead_moment")
"""State of the optimizer that is cut as its parameter is, as a checkpoint names it."""


def find_wrong_shards(local_sizes: Mapping[str, int], context: RankContext) -> Iterator[str]:
    """Find the parameters, masters and moments of which a rank holds more or less than its share.

    Args:
        local_sizes: Elements that the rank holds, by the name of the parameter; of a master or
            moment with its kind, such as `first_moment/embed.weight`.
        context: The rank and its config.

    Yields:
        A sentence for each of them.
    """
    engine = context.config.engine
    kind = engine.data_parallel if isinstance(engine, TorchEngineConfig) else ""
    expected: dict[str, int] = {}
    for row in context.rows:
        own = context.count_shard(row)
        for layer in row.layers or (0,):
            name = row.name.replace("{i}", str(layer))
            expected[name] = own if kind == "fsdp" else row.elements_per_copy
            # Plain data parallelism has whole weights, and cuts masters and moments as FSDP2 does.
            state = row.elements_per_copy if kind == "ddp" else own
            keys = [f"{part}/{name}" for part in STATE]
            expected |= {key: state for key in keys if key in local_sizes}
    for name in dict.fromkeys((*expected, *local_sizes)):
        wanted, found = expected.get(name), local_sizes.get(name)
        if wanted is None:
            yield f"additional parameter: {name} with {found:,} elements, which the config lacks"
        elif found is None:
            yield f"missing parameter: {name} with {wanted:,} elements"
        elif found != wanted:
            yield f"wrong shard: {name} holds {found:,} elements on this rank, expected {wanted:,}"

"""What `train.reproducibility: bitwise` needs: one fixed list of micro-batches, and nothing that sums otherwise.

Rules between sections, read by RunConfig; and what a number of ranks must be, read when a run begins.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.layout import Layout
from llmsys.config.rule import Broken, divisors, listed
from llmsys.config.train import TrainConfig
from llmsys.errors import ConfigError

OTHERWISE = "or set train.reproducibility=fast"


def bitwise_problems(
    train: TrainConfig, engine: EngineConfig, layout: Layout, batch: BatchConfig, *, optimizer: str, windows: bool
) -> Iterator[Broken]:
    """What bitwise mode cannot hold to its promise; `windows` where steps are cut into windows of one length."""
    if engine.kind != "torch":
        yield _sums_itself("engine.kind", engine.kind, "torch")
    else:
        if engine.data_parallel != "fsdp":
            yield _sums_itself("engine.data_parallel", engine.data_parallel, "fsdp")
        if engine.offload != "none":
            yield Broken("engine.offload", f"{engine.offload} steps by other kernels. Use none, {OTHERWISE}.")
        if engine.gradients != "sharded":
            yield _sums_itself("engine.gradients", engine.gradients, "sharded")
    for axis in ("context", "tensor"):
        if (size := getattr(layout, axis)) > 1:
            yield Broken(
                f"layout.{axis}",
                f"{size} ranks would add up parts of one product, and their number would show in the bits. "
                f"Use {axis}=1 with shard, replicate and expert, {OTHERWISE}.",
            )
    if optimizer != "adamw":
        yield Broken("optimizer.kind", f"{optimizer} is not made of exact elementwise steps. Use adamw, {OTHERWISE}.")
    yield from _train_problems(train)
    if windows:
        yield from _micro_problems(batch)


def _sums_itself(key: str, value: str, other: str) -> Broken:
    return Broken(key, f"{value} adds up gradients in an order of its own. Use {other}, {OTHERWISE}.")


def _train_problems(train: TrainConfig) -> Iterator[Broken]:
    if train.precision == "fp16":
        text = "fp16 scales the loss by what happened before, which bitwise mode does not follow. Use bf16 or fp32"
        yield Broken("train.precision", f"{text}, {OTHERWISE}.")
    if train.compile != "none":
        text = f"{train.compile} picks kernels by the shapes that it happened to see first. Use none"
        yield Broken("train.compile", f"{text}, {OTHERWISE}.")
    if not train.threads_per_process:
        yield Broken(
            "train.threads_per_process",
            "0 takes as many threads as there are cores to share, and sums on CPUs depend on their number. "
            "Use 1, or another number that every run of this model is given.",
        )


def _micro_problems(batch: BatchConfig) -> Iterator[Broken]:
    """A micro-batch of a fixed number of windows, which divides every step."""
    legal = [size for size in divisors(batch.sizes[0]) if all(other % size == 0 for other in batch.sizes)]
    if batch.micro_sequences in (0, "auto"):
        yield Broken(
            "batch.micro_sequences",
            f"{batch.micro_sequences} lets the number of ranks decide what a micro-batch holds, and its sums with it. "
            f"Use {listed(legal)}: a step then has {listed([batch.sequences_per_step // size for size in legal])} "
            f"micro-batches, which the number of processes must divide.",
        )
    elif batch.micro_sequences not in legal:
        yield Broken(
            "batch.micro_sequences",
            f"{batch.micro_sequences} does not divide a step of {listed(batch.sizes)} sequences. Use {listed(legal)}.",
        )


def micro_batches(batch: BatchConfig, *, windows: bool) -> tuple[int, ...]:
    """How many micro-batches the steps of a run can have, over all ranks, in bitwise mode."""
    if not windows:
        return (batch.length_groups,)
    return tuple(size // int(batch.micro_sequences) for size in batch.sizes)


def require_ranks(ranks: int, counts: tuple[int, ...]) -> None:
    """ConfigError unless `ranks` is a power of two that divides each of these numbers of micro-batches."""
    legal = [n for n in divisors(counts[0]) if n & (n - 1) == 0 and all(count % n == 0 for count in counts)]
    if ranks not in legal:
        raise ConfigError(
            f"train.reproducibility=bitwise deals the {listed(counts)} micro-batches of a step to a power of two of "
            f"processes that divides them, and there are {ranks}. Start {listed(legal)}, or choose another "
            f"batch.micro_sequences (of pairs and texts: batch.length_groups); that is another trajectory."
        )

"""Rules of `train.reproducibility: bitwise`: a fixed list of micro-batches and one summation order.

RunConfig checks the rules between sections. `require_ranks` checks the number of ranks when a run
starts.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import EngineConfig
from llmsys.config.optimizer import OptimizerConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.section import list_divisors
from llmsys.config.train import TrainConfig
from llmsys.errors import ConfigError, Violation, format_choices

FAST_REMEDY = "or set train.reproducibility=fast"


def find_bitwise_violations(
    train: TrainConfig,
    engine: EngineConfig,
    layout: ParallelLayout,
    batch: BatchConfig,
    *,
    optimizer: OptimizerConfig,
    windows: bool,
) -> Iterator[Violation]:
    """Yield the settings that change sums with the number of ranks.

    Args:
        train: the `train:` section.
        engine: the `engine:` section.
        layout: the `layout:` section.
        batch: the `batch:` section.
        optimizer: the `optimizer:` section.
        windows: steps are packed windows of one length, not pairs or texts.
    """
    if engine.kind != "torch":
        yield _build_summation_violation("engine.kind", engine.kind, "torch")
    else:
        if engine.data_parallel != "fsdp":
            yield _build_summation_violation("engine.data_parallel", engine.data_parallel, "fsdp")
        if engine.cpu_offload != "none":
            yield Violation(
                "engine.cpu_offload",
                f"{engine.cpu_offload} runs the optimizer with other kernels. Use none, "
                f"{FAST_REMEDY}.",
            )
        if engine.gradient_accumulation != "sharded":
            yield _build_summation_violation(
                "engine.gradient_accumulation", engine.gradient_accumulation, "sharded"
            )
    for axis in ("context", "tensor"):
        if (size := getattr(layout, axis)) > 1:
            yield Violation(
                f"layout.{axis}",
                f"{size} ranks would each sum a part of one matmul, so the result would depend on "
                f"their number. Use {axis}=1 with shard, replicate and expert, {FAST_REMEDY}.",
            )
    if not optimizer.is_elementwise:
        yield Violation(
            "optimizer.kind",
            f"{optimizer.kind} has operations that are not elementwise and exact. Use adamw, "
            f"{FAST_REMEDY}.",
        )
    yield from _find_train_violations(train)
    if windows:
        yield from _find_micro_batch_violations(batch)


def _build_summation_violation(key: str, value: str, other: str) -> Violation:
    return Violation(key, f"{value} sums gradients in its own order. Use {other}, {FAST_REMEDY}.")


def _find_train_violations(train: TrainConfig) -> Iterator[Violation]:
    if train.precision == "fp16":
        text = (
            "fp16 adapts the loss scale to earlier overflows, which bitwise mode does not "
            "support. Use bf16 or fp32"
        )
        yield Violation("train.precision", f"{text}, {FAST_REMEDY}.")
    if train.compile == "block":
        text = f"{train.compile} selects kernels by the first shapes that it sees. Use none"
        yield Violation("train.compile", f"{text}, {FAST_REMEDY}.")
    if not train.threads_per_process:
        yield Violation(
            "train.threads_per_process",
            "0 selects the threads by the number of cores, and sums on CPUs depend on it. Use 1, "
            "or the same number in every run of this model.",
        )


def _find_micro_batch_violations(batch: BatchConfig) -> Iterator[Violation]:
    """Yield a violation unless the micro-batch is a fixed number of windows that divides every
    step.
    """
    legal = [
        size
        for size in list_divisors(batch.step_sizes[0])
        if all(step % size == 0 for step in batch.step_sizes)
    ]
    if batch.micro_sequences in (0, "auto"):
        yield Violation(
            "batch.micro_sequences",
            f"{batch.micro_sequences} makes the size of a micro-batch, and so its sums, depend on "
            f"the number of ranks. Use {format_choices(legal)}: a step then has "
            f"{format_choices([batch.sequences_per_step // size for size in legal])} "
            "micro-batches, which the number of processes must divide.",
        )
    elif batch.micro_sequences not in legal:
        yield Violation(
            "batch.micro_sequences",
            f"{batch.micro_sequences} does not divide a step of "
            f"{format_choices(batch.step_sizes)} sequences. Use {format_choices(legal)}.",
        )


def list_micro_batch_counts(batch: BatchConfig, *, windows: bool) -> tuple[int, ...]:
    """Return the distinct numbers of micro-batches per step in bitwise mode, over all ranks.

    Args:
        batch: the `batch:` section; `micro_sequences` is a fixed number where `windows` is true.
        windows: steps are packed windows of one length; otherwise a length bucket is a micro-batch.

    Returns:
        One count per step size, in the order of the ramp.
    """
    if not windows:
        return (batch.num_length_buckets,)
    return tuple(size // int(batch.micro_sequences) for size in batch.step_sizes)


def require_ranks(ranks: int, counts: tuple[int, ...]) -> None:
    """Raise unless `ranks` is a power of two that divides every number of micro-batches.

    Args:
        ranks: data-parallel ranks of the run.
        counts: result of `list_micro_batch_counts`.

    Raises:
        ConfigError: with the legal numbers of ranks.
    """
    # The reduction is a binary tree: ranks must hold complete subtrees.
    legal = [
        n
        for n in list_divisors(counts[0])
        if n & (n - 1) == 0 and all(count % n == 0 for count in counts)
    ]
    if ranks not in legal:
        raise ConfigError(
            f"train.reproducibility=bitwise distributes the {format_choices(counts)} "
            "micro-batches of a step over a power of two of processes that divides them, but "
            f"there are {ranks}. Start {format_choices(legal)}, or choose another "
            "batch.micro_sequences (for pairs and texts: batch.num_length_buckets), which "
            "changes the trajectory."
        )

"""Rules of `train.reproducibility: bitwise` that compute what is legal: a fixed list of
micro-batches, and the ranks that share it.

RunConfig checks the micro-batches. `require_ranks` checks the number of ranks when a run starts.
What bitwise mode cannot be combined with is in combinations.yaml.
"""

from collections.abc import Iterator

from llmsys.config.batch import BatchConfig
from llmsys.config.section import list_divisors
from llmsys.errors import ConfigError, Violation, format_choices


def find_bitwise_violations(batch: BatchConfig) -> Iterator[Violation]:
    """Yield a violation unless the micro-batch is a fixed number of windows that divides every
    step.

    Args:
        batch: the `batch:` section; steps are packed windows of one length.
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

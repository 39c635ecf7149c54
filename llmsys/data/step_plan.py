"""The division of a step into data ranks and micro-batches, in sequences.

Invariants:
- Every rank has the same number of micro-batches, because the ranks synchronize in each of them.
- With a batch ramp, every step size divides evenly.
"""

from dataclasses import dataclass
from functools import cached_property

from llmsys.config.batch import BatchConfig
from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.errors import ConfigError


@dataclass(frozen=True)
class StepPlan:
    """The division of one step's sequences into data ranks and micro-batches. All sizes are in
    sequences.
    """

    sequences: int
    data_ranks: int
    data_rank: int
    micro_sequences: int

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that do not divide, with values that would."""
        if self.sequences % self.data_ranks:
            near = max(1, round(self.sequences / self.data_ranks)) * self.data_ranks
            raise ConfigError(
                f"batch.sequences={self.sequences} cannot be divided evenly over "
                f"{self.data_ranks} data ranks. Use batch.sequences={near} or another number of "
                "processes."
            )
        if self.sequences_per_rank % self.micro_sequences:
            legal = [
                size
                for size in range(1, self.sequences_per_rank + 1)
                if self.sequences_per_rank % size == 0
            ]
            raise ConfigError(
                f"batch.micro_sequences={self.micro_sequences} does not divide the "
                f"{self.sequences_per_rank} sequences of a rank. Use one of "
                f"{', '.join(map(str, legal))}."
            )

    @property
    def sequences_per_rank(self) -> int:
        """Sequences of one rank in one step."""
        return self.sequences // self.data_ranks

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.sequences_per_rank // self.micro_sequences


@dataclass(frozen=True)
class RunPlan:
    """The plans of all steps of a run, for one data rank.

    Raises:
        ConfigError: A step size does not divide evenly.
    """

    batch: BatchConfig
    data_ranks: int
    data_rank: int

    def __post_init__(self) -> None:
        """Check every step size."""
        if self.batch.ramp is not None:
            self._require_even_ramp()
        _ = self._plans

    def get_step_plan(self, step: int) -> tuple[int, StepPlan]:
        """Plan a step.

        Args:
            step: The step, counted from 0; a growing batch has smaller ones at first.

        Returns:
            The number of the first sequence of the step, and its plan.
        """
        return self.batch.count_sequences_before(step), self._plans[
            self.batch.get_step_sequences(step)
        ]

    @cached_property
    def _plans(self) -> dict[int, StepPlan]:
        return {
            size: StepPlan(
                size,
                self.data_ranks,
                self.data_rank,
                self.batch.resolve_micro_sequences(max(1, size // self.data_ranks)),
            )
            for size in self.batch.step_sizes
        }

    def _require_even_ramp(self) -> None:
        """Raise one error about the increment, rather than one about some size on the way."""
        batch = self.batch
        ramp = self.batch.ramp
        assert ramp is not None
        micro = 1 if batch.micro_sequences == "auto" else max(1, batch.micro_sequences)
        increment = ramp.compute_increment(batch.sequence_length)
        wanted = self.data_ranks * micro
        start = ramp.start_tokens // batch.sequence_length
        if increment % wanted:
            multiple = -(-increment // wanted) * wanted
            if isinstance(ramp, NoiseRampConfig):
                raise ConfigError(
                    f"batch.ramp begins with steps of {start} sequences, which {self.data_ranks} "
                    f"data ranks with micro-batches of {micro} cannot share evenly. Use a "
                    f"batch.ramp.start_tokens of at least {multiple * batch.sequence_length}, "
                    "fewer processes, or a smaller batch.micro_sequences."
                )
            raise ConfigError(
                f"batch.ramp grows by {increment} sequences at a time, from {start}, which "
                f"{self.data_ranks} data ranks with micro-batches of {micro} cannot share evenly. "
                f"Use batch.ramp.increment_sequences={multiple} with batch.ramp.start_tokens and "
                f"the full batch multiples of {multiple * batch.sequence_length} tokens, or "
                "another number of processes."
            )

"""The pipeline axis (`layout.pipeline`): its schedule, the stages on each rank, and the rules of
both.

Stage s of a pipeline of p ranks is on rank s mod p: the schedules are those of
torch.distributed.pipelining that visit the ranks in a loop.

Invariants:
- Every message gives the value, the rule, and legal values.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from llmsys.config.batch import BatchConfig
from llmsys.config.model import ModelConfig
from llmsys.config.section import Section, list_divisors
from llmsys.errors import LayoutError, Violation, format_choices

_SPLIT_BACKWARD = "computes gradients of inputs and of weights in two passes"
# Schedules of torch 2.13 that do not give the gradients of one process, and the reason.
REFUSED = {
    "zero_bubble": f"it {_SPLIT_BACKWARD}, which frees the gradient of our head loss after the "
    "first and keeps saved tensors after the step",
    "zbv": f"it {_SPLIT_BACKWARD}, for which FSDP2 that reshards after the forward gives wrong "
    "gradients without an error, and it keeps saved tensors after every step",
    "dualpipev": f"it {_SPLIT_BACKWARD}, for which FSDP2 that reshards after the forward gives "
    "wrong gradients without an error, and selective recomputation fails",
}


class _BaseSchedule(Section):
    """Base of the schedules: one stage on each rank."""

    needs_full_pipeline: ClassVar[bool] = False  # at least as many micro-batches as ranks

    @property
    def num_chunks(self) -> int:
        """Stages on each rank."""
        return 1

    def find_micro_batch_problem(self, ranks: int, micro_batches: int) -> str | None:
        """Return the rule that a number of micro-batches breaks, with legal numbers, or None.

        Args:
            ranks: size of the pipeline axis.
            micro_batches: micro-batches of a rank in one step.
        """
        if self.needs_full_pipeline and micro_batches < ranks:
            return f"at least as many as ranks of the pipeline ({ranks})"
        return None

    def count_held_layers(
        self, ranks: int, rank: int, micro_batches: int, layers: Sequence[int]
    ) -> tuple[int, int]:
        """Count the forward passes of single layers on one rank that wait for their backward pass.

        Args:
            ranks: size of the pipeline axis.
            rank: index on it.
            micro_batches: micro-batches of a step.
            layers: layers of each stage on the rank.

        Returns:
            The most over a step, and the most that wait while the first stage of the rank runs a
            backward pass.
        """
        passes = self._count_passes(ranks, rank, micro_batches)
        return passes * sum(layers), (passes - 1) * sum(layers)

    def _count_passes(self, ranks: int, rank: int, micro_batches: int) -> int:
        # The first gradient comes back after the ranks behind this one have run.
        return min(micro_batches, ranks - rank)


class GPipeScheduleConfig(_BaseSchedule):
    """All forward passes, then all backward passes (Huang 2019, arXiv:1811.06965)."""

    kind: Literal["gpipe"] = "gpipe"

    def _count_passes(self, ranks: int, rank: int, micro_batches: int) -> int:
        return micro_batches


class OneForwardOneBackwardConfig(_BaseSchedule):
    """One forward and one backward in turn, so that at most p micro-batches are held (Narayanan
    2019; 1806.03377).
    """

    kind: Literal["1f1b"] = "1f1b"
    needs_full_pipeline: ClassVar[bool] = True


class InterleavedScheduleConfig(_BaseSchedule):
    """1F1B with several stages on each rank: a bubble 1/v as long, for v messages as many
    (Narayanan 2021).
    """

    kind: Literal["interleaved"] = "interleaved"
    stages_per_rank: int = Field(
        2, ge=2, description="Stages on each rank (virtual pipeline stages)."
    )

    @property
    def num_chunks(self) -> int:
        """Stages on each rank."""
        return self.stages_per_rank

    def find_micro_batch_problem(self, ranks: int, micro_batches: int) -> str | None:
        """Return the rule that a number of micro-batches breaks: rounds of equal size.

        Args:
            ranks: Size of the pipeline axis.
            micro_batches: Micro-batches of a rank in one step.

        Returns:
            The legal numbers in words; None where the number is one of them.
        """
        # As in torch's ScheduleInterleaved1F1B.
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            return f"a multiple of the pipeline's {ranks} ranks, or fewer than {2 * ranks}"
        return None

    def count_held_layers(
        self, ranks: int, rank: int, micro_batches: int, layers: Sequence[int]
    ) -> tuple[int, int]:
        """Count by torch's ScheduleInterleaved1F1B: rounds of passes of each stage in turn."""
        size, stages = _get_round_size(ranks, micro_batches), self.stages_per_rank
        total, warmup = micro_batches * stages, (stages - 1) * size + 2 * (ranks - rank - 1)
        held = most = waiting = forwards = 0
        # After a round of each stage the rank holds the same again, or less.
        for backwards in range(stages * size):
            while forwards < min(warmup + 1 + backwards, total):
                held += layers[forwards // size % stages]
                forwards += 1
            most, stage = max(most, held), stages - 1 - backwards // size
            held -= layers[stage]
            waiting = max(waiting, held) if stage == 0 else waiting
        return most, waiting


def _get_round_size(ranks: int, micro_batches: int) -> int:
    return micro_batches // max(1, micro_batches // ranks)


def _reject_unproven(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind in REFUSED:
        raise ValueError(
            f"{kind} is not available: {REFUSED[kind]}. Use 1f1b, interleaved or gpipe."
        )
    return value


PipelineScheduleConfig = Annotated[
    Annotated[
        GPipeScheduleConfig | OneForwardOneBackwardConfig | InterleavedScheduleConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_reject_unproven),
]


def find_stage_violations(
    ranks: int,
    schedule: PipelineScheduleConfig,
    layers_per_stage: Sequence[int] | None,
    model: ModelConfig,
) -> Iterator[Violation]:
    """Yield the violations of stages that follow from the model alone.

    Args:
        ranks: size of the pipeline axis.
        schedule: `layout.pipeline_schedule`.
        layers_per_stage: `layout.layers_per_stage`.
        model: the architecture.

    Returns:
        An iterator over violations; keys are relative to `layout`.
    """
    if ranks == 1:
        if layers_per_stage is not None:
            yield Violation(
                "layers_per_stage",
                "pipeline=1 has no stages. Leave it out, or use pipeline=2 or more.",
            )
        return
    layers, stages = model.num_hidden_layers, ranks * schedule.num_chunks
    if layers < stages:
        fewer = f"pipeline={format_choices(range(1, max(1, layers // schedule.num_chunks) + 1))}"
        other = "" if schedule.num_chunks == 1 else ", or pipeline_schedule.kind=1f1b"
        yield Violation(
            "pipeline",
            f"{stages} stages cannot share {layers} layers: each needs one. Use {fewer}{other}.",
        )
    elif layers_per_stage is not None and (
        len(layers_per_stage) != stages
        or sum(layers_per_stage) != layers
        or min(layers_per_stage) < 1
    ):
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        yield Violation(
            "layers_per_stage",
            f"{list(layers_per_stage)} must be {stages} numbers of at least 1 with the sum "
            f"{layers}, the layers of the model. Use {even}, or leave it out to cut by cost.",
        )


def list_legal_micro_sequences(
    ranks: int, schedule: PipelineScheduleConfig, shares: Sequence[int]
) -> list[int]:
    """List the micro-batch sizes that cut every share into micro-batches that the schedule takes.

    Args:
        ranks: size of the pipeline axis.
        schedule: `layout.pipeline_schedule`.
        shares: sequences of a rank in a step, for every step size.

    Returns:
        Sequences of a micro-batch, ascending.
    """

    def is_legal(size: int) -> bool:
        return all(
            schedule.find_micro_batch_problem(ranks, share // size) is None for share in shares
        )

    return [size for size in list_divisors(gcd(*shares)) if is_legal(size)]


def require_pipeline_micro_batches(
    ranks: int, schedule: PipelineScheduleConfig, data_ranks: int, batch: BatchConfig
) -> None:
    """Check that the schedule takes the micro-batches of every step size; with `auto`, those of
    some micro-batch.

    Args:
        ranks: size of the pipeline axis.
        schedule: `layout.pipeline_schedule`.
        data_ranks: groups of ranks with different sequences.
        batch: the batch section.

    Raises:
        LayoutError: it does not take them.
    """
    shares = [max(1, sequences // data_ranks) for sequences in batch.step_sizes]
    if batch.micro_sequences == "auto" and list_legal_micro_sequences(ranks, schedule, shares):
        return
    for share in shares:
        found = share // (
            1 if batch.micro_sequences == "auto" else batch.resolve_micro_sequences(share)
        )
        if (rule := schedule.find_micro_batch_problem(ranks, found)) is not None:
            legal = list_legal_micro_sequences(ranks, schedule, [share])
            remedy = (
                f"Use batch.micro_sequences={format_choices(legal)}"
                if legal
                else "Use more batch.sequences"
            )
            raise LayoutError(
                f"batch.micro_sequences={batch.micro_sequences} cuts the {share} sequences of a "
                f"rank into {found} micro-batches, but "
                f"layout.pipeline_schedule.kind={schedule.kind} takes {rule}. {remedy}, fewer "
                "data ranks, or a smaller layout.pipeline."
            )

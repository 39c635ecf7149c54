"""Types of the objects that `llmsys plan --json` and `plan --check --json` print."""

from typing import Any

from pydantic import Field

from llmsys.config.section import ResultSection
from llmsys.estimate.percentile_interval import PercentileInterval


class LayoutPrice(ResultSection):
    """Time and memory of a layout."""

    step_seconds: PercentileInterval = Field(description="Seconds of a step.")
    tokens_per_second_per_device: float = Field(description="At the P50.")
    utilisation: float = Field(description="Model FLOPs with causal attention over the peak.")
    peak_bytes: int = Field(description="Most bytes of the fullest rank.")
    driver_bytes: int = Field(description="Bytes that come on top.")
    needed_bytes: PercentileInterval = Field(description="Both together, with their error.")
    fit_probability: float = Field(description="Probability that the fullest rank fits.")
    peak_instant: str = Field(description="When.")


class PricedLayout(LayoutPrice):
    """A layout that fits."""

    choice: str = Field(description="Its axes, micro-batch and recomputation in one line.")
    engine: dict[str, Any] = Field(description="As `engine.*` of a config.")
    layout: dict[str, Any] = Field(description="As `layout.*` of a config.")
    recompute: str = Field(description="As `train.activation_checkpoint`.")
    micro_sequences: int = Field(description="As `batch.micro_sequences`.")
    largest: dict[str, int] = Field(description="The three largest items of that instant.")


class TurnedAwayLayout(LayoutPrice):
    """A layout that is less likely to fit than `min_fit_probability`."""

    choice: str = Field(description="Its axes, micro-batch and recomputation in one line.")
    reason: str = Field(description="Memory by which it is too large, and when.")


class RejectedLayout(ResultSection):
    """A neighbour of the best layout."""

    change: str = Field(description="What differs from the best.")
    reason: str = Field(description="illegal, memory or time, and by how much.")


class PlannedRun(ResultSection):
    """Hours and money in the fastest layout."""

    hours: PercentileInterval = Field(description="Hours of the run.")
    accelerator_hours: PercentileInterval = Field(description="Hours times devices.")
    amount: PercentileInterval = Field(description="Price of the run.")
    currency: str = Field(description="Currency of the cluster file.")
    price_per_hour: float = Field(description="Price of a device, which a cluster file gives.")


class PlannedProgram(LayoutPrice):
    """The fastest layout of another program."""

    program: str = Field(description="Its name.")
    layout: str = Field(description="Axes in one line.")


class PlanOutput(ResultSection):
    """`llmsys plan CONFIG gpus=N device=NAME --json`."""

    device: str = Field(description="Name of the device profile.")
    considered: int = Field(description="Layouts that were looked at.")
    fitting: int = Field(description="Those that fit.")
    min_fit_probability: float = Field(description="Probability from which a layout fits.")
    best: list[PricedLayout] = Field(description="The fastest, as many as --top.")
    pareto: list[PricedLayout] = Field(description="Each needs less memory than all faster ones.")
    turned_away: list[TurnedAwayLayout] = Field(
        description="Layouts that would be faster than the best, and are not likely to fit."
    )
    rejected: list[RejectedLayout] = Field(description="Neighbours of the best, with what binds.")
    programs: list[PlannedProgram] = Field(description="Those that program= names.")
    launch: str = Field(description="Command that starts the fastest layout.")
    dryrun: str = Field(description="Command that runs one rank of it without a GPU; may be empty.")
    run: PlannedRun | None = Field(None, description="With train.tokens: the whole run.")
    config: str | None = Field(None, description="With --output: the file.")
    page: str | None = Field(None, description="With --html: the file.")


class LayoutCheckOutput(ResultSection):
    """`llmsys plan CONFIG --check LAYOUT --json`."""

    legal: bool = Field(description="The layout breaks no rule.")
    devices: int = Field(description="Devices of the layout.")
    problems: list[str] = Field(description="Rules that it breaks, with the next step.")
    remarks: list[str] = Field(description="What to know about a legal one.")
    program: str | None = Field(None, description="Program that was priced.")
    fits: bool | None = Field(None, description="The fullest rank fits the device.")
    peak_bytes: int | None = Field(
        None, description="Bytes of the fullest rank, with those of the driver."
    )
    needed_bytes: PercentileInterval | None = Field(
        None, description="The same bytes with their error."
    )
    fit_probability: float | None = Field(None, description="Probability that it fits.")
    memory: str | None = Field(None, description="The same as a sentence.")
    assumed: list[str] | None = Field(
        None,
        description="What the memory of the program rests on and no source gives, with the memory "
        "without it.",
    )
    step_seconds: PercentileInterval | None = Field(None, description="Seconds of a step.")
    time: str | None = Field(None, description="The same as a sentence.")
    own: str | None = Field(None, description="With --compare: the layout that a plan chooses.")

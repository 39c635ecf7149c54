"""Types of the object that `llmsys scale --json` prints."""

from pydantic import Field

from llmsys.config.section import ResultSection


class Budget(ResultSection):
    """The compute that was asked for."""

    flops: float = Field(description="FLOPs.")
    assumptions: list[str] = Field(description="How other units became FLOPs.")


class Extrapolation(ResultSection):
    """Distance of a recommendation from the range that a law was fitted on."""

    times: float = Field(description="Factor beyond the nearest end of the range.")
    axis: str = Field(description="Parameters, tokens, FLOPs or experts.")


class LawRow(ResultSection):
    """The recommendation of one law."""

    law: str = Field(description="Its name.")
    marked: bool = Field(description="highlight= names it.")
    source: str = Field(description="Paper.")
    counts: str = Field(description="Parameters that it counts.")
    evidence: str = Field(description="Where its constants are from.")
    parameters: float = Field(
        description="Parameters, in the convention of the law; active ones of experts."
    )
    total_parameters: float | None = Field(
        description="All parameters of a mixture; null for a dense model."
    )
    granularity: float | None = Field(
        description="Granularity of experts; null where the law has none."
    )
    tokens: float = Field(description="Training tokens.")
    tokens_per_parameter: float = Field(description="Their quotient.")
    loss: float | None = Field(description="Loss in nats per token; null where the law has none.")
    epochs: float | None = Field(description="Passes over unique_tokens=; null without it.")
    outside: Extrapolation | None = Field(description="null inside of the fitted range.")
    remarks: list[str] = Field(description="What the law leaves out.")


class Spread(ResultSection):
    """Smallest, median and largest recommendation."""

    low: float = Field(description="Smallest.")
    median: float = Field(description="Median.")
    high: float = Field(description="Largest.")


class RateRow(ResultSection):
    """Batch and learning rate of one law."""

    law: str = Field(description="Its name.")
    at_parameters: float | None = Field(description="Model size that it depends on; null: none.")
    batch_tokens: float = Field(description="Tokens of a batch.")
    learning_rate: float | None = Field(
        description="Peak learning rate; null where the law has none."
    )
    outside: Extrapolation | None = Field(description="null inside of the fitted range.")


class ExpertRow(ResultSection):
    """Gain of experts by Clark 2022."""

    law: str = Field(description="Kind of routing.")
    parameters: float = Field(description="Active parameters.")
    experts: int = Field(description="Experts.")
    dense_parameters: float = Field(description="Parameters of a dense model with the same loss.")
    outside: float = Field(description="Factor beyond the fitted range; 1 inside.")


class ScaleOutput(ResultSection):
    """`llmsys scale budget=… --json`."""

    budget: Budget = Field(description="The compute.")
    unique_tokens: float | None = Field(description="unique_tokens= of the command.")
    served_tokens: float | None = Field(description="serve_tokens= of the command.")
    laws: list[LawRow] = Field(description="A row for each law.")
    spread: dict[str, Spread] = Field(description="Of parameters, tokens and tokens_per_parameter.")
    rates: list[RateRow] = Field(description="Batch and learning rate.")
    experts: list[ExpertRow] = Field(description="Gain of experts; empty for dense models.")
    page: str | None = Field(None, description="With --html: the file.")


class FittedConstants(ResultSection):
    """E + A / N^alpha + B / D^beta, in nats per token."""

    E: float = Field(description="Loss of infinite size and data.")
    A: float = Field(description="Factor of the size.")
    B: float = Field(description="Factor of the data.")
    alpha: float = Field(description="Exponent of the size.")
    beta: float = Field(description="Exponent of the data.")


class FittedInterval(ResultSection):
    """A recommendation, and 5 and 95 % of those of resampled runs."""

    best: float = Field(description="By the fitted law.")
    low: float = Field(description="One in twenty is below.")
    high: float = Field(description="One in twenty is above.")


class FittedOptimum(ResultSection):
    """The recommendation for a budget."""

    flops: float = Field(description="The budget.")
    parameters: FittedInterval = Field(description="Parameters.")
    tokens: FittedInterval = Field(description="Training tokens.")
    loss: FittedInterval = Field(description="Nats per token.")
    times_beyond: float = Field(description="Budget over that of the largest run; 1 inside.")


class FitOutput(ResultSection):
    """`llmsys scale fit RUN RUN… --json`."""

    law: FittedConstants = Field(description="The fitted constants.")
    intervals: dict[str, tuple[float, float]] = Field(description="5 and 95 % of each constant.")
    runs: int = Field(description="Runs that were fitted.")
    largest_residual: float = Field(description="Largest error of log loss.")
    largest_flops: float = Field(description="FLOPs of the largest run.")
    optima: list[FittedOptimum] = Field(description="A row for each budget=.")
    report: str = Field(description="File with three plots.")

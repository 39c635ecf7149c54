"""A scaling law: what it counts, where it was fitted, and what it recommends for a budget of
operations.

Compute is 6 · parameters · tokens where a law does not say otherwise. Losses are nats per token of
the law's own text and tokenizer, so they can be compared along one law only, never between two.

Power laws give the best size or number of tokens directly from the compute.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Axis = Literal["FLOPs", "parameters", "tokens"]
# Forward and backward of one parameter for one token (Kaplan 2020, 2.1).
FLOPS_PER_PARAMETER_AND_TOKEN = 6


@dataclass(frozen=True)
class FittedRange:
    """The largest and smallest runs behind a fit, on one axis."""

    axis: Axis
    low: float
    high: float

    def compute_extrapolation(self, value: float) -> float:
        """Return how many times beyond the nearer end a value lies; 1 inside."""
        if value > self.high:
            return value / self.high
        return self.low / value if value < self.low else 1.0


@dataclass(frozen=True)
class LawSource:
    """Source of a law: its paper, its definition of parameters, its spans, and how sure its
    constants are.
    """

    source: str
    counts: str
    spans: tuple[FittedRange, ...]
    evidence: str = ""


@dataclass(frozen=True)
class BudgetRequest:
    """A budget: operations, unique tokens to train on, tokens to be served later out of the same
    budget.

    `served_tokens` is in tokens at the utilisation of training. `experts` and `granularity` (d_ff
    over the width of one expert; None: the best one) describe a mixture of experts, for its laws.
    """

    flops: float
    unique_tokens: float | None = None
    served_tokens: float = 0.0
    experts: int = 1
    granularity: float | None = None


@dataclass(frozen=True)
class Optimum:
    """A law's best use of a budget. `ignores` names what was asked for and the law has no term for.

    `total_parameters` and `granularity` are of a mixture of experts, whose `parameters` are the
    active ones.
    """

    parameters: float
    tokens: float
    loss: float | None
    ignores: tuple[str, ...] = ()
    total_parameters: float | None = None
    granularity: float | None = None

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens for each parameter, as the law counts them."""
        return self.tokens / self.parameters


class ScalingLaw(Protocol):
    """One published law."""

    @property
    def name(self) -> str:
        """Its authors and year, as in `--mark`."""
        ...

    @property
    def origin(self) -> LawSource:
        """Its paper, and the runs it was fitted on."""
        ...

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """Return the best parameters and tokens for a budget.

        Args:
            request: FLOPs, and limits of the data and of serving.
        """
        ...


def find_extrapolation(law: ScalingLaw, flops: float, best: Optimum) -> tuple[float, Axis] | None:
    """Return how far, and on which axis, a recommendation lies outside the runs behind the law;
    None inside.
    """
    values: dict[Axis, float] = {
        "FLOPs": flops,
        "parameters": best.parameters,
        "tokens": best.tokens,
    }
    worst = max(
        ((span.compute_extrapolation(values[span.axis]), span.axis) for span in law.origin.spans),
        default=(1.0, "FLOPs"),
    )
    return worst if worst[0] > 1 else None


FLOPS_PER_PF_DAY = 8.64e19


@dataclass(frozen=True)
class KaplanLaw:
    """Kaplan 2020 (arXiv:2001.08361): N counts no embeddings, compute is in PF-days, C_min as in
    its section 6.

    N = 1.3e9 C^0.73 (its table 6), and D from 6 N D = C, so that the budget is spent. Its loss is
    (3.1e8 / C)^0.05.
    """

    name: str
    origin: LawSource

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law."""
        pf_days = request.flops / FLOPS_PER_PF_DAY
        parameters = 1.3e9 * pf_days**0.73
        tokens = request.flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters
        return Optimum(parameters, tokens, (3.1e8 / pf_days) ** 0.050, list_ignored_inputs(request))

    @staticmethod
    def predict_loss_from_parameters(parameters: float) -> float:
        """Nats per token of a model trained on enough, its equation 1.1."""
        return float((8.8e13 / parameters) ** 0.076)

    @staticmethod
    def predict_loss(parameters: float, tokens: float) -> float:
        """Nats per token of both limits together, its equation 1.5 with the constants of its
        table 2.
        """
        return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


@dataclass(frozen=True)
class ComputeLaw:
    """tokens = factor · C^exponent, and as many parameters as the rest of the compute pays for."""

    name: str
    origin: LawSource
    factor: float
    exponent: float

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law."""
        tokens = self.factor * request.flops**self.exponent
        return Optimum(
            request.flops / FLOPS_PER_PARAMETER_AND_TOKEN / tokens,
            tokens,
            None,
            list_ignored_inputs(request),
        )


def list_ignored_inputs(request: BudgetRequest) -> tuple[str, ...]:
    """Return the inputs that a law of compute alone has no term for."""
    asked = {"repetition": request.unique_tokens is not None, "serving": request.served_tokens > 0}
    return tuple(name for name, given in asked.items() if given)

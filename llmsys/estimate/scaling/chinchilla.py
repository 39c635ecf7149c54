"""Laws of the form L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann 2022, 3.3), and the one that
knows repetition.

For plain training the optimum is closed: N = G (C/6)^(beta/(alpha+beta)), G = (alpha A / (beta
B))^(1/(alpha+beta)). With tokens to serve, a budget pays 6 N D to train and 2 N T to serve (Sardana
2023, 2), and the valley is searched.

The search is by golden section on a logarithmic axis.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from llmsys.estimate.scaling.law import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    BudgetRequest,
    LawSource,
    Optimum,
)

GOLDEN = (math.sqrt(5) - 1) / 2


def minimize_golden_section(
    curve: Callable[[float], float], low: float, high: float, steps: int = 120
) -> float:
    """Golden-section search (Kiefer 1953): the x in [low, high] where `curve` is lowest; x is
    positive.

    A step shrinks the interval by 0.618; 120 of them reach the last digit of a double from any
    start.
    """
    left, right = math.log(low), math.log(high)
    first, second = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
    at_first, at_second = curve(math.exp(first)), curve(math.exp(second))
    for _ in range(steps):
        if at_first <= at_second:
            right, second, at_second = second, first, at_first
            first = right - GOLDEN * (right - left)
            at_first = curve(math.exp(first))
        else:
            left, first, at_first = first, second, at_second
            second = left + GOLDEN * (right - left)
            at_second = curve(math.exp(second))
    return math.exp((left + right) / 2)


FLOPS_PER_SERVED_TOKEN = 2


@dataclass(frozen=True)
class ParametricLaw:
    """E, A, B, alpha and beta of one fit. N and D are parameters and tokens."""

    name: str
    origin: LawSource
    irreducible: float
    parameter_factor: float
    token_factor: float
    alpha: float
    beta: float

    def predict_loss(self, parameters: float, tokens: float) -> float:
        """Compute E + A / N^alpha + B / D^beta.

        Args:
            parameters: N.
            tokens: D. Repeated tokens count as new ones.

        Returns:
            Nats per token of the text behind the fit.
        """
        of_size = self.parameter_factor / parameters**self.alpha
        of_tokens = self.token_factor / tokens**self.beta
        return float(self.irreducible + of_size + of_tokens)

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """Implement `ScalingLaw.find_optimum`.

        Args:
            request: With tokens to serve, their cost is part of the budget and the optimum is
                searched for; without, it has a closed form.

        Returns:
            Parameters, tokens and their loss. Repetition of data is not modelled, and is named
            where the request limits the tokens.
        """
        ignores = ("repetition",) if request.unique_tokens is not None else ()
        if request.served_tokens:
            tokens = _find_best_tokens(request, self.predict_loss)
            parameters = compute_affordable_parameters(request, tokens)
        else:
            parameters = self.compute_best_parameters(request.flops)
            tokens = request.flops / FLOPS_PER_PARAMETER_AND_TOKEN / parameters
        return Optimum(parameters, tokens, self.predict_loss(parameters, tokens), ignores)

    def compute_best_parameters(self, flops: float) -> float:
        """N of the closed form, for training alone."""
        total = self.alpha + self.beta
        balance = self.alpha * self.parameter_factor / (self.beta * self.token_factor)
        return float(
            balance ** (1 / total) * (flops / FLOPS_PER_PARAMETER_AND_TOKEN) ** (self.beta / total)
        )


@dataclass(frozen=True)
class DataConstrainedLaw:
    """Muennighoff 2023: repeated tokens and excess parameters count for less and less.

    D' = U + U R* (1 - exp(-R / R*)) with U unique tokens and R = D / U - 1 repetitions; N'
    likewise, with the parameters that would be best for U in the place of U.
    """

    name: str
    base: ParametricLaw
    token_decay: float
    parameter_decay: float

    @property
    def origin(self) -> LawSource:
        """See Law."""
        return self.base.origin

    def predict_loss(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Nats per token after `tokens`, of which `unique_tokens` differ."""
        unique = min(unique_tokens, tokens)
        enough = min(self.compute_parameters_for(unique), parameters)
        return self.base.predict_loss(
            compute_effective_amount(parameters, enough, self.parameter_decay),
            compute_effective_amount(tokens, unique, self.token_decay),
        )

    def compute_parameters_for(self, tokens: float) -> float:
        """The N whose best D is `tokens` (alpha and beta are equal, so it is proportional)."""
        base = self.base
        total = base.alpha + base.beta
        balance = base.alpha * base.parameter_factor / (base.beta * base.token_factor)
        return float(
            (balance ** (1 / total) * tokens ** (base.beta / total)) ** (total / base.alpha)
        )

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law. Without a limit of unique tokens it is the base's own optimum."""
        unique = request.unique_tokens
        if unique is None:
            return self.base.find_optimum(request)
        tokens = _find_best_tokens(request, lambda n, d: self.predict_loss(n, d, unique))
        parameters = compute_affordable_parameters(request, tokens)
        return Optimum(parameters, tokens, self.predict_loss(parameters, tokens, unique))


def compute_effective_amount(amount: float, unique: float, decay: float) -> float:
    """Return the worth of `amount` when only `unique` of it differs (Muennighoff 2023, equations
    5 and 6).
    """
    repetitions = amount / unique - 1
    return unique * (1 + decay * -math.expm1(-repetitions / decay))


def compute_affordable_parameters(request: BudgetRequest, tokens: float) -> float:
    """N so that training on `tokens` and serving what is to be served spends the budget exactly."""
    per_parameter = (
        FLOPS_PER_PARAMETER_AND_TOKEN * tokens + FLOPS_PER_SERVED_TOKEN * request.served_tokens
    )
    return request.flops / per_parameter


def _find_best_tokens(request: BudgetRequest, loss: Callable[[float, float], float]) -> float:
    """The D with the lowest loss on the line of equal cost, from a thousand tokens up to a model
    of one parameter.
    """
    most = request.flops / FLOPS_PER_PARAMETER_AND_TOKEN
    return minimize_golden_section(
        lambda tokens: loss(compute_affordable_parameters(request, tokens), tokens), 1e3, most
    )

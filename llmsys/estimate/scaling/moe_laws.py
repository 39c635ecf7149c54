"""Laws for mixtures of experts: what experts are worth in dense parameters, and how fine they should be."""

import math
from dataclasses import dataclass

from llmsys.estimate.scaling.golden_section import minimize_golden_section
from llmsys.estimate.scaling.law import FLOPS_PER_PARAMETER_AND_TOKEN, BudgetRequest, LawSource, Optimum
from llmsys.estimate.scaling.power_laws import list_ignored_inputs


@dataclass(frozen=True)
class ClarkLaw:
    """Clark 2022 (arXiv:2202.01169), equation 2: log10 L = a log N + b log Ê + c log N log Ê + d, all to base 10.

    N is the dense model that gets `experts` experts; Ê saturates: 1/Ê = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max.
    Its losses were measured at 130B tokens, so it says what experts are worth and not how a budget is split.
    """

    name: str
    origin: LawSource
    a: float
    b: float
    c: float
    d: float
    start: float
    most: float

    def saturate_experts(self, experts: int) -> float:
        """Ê: what the number of experts counts for."""
        return 1 / (1 / (experts - 1 + 1 / (1 / self.start - 1 / self.most)) + 1 / self.most)

    def predict_loss(self, parameters: float, experts: int) -> float:
        """Nats per token."""
        size, many = math.log10(parameters), math.log10(self.saturate_experts(experts))
        return float(10 ** (self.a * size + self.b * many + self.c * size * many + self.d))

    def compute_dense_equivalent(self, parameters: float, experts: int) -> float:
        """The dense size with the loss of a model of size N with experts (its effective parameter count)."""
        one = math.log10(self.saturate_experts(1))
        target = math.log10(self.predict_loss(parameters, experts))
        return float(10 ** ((target - self.b * one - self.d) / (self.a + self.c * one)))


@dataclass(frozen=True)
class KrajewskiLaw:
    """Krajewski 2024 (arXiv:2402.07871): L = c + (g / G^gamma + a) / N^alpha + b / D^beta, at 64 experts.

    N counts active parameters, G is the granularity: d_ff over the width of one expert.
    """

    name: str
    origin: LawSource
    c: float
    g: float
    gamma: float
    a: float
    alpha: float
    b: float
    beta: float

    def predict_loss(self, parameters: float, tokens: float, granularity: float) -> float:
        """Nats per token."""
        of_size = (self.g / granularity**self.gamma + self.a) / parameters**self.alpha
        return float(self.c + of_size + self.b / tokens**self.beta)

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law."""
        pairs = request.flops / FLOPS_PER_PARAMETER_AND_TOKEN

        def predict_loss_on_budget(tokens: float) -> float:
            return self.predict_loss(pairs / tokens, tokens, request.granularity)

        tokens = minimize_golden_section(predict_loss_on_budget, 1e3, pairs)
        return Optimum(pairs / tokens, tokens, predict_loss_on_budget(tokens), list_ignored_inputs(request))

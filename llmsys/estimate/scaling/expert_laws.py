"""The published laws of mixtures of experts: how to split a budget, how fine experts should be,
what they are worth.

Each law counts parameters in its own way, which its `counts` names.

Invariants:
- An optimum spends the budget exactly, with the cost of training and serving that the law's paper
  defines.
"""

import math
from dataclasses import dataclass

from llmsys.estimate.scaling.chinchilla import (
    compute_affordable_parameters,
    minimize_golden_section,
)
from llmsys.estimate.scaling.law import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    BudgetRequest,
    FittedRange,
    LawSource,
    Optimum,
    ScalingLaw,
)

# Candidates of the search for the best granularity, as in table 2 of Krajewski 2024.
GRANULARITIES = tuple(2.0**power for power in range(11))


def saturate_experts(experts: int, start: float, most: float) -> float:
    """Return Ê of Clark 2022, equation 5: 1/Ê = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max.

    Args:
        experts: number of experts.
        start: E_start of the fit.
        most: E_max of the fit.

    Returns:
        What the number of experts counts for.
    """
    return 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / most)) + 1 / most)


@dataclass(frozen=True)
class ClarkLaw:
    """Clark 2022 (arXiv:2202.01169), equation 2: log10 L = a log N + b log Ê + c log N log Ê + d,
    all to base 10.

    N is the dense model that gets `experts` experts; Ê saturates with their number. Its losses were
    measured at 130B tokens, so it says what experts are worth and not how a budget is split.
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
        return saturate_experts(experts, self.start, self.most)

    def predict_loss(self, parameters: float, experts: int) -> float:
        """Nats per token."""
        size, many = math.log10(parameters), math.log10(self.saturate_experts(experts))
        return float(10 ** (self.a * size + self.b * many + self.c * size * many + self.d))

    def compute_dense_equivalent(self, parameters: float, experts: int) -> float:
        """The dense size with the loss of a model of size N with experts (its effective
        parameter count).
        """
        one = math.log10(self.saturate_experts(1))
        target = math.log10(self.predict_loss(parameters, experts))
        # Equation 2 with one expert, solved for log N.
        return float(10 ** ((target - self.b * one - self.d) / (self.a + self.c * one)))


@dataclass(frozen=True)
class KrajewskiLaw:
    """Krajewski 2024 (arXiv:2402.07871): L = c + (g / G^gamma + a) / N^alpha + b / D^beta, equation
    9.

    N counts all parameters without embeddings: with an expansion rate of E, a model written as "64
    x 100M" has 100M active ones, of which two thirds are feed-forward layers that exist E times. G
    is d_ff over the width of an expert. Compute is that of its equation 10, (12 d^2 c_f + d E G
    c_r) n D with d = 64 n, so it includes the routing.
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

    def predict_loss(
        self, active_parameters: float, tokens: float, granularity: float, experts: int = 64
    ) -> float:
        """Nats per token of a model with `active_parameters` and `experts` times as many in its
        feed-forward layers.
        """
        parameters = count_total_parameters(active_parameters, experts)
        of_size = (self.g / granularity**self.gamma + self.a) / parameters**self.alpha
        return float(self.c + of_size + self.b / tokens**self.beta)

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law. Without a granularity of the request it is the best power of two."""
        candidates = GRANULARITIES if request.granularity is None else (request.granularity,)
        return min(
            (self._find_optimum_for(request, one) for one in candidates),
            key=lambda best: best.loss or math.inf,
        )

    def _find_optimum_for(self, request: BudgetRequest, granularity: float) -> Optimum:
        def compute_tokens(active: float) -> float:
            per_token = count_training_flops(active, request.experts, granularity)
            # Serving is a forward pass, a third of training.
            return request.flops / per_token - request.served_tokens / 3

        def predict_loss_on_budget(active: float) -> float:
            tokens = compute_tokens(active)
            return (
                self.predict_loss(active, tokens, granularity, request.experts)
                if tokens >= 1
                else math.inf
            )

        active = minimize_golden_section(
            predict_loss_on_budget, 1.0, request.flops / FLOPS_PER_PARAMETER_AND_TOKEN
        )
        return Optimum(
            active,
            compute_tokens(active),
            predict_loss_on_budget(active),
            ("repetition",) if request.unique_tokens is not None else (),
            count_total_parameters(active, request.experts),
            granularity,
        )


def count_total_parameters(active: float, experts: int) -> float:
    """Return the parameters, without embeddings, of "experts x active" where d_ff is 4 d.

    Args:
        active: parameters that a token uses, without embeddings.
        experts: expansion rate of the feed-forward layers.

    Returns:
        All parameters: a third of `active` is attention, two thirds exist `experts` times.
    """
    return active * (1 + 2 * experts) / 3


def count_training_flops(active: float, experts: int, granularity: float) -> float:
    """Return the operations of a training token with c_f = 6 and c_r = 14 (Krajewski 2024, equation
    10).

    Args:
        active: 12 d^2 n parameters that a token uses.
        experts: expansion rate E.
        granularity: G; the router has E G outputs.

    Returns:
        Operations of one token, forward and backward.
    """
    blocks: float = (active / (12 * 64**2)) ** (1 / 3)
    return 6 * active + 14 * (64 * blocks) * experts * granularity * blocks


@dataclass(frozen=True)
class LudziejewskiLaw:
    """Ludziejewski 2025 (arXiv:2502.05172): L = a Ê^delta N^(alpha + gamma ln Ê) + b Ê^omega
    D^(beta + zeta ln Ê) + c.

    Its equation 6, for one expert per token as wide as the dense layer. N counts active parameters
    with embeddings; training costs 6 N D and serving 2 N D. One expert is the dense model.
    """

    name: str
    origin: LawSource
    a: float
    alpha: float
    delta: float
    gamma: float
    b: float
    beta: float
    omega: float
    zeta: float
    start: float
    most: float
    c: float

    def reduce_to_two_terms(self, experts: int) -> tuple[float, float, float, float]:
        """Return m, mu, n and nu of L = m N^mu + n D^nu + c for a number of experts (its table
        4).
        """
        many = saturate_experts(experts, self.start, self.most)
        log = math.log(many)
        return (
            self.a * many**self.delta,
            self.alpha + self.gamma * log,
            self.b * many**self.omega,
            self.beta + self.zeta * log,
        )

    def predict_loss(self, parameters: float, tokens: float, experts: int) -> float:
        """Nats per token."""
        m, mu, n, nu = self.reduce_to_two_terms(experts)
        return float(m * parameters**mu + n * tokens**nu + self.c)

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law."""

        def predict_loss_on_budget(tokens: float) -> float:
            return self.predict_loss(
                compute_affordable_parameters(request, tokens), tokens, request.experts
            )

        tokens = minimize_golden_section(
            predict_loss_on_budget, 1e3, request.flops / FLOPS_PER_PARAMETER_AND_TOKEN
        )
        ignores = {
            "repetition": request.unique_tokens is not None,
            "granularity": (request.granularity or 1) != 1,
        }
        return Optimum(
            compute_affordable_parameters(request, tokens),
            tokens,
            predict_loss_on_budget(tokens),
            tuple(name for name, given in ignores.items() if given),
            granularity=1.0,
        )


KRAJEWSKI = KrajewskiLaw(
    "krajewski_2024",
    LawSource(
        "Krajewski 2024, arXiv:2402.07871, tables 1 and 2",
        "active, without embeddings",
        (FittedRange("tokens", 1.6e10, 1.3e11), FittedRange("parameters", 3e6, 8.6e7)),
        "64 experts in all its runs",
    ),
    c=0.47,
    g=2.1,
    gamma=0.58,
    a=18.1,
    alpha=0.115,
    b=30.8,
    beta=0.147,
)
LUDZIEJEWSKI = LudziejewskiLaw(
    "ludziejewski_2025",
    LawSource(
        "Ludziejewski 2025, arXiv:2502.05172, table 3",
        "active, with embeddings",
        (FittedRange("parameters", 7.9e7, 2.7e9), FittedRange("tokens", 5e8, 8e10)),
        "1 to 32 experts, one per token",
    ),
    a=35.91,
    alpha=-0.1889,
    delta=-0.2285,
    gamma=0.0098,
    b=35.98,
    beta=-0.1775,
    omega=0.5529,
    zeta=-0.0259,
    start=2.0732,
    most=290.4521,
    c=1.3637,
)
# Laws that split a budget for a mixture of experts.
MIXTURES: tuple[ScalingLaw, ...] = (KRAJEWSKI, LUDZIEJEWSKI)

_CLARK = LawSource(
    "Clark 2022, arXiv:2202.01169, table 3",
    "the dense model that gets experts",
    (FittedRange("parameters", 1.5e7, 1.3e9),),
)
# Scaling laws of mixtures of experts, for three kinds of routing.
CLARK: tuple[ClarkLaw, ...] = (
    ClarkLaw("clark_2022_s_base", _CLARK, -0.082, -0.108, 0.009, 1.104, 1.847, 314.478),
    ClarkLaw("clark_2022_rl_r", _CLARK, -0.083, -0.126, 0.012, 1.111, 1.880, 469.982),
    ClarkLaw("clark_2022_hash", _CLARK, -0.087, -0.136, 0.012, 1.157, 4.175, 477.741),
)

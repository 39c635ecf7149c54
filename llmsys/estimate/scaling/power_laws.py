"""Laws that give the best size or number of tokens straight from the compute."""

from dataclasses import dataclass

from llmsys.estimate.scaling.law import FLOPS_PER_PARAMETER_AND_TOKEN, BudgetRequest, LawSource, Optimum

FLOPS_PER_PF_DAY = 8.64e19


@dataclass(frozen=True)
class KaplanLaw:
    """Kaplan 2020 (arXiv:2001.08361): N counts no embeddings, compute is in PF-days, C_min as in its section 6.

    N = 1.3e9 C^0.73 (its table 6), and D from 6 N D = C, so that the budget is spent. Its loss is (3.1e8 / C)^0.05.
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
        """Nats per token of both limits together, its equation 1.5 with the constants of its table 2."""
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
            request.flops / FLOPS_PER_PARAMETER_AND_TOKEN / tokens, tokens, None, list_ignored_inputs(request)
        )


def list_ignored_inputs(request: BudgetRequest) -> tuple[str, ...]:
    """Return the inputs that a law of compute alone has no term for."""
    asked = {"repetition": request.unique_tokens is not None, "serving": request.served_tokens > 0}
    return tuple(name for name, given in asked.items() if given)

"""A fitted law as plain values and as a page of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from llmsys.estimate.scaling.fit import UNKNOWNS, LawFit
from llmsys.estimate.text import format_count

TIMES_AHEAD = 10.0
"""Without a budget, the law is asked for one so many times the largest run."""


def fit_to_dict(fit: LawFit, budgets: Sequence[float]) -> dict[str, Any]:
    """Keys: law (constants), intervals, runs, largest_flops, optima (one per budget)."""
    law = fit.law
    values = (law.irreducible, law.parameter_factor, law.token_factor, law.alpha, law.beta)
    largest = law.origin.spans[2].high
    return {
        "law": dict(zip(UNKNOWNS, values, strict=True)),
        "intervals": fit.intervals,
        "runs": len(fit.residuals),
        "largest_residual": max(map(abs, fit.residuals)),
        "largest_flops": largest,
        "optima": [
            fit.find_optimum(flops) | {"times_beyond": max(1.0, flops / largest)}
            for flops in budgets or (largest, TIMES_AHEAD * largest)
        ],
    }


def format_fit(result: dict[str, Any]) -> str:
    """The law, its intervals, and what it recommends."""
    return "\n".join(_iter_fit_lines(result))


def _iter_fit_lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"L = E + A / N^alpha + B / D^beta through {result['runs']} runs; intervals of 5 to 95 %"
    for name, value in result["law"].items():
        low, high = result["intervals"][name]
        yield f"  {name:<6}{value:>12.5g}   {low:.5g} to {high:.5g}"
    yield f"  largest residual {100 * result['largest_residual']:.2f} %"
    for best in result["optima"]:
        far = best["times_beyond"]
        yield ""
        note = f"   EXTRAPOLATED {far:.3g}× beyond the largest run" if far > 1 else ""
        yield f"{best['flops']:.3g} FLOPs{note}"
        for name in ("parameters", "tokens"):
            one = best[name]
            yield f"  {name:<12}{format_count(one['best']):>8}   {format_count(one['low'])} to {format_count(one['high'])}"
        loss = best["loss"]
        yield f"  {'loss':<12}{loss['best']:>8.3f}   {loss['low']:.3f} to {loss['high']:.3f}"
    yield ""
    yield f"plots: {result['report']}"

"""The family of laws, and a fitted law, as pages of text."""

from collections.abc import Iterator, Sequence

from llmsys.estimate.scaling.json_output import (
    ExpertRow,
    Extrapolation,
    FitOutput,
    FittedConstants,
    RateRow,
    ScaleOutput,
)
from llmsys.estimate.scaling.law_fit import LawFit
from llmsys.estimate.summary_table import format_count


def format_law_comparison(result: ScaleOutput) -> str:
    """Format laws, their spread, and their batch sizes and learning rates as a table.

    Args:
        result: what `compare_laws` returned.

    Returns:
        Lines of text.
    """
    return "\n".join(_iter_comparison_lines(result))


def _iter_comparison_lines(result: ScaleOutput) -> Iterator[str]:
    budget = result.budget
    yield f"budget   {budget.flops:.3g} FLOPs"
    yield from (f"         {line}" for line in budget.assumptions)
    if result.served_tokens:
        yield (
            "         pays for training and for inference on "
            f"{format_count(result.served_tokens)} tokens"
        )
    if result.unique_tokens is not None:
        yield f"         {format_count(result.unique_tokens)} unique tokens"
    yield ""
    yield from _iter_law_lines(result)
    yield ""
    yield from _iter_spread_lines(result)
    yield from _iter_expert_lines(result.experts)
    yield ""
    yield from _iter_rate_lines(result.rates)
    yield ""
    yield "Losses depend on the data and tokenizer of each law and cannot be compared between laws."


def _iter_law_lines(result: ScaleOutput) -> Iterator[str]:
    epochs = result.unique_tokens is not None
    yield (
        f"  {'law':<24}{'parameters':>11}{'tokens':>10}{'tokens/par.':>12}{'loss':>8}"
        + (f"{'epochs':>8}" if epochs else "")
        + "  fitted on"
    )
    for row in result.laws:
        loss = "–" if row.loss is None else f"{row.loss:.3f}"
        read = f"{row.epochs:>8.1f}" if epochs else ""
        notes = "; ".join(
            [
                _format_extrapolation(row.outside),
                *row.remarks,
                *filter(None, [row.evidence]),
            ]
        )
        sizes = f"{format_count(row.parameters):>11}{format_count(row.tokens):>10}"
        ratio = f"{row.tokens_per_parameter:>12.1f}"
        mark = ">" if row.marked else " "
        yield f"{mark} {row.law:<24}{sizes}{ratio}{loss:>8}{read}  {notes}"


def _format_extrapolation(outside: Extrapolation | None) -> str:
    if outside is None:
        return "runs of this size"
    return f"EXTRAPOLATED {outside.times:,.3g}× beyond its runs in {outside.axis}"


def _iter_spread_lines(result: ScaleOutput) -> Iterator[str]:
    spread = result.spread
    for name in ("parameters", "tokens"):
        one = spread[name]
        low, high = format_count(one.low), format_count(one.high)
        yield f"{name:<12}{low} to {high}, median {format_count(one.median)}"
    ratio = spread["tokens_per_parameter"]
    yield (
        f"{'ratio':<12}{ratio.low:.1f} to {ratio.high:.1f} tokens per parameter, median "
        f"{ratio.median:.1f}"
    )


def _iter_expert_lines(rows: list[ExpertRow]) -> Iterator[str]:
    for row in rows:
        far = f", {row.outside:,.3g}× beyond its runs" if row.outside > 1 else ""
        yield (
            f"{row.law:<24}{format_count(row.parameters)} with {row.experts} experts is "
            f"worth {format_count(row.dense_parameters)} dense{far}"
        )


def _iter_rate_lines(rows: list[RateRow]) -> Iterator[str]:
    yield f"  {'batch and rate':<24}{'parameters':>11}{'batch tokens':>14}{'rate':>11}  fitted on"
    for row in rows:
        size = "any" if row.at_parameters is None else format_count(row.at_parameters)
        rate = "none left" if row.learning_rate is None else f"{row.learning_rate:.2e}"
        batch = format_count(row.batch_tokens)
        yield (
            f"  {row.law:<24}{size:>11}{batch:>14}{rate:>11}  {_format_extrapolation(row.outside)}"
        )


# Budget used by default, as a multiple of the largest run.
TIMES_AHEAD = 10.0


def build_fit_output(fit: LawFit, budgets: Sequence[float], report: str) -> FitOutput:
    """Build the object that `llmsys scale fit --json` prints.

    Args:
        fit: fit that `fit_law` returned.
        budgets: FLOPs to give an optimum for; empty: those of the largest run, and ten times as
            many.
        report: file with the plots.

    Returns:
        The constants with their intervals, and an optimum per budget.
    """
    law = fit.law
    largest = fit.largest_flops
    return FitOutput(
        law=FittedConstants(
            E=law.irreducible,
            A=law.parameter_factor,
            B=law.token_factor,
            alpha=law.alpha,
            beta=law.beta,
        ),
        intervals=fit.intervals,
        runs=len(fit.residuals),
        largest_residual=max(map(abs, fit.residuals)),
        largest_flops=largest,
        optima=[fit.find_optimum(flops) for flops in budgets or (largest, TIMES_AHEAD * largest)],
        report=report,
    )


def format_fit(result: FitOutput) -> str:
    """Format a fitted law, its intervals and its recommendations.

    Args:
        result: what `build_fit_output` returned.

    Returns:
        Lines of text.
    """
    return "\n".join(_iter_fit_lines(result))


def _iter_fit_lines(result: FitOutput) -> Iterator[str]:
    yield f"L = E + A / N^alpha + B / D^beta through {result.runs} runs; intervals of 5 to 95 %"
    for name, value in result.law:
        low, high = result.intervals[name]
        yield f"  {name:<6}{value:>12.5g}   {low:.5g} to {high:.5g}"
    yield f"  largest residual {100 * result.largest_residual:.2f} %"
    for best in result.optima:
        far = best.times_beyond
        yield ""
        note = f"   EXTRAPOLATED {far:.3g}× beyond the largest run" if far > 1 else ""
        yield f"{best.flops:.3g} FLOPs{note}"
        for name, one in (("parameters", best.parameters), ("tokens", best.tokens)):
            span = f"{format_count(one.low)} to {format_count(one.high)}"
            yield f"  {name:<12}{format_count(one.best):>8}   {span}"
        loss = best.loss
        yield f"  {'loss':<12}{loss.best:>8.3f}   {loss.low:.3f} to {loss.high:.3f}"
    yield ""
    yield f"plots: {result.report}"

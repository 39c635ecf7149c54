"""The family of laws as a page of text."""

from collections.abc import Iterator
from typing import Any

from llmsys.estimate.text import format_count


def format_law_comparison(result: dict[str, Any]) -> str:
    """A table of laws, their spread, and what they say of batch and rate."""
    return "\n".join(_iter_comparison_lines(result))


def _iter_comparison_lines(result: dict[str, Any]) -> Iterator[str]:
    budget = result["budget"]
    yield f"budget   {budget['flops']:.3g} FLOPs"
    yield from (f"         {line}" for line in budget["assumptions"])
    if result["served_tokens"]:
        yield f"         pays for training and for serving {format_count(result['served_tokens'])} tokens"
    if result["unique_tokens"] is not None:
        yield f"         {format_count(result['unique_tokens'])} unique tokens"
    yield ""
    yield from _iter_law_lines(result)
    yield ""
    yield from _iter_spread_lines(result)
    yield from _iter_expert_lines(result["experts"])
    yield ""
    yield from _iter_rate_lines(result["rates"])
    yield ""
    yield "Losses belong to each law's own text and tokenizer and cannot be compared between laws."


def _iter_law_lines(result: dict[str, Any]) -> Iterator[str]:
    epochs = result["unique_tokens"] is not None
    yield (
        f"  {'law':<24}{'parameters':>11}{'tokens':>10}{'tokens/par.':>12}{'loss':>8}"
        + (f"{'epochs':>8}" if epochs else "")
        + "  fitted on"
    )
    for row in result["laws"]:
        loss = "–" if row["loss"] is None else f"{row['loss']:.3f}"
        read = f"{row['epochs']:>8.1f}" if epochs else ""
        notes = "; ".join([_format_extrapolation(row["outside"]), *row["remarks"], *filter(None, [row["evidence"]])])
        yield (
            f"{'>' if row['marked'] else ' '} {row['law']:<24}{format_count(row['parameters']):>11}{format_count(row['tokens']):>10}"
            f"{row['tokens_per_parameter']:>12.1f}{loss:>8}{read}  {notes}"
        )


def _format_extrapolation(outside: dict[str, Any] | None) -> str:
    if outside is None:
        return "runs of this size"
    return f"EXTRAPOLATED {outside['times']:,.3g}× beyond its runs in {outside['axis']}"


def _iter_spread_lines(result: dict[str, Any]) -> Iterator[str]:
    spread = result["spread"]
    for name, title in (("parameters", "parameters"), ("tokens", "tokens")):
        low, middle, high = (format_count(spread[name][key]) for key in ("low", "median", "high"))
        yield f"{title:<12}{low} to {high}, median {middle}"
    ratio = spread["tokens_per_parameter"]
    yield f"{'ratio':<12}{ratio['low']:.1f} to {ratio['high']:.1f} tokens per parameter, median {ratio['median']:.1f}"


def _iter_expert_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        far = f", {row['outside']:,.3g}× beyond its runs" if row["outside"] > 1 else ""
        yield (
            f"{row['law']:<24}{format_count(row['parameters'])} with {row['experts']} experts is worth "
            f"{format_count(row['dense_parameters'])} dense{far}"
        )


def _iter_rate_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"  {'batch and rate':<24}{'parameters':>11}{'batch tokens':>14}{'rate':>11}  fitted on"
    for row in rows:
        size = "any" if row["at_parameters"] is None else format_count(row["at_parameters"])
        rate = "none left" if row["learning_rate"] is None else f"{row['learning_rate']:.2e}"
        yield f"  {row['law']:<24}{size:>11}{format_count(row['batch_tokens']):>14}{rate:>11}  {_format_extrapolation(row['outside'])}"

"""Predicted against measured as a table for people."""

from typing import Any

from llmsys.estimate.instants import GIB


def format_run_comparison(run: dict[str, Any]) -> str:
    """One run, from `Reconciled.as_data`; residuals are measured over predicted, minus 1."""
    ranks = f"{run['ranks']} rank{'s' if run['ranks'] > 1 else ''}"
    head = f"{run['run']}: {run['device']} device" if run["device"] == "unknown" else f"{run['run']}: {run['device']}"
    rows = [_format_parameter_row(run["parameters"]), _format_memory_row(run["memory_bytes"]), _format_time_row(run["step_seconds"])]
    table = [f"  {name:<12}{predicted:<34}{measured:<14}{verdict}" for name, predicted, measured, verdict in rows]
    titles = f"  {'':<12}{'predicted':<34}{'measured':<14}residual"
    return "\n".join([f"{head}, {ranks}, {run['steps']} steps", titles, *table])


def _format_parameter_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    difference = found["built"] - found["predicted"]
    verdict = "equal" if not difference else f"{difference:+,}: this version counts another model than was built"
    return "parameters", f"{found['predicted']:,}", f"{found['built']:,}", verdict


def _format_memory_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    predicted = f"{format_memory_size(found['predicted'])} {found['instant']}"
    return "memory", predicted, format_memory_size(found["measured"]), f"{found['residual']:+.1%} ({found['kind']})"


def _format_time_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    measured = f"{found['measured']:.4g} s"
    if found["predicted"] is None:
        return "step", "nothing", measured, str(found["why"])
    interval = found["predicted"]
    within = "within" if found["within_p10_p90"] else "outside of"
    said = f"{interval['p50']:.4g} s ({interval['p10']:.4g} to {interval['p90']:.4g})"
    return "step", said, measured, f"{found['residual']:+.1%}, {within} P10 to P90"


def format_memory_size(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"

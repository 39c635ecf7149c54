"""Time, money and energy as lines for people: the interval, what the step is spent on, and every
assumption.

The estimate as a page of text for people: counts with their digits, each with a prefix that people
know.
"""

from collections.abc import Iterable, Iterator
from math import exp, sqrt

from llmsys.estimate.json_output import (
    BatchSize,
    EstimateOutput,
    RunEnergy,
    RunMoney,
    RunTime,
    StepPrice,
    TensorCount,
)
from llmsys.estimate.memory_residual import format_fit_probability
from llmsys.estimate.percentile_interval import PercentileInterval


def iter_cost_lines(result: EstimateOutput) -> Iterator[str]:
    """The lines below the estimate's own; none for an estimate without a device."""
    if (time := result.time) is None:
        return
    used = time.utilisation
    yield ""
    yield f"on {time.ranks} × {time.device}; P50 (P10 to P90)"
    yield _format_text_row("program", time.program, _describe_spread(time))
    yield _format_text_row("seconds per step", _format_interval(time.step_seconds), "")
    whole = time.step_seconds.p50
    for name, seconds in sorted(time.parts_seconds.items(), key=lambda one: -one[1]):
        if seconds >= 0.005 * whole:
            yield _format_text_row(f"  {name}", f"{seconds:.4g}", f"{seconds / whole:.0%}")
    yield _format_text_row(
        "tokens per second", f"{time.tokens_per_second_per_device:,.0f}", "on each device"
    )
    yield _format_text_row(
        "utilisation in a step",
        f"{used.model_causal:.1%}",
        "of the peak, causal-exact model operations",
    )
    yield _format_text_row("", f"{used.model_full:.1%}", "attention over all of s²")
    yield _format_text_row("", f"{used.hardware:.1%}", "with recomputation")
    if time.run is not None and result.money is not None:
        yield from _iter_run_cost_lines(time.run, result.money, result.energy)


def _describe_spread(time: StepPrice) -> str:
    """Return how far steps of this program are from the estimate: around the program, and how far
    programs are from each other.
    """
    within = sqrt(max(0.0, time.residual_spread**2 - time.program_spread**2))
    whole, own, between = (
        f"{exp(one) - 1:.0%}" for one in (time.residual_spread, within, time.program_spread)
    )
    return f"deviation {whole}: {own} within a program, {between} between programs"


# The median error of P50 on whole runs that nothing was fitted on is that of one utilisation for
# all of them (docs/measurements/estimate.md).
WHOLE_RUN_NOTE = "no surer than a constant utilisation: fit your own runs with llmsys reconcile"


def _iter_run_cost_lines(run: RunTime, money: RunMoney, energy: RunEnergy | None) -> Iterator[str]:
    minutes, failures = run.checkpoint_every_seconds / 60, run.failures_per_day
    yield _format_text_row(
        "goodput",
        f"{run.goodput:.1%}",
        f"{failures:.2g} failures a day, a checkpoint every {minutes:.3g} minutes",
    )
    yield _format_text_row(
        "utilisation of the run",
        f"{run.utilisation_model_causal:.1%}",
        "including time lost outside of steps",
    )
    yield _format_text_row("hours", _format_interval(run.hours), WHOLE_RUN_NOTE)
    yield _format_text_row(
        "  factor of runs",
        f"{run.residual_factor:.4g}",
        "published hours over those of steps, checkpoints and restarts",
    )
    yield _format_text_row("accelerator-hours", _format_interval(money.accelerator_hours), "")
    yield _format_text_row(
        money.currency,
        _format_interval(money.amount),
        _format_assumptions(money.assumptions),
    )
    if energy is not None:
        watts = f"{energy.watts_per_device:.0f} W each"
        yield _format_text_row(
            "kWh",
            _format_interval(energy.kwh),
            f"{watts}, {_format_assumptions(energy.assumptions)}",
        )


def _format_assumptions(values: dict[str, float]) -> str:
    return "assumed: " + ", ".join(f"{name} {value:g}" for name, value in values.items())


def _format_interval(value: PercentileInterval) -> str:
    return (
        f"{_format_number(value.p50)} ({_format_number(value.p10)} to {_format_number(value.p90)})"
    )


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _format_text_row(title: str, value: str, note: str) -> str:
    return f"{title:<22}{value:>34}  {note}".rstrip()


def format_estimate(result: EstimateOutput, more_lines: Iterable[str] = ()) -> str:
    """Format an estimate for people.

    Args:
        result: what `estimate_run` or `add_costs` returned, perhaps with `tensors`.
        more_lines: lines after those of the cost.

    Returns:
        Lines of text.
    """
    lines = [
        *_iter_parameter_lines(result),
        *_iter_export_lines(result),
        *_iter_flops_lines(result),
        *_iter_memory_lines(result),
        *_iter_run_lines(result),
    ]
    lines += [*iter_cost_lines(result), *more_lines]
    if result.tensors is not None:
        lines += ["", *iter_tensor_lines(result.tensors, result.parameters.total)]
    return "\n".join(lines)


def _iter_parameter_lines(result: EstimateOutput) -> Iterator[str]:
    counts = result.parameters
    active = counts.active
    yield _format_count_row("parameters", counts.total, format_count(counts.total))
    for name, count in counts.by_component.items():
        yield _format_count_row(f"  {name}", count, f"{count / counts.total:.1%}")
    if counts.frozen is not None:
        yield _format_count_row(
            "frozen", counts.frozen, "tables that transformers' class has and does not train"
        )
    yield _format_count_row(
        "non-embedding", counts.non_embedding, "without embeddings, positions and head"
    )
    yield _format_count_row("active per token", active.all, "parameters used per token")
    yield _format_count_row("", active.without_input_embedding, "without the input embedding")
    yield _format_count_row("", active.without_embeddings, "without embeddings, positions and head")
    for rule in counts.textbook:
        yield _format_count_row(
            "textbook",
            rule.value,
            f"{rule.rule} is {rule.error:+.1%} off the non-embedding count",
        )


def _iter_export_lines(result: EstimateOutput) -> Iterator[str]:
    if result.export is not None:
        yield result.export.line


def _iter_flops_lines(result: EstimateOutput) -> Iterator[str]:
    batch, flops = result.batch, result.flops
    yield ""
    size = f"{batch.sequences} sequences of {_format_lengths(batch)} tokens"
    yield _format_count_row(
        "FLOPs of a step",
        flops.forward_backward,
        f"forward and backward of {size}, {flops.convention}",
    )
    for name, one in flops.conventions.items():
        share = (
            f"{format_count(one.forward_backward_per_token)} per token, attention "
            f"{one.attention_share:.1%}"
        )
        yield _format_count_row(f"  {name}", one.forward_backward, share)
    shares = ", ".join(
        f"{int(s):,}: {share:.0%}" for s, share in flops.attention_share_by_length.items()
    )
    yield f"attention's share by length   {shares}"


def _format_lengths(batch: BatchSize) -> str:
    if batch.target_length is not None:
        return f"{batch.sequence_length} source and {batch.target_length} target"
    if batch.documents:
        return f"{batch.sequence_length} (documents of {', '.join(map(str, batch.documents))})"
    return str(batch.sequence_length)


def _iter_memory_lines(result: EstimateOutput) -> Iterator[str]:
    memory = result.memory
    if memory is None:
        return
    state, kept = memory.state_bytes, memory.activation_bytes_estimated
    layout = ", ".join(f"{axis} {size}" for axis, size in memory.layout.items())
    yield ""
    yield _format_count_row(
        "state per rank",
        state["total"],
        f"bytes, {memory.engine['kind']} on {memory.ranks} ranks: {layout}",
    )
    for name in ("weights", "masters", "gradients", "moments"):
        yield _format_count_row(f"  {name}", state[name], format_gib(state[name]))
    yield _format_count_row(
        "activations per rank",
        kept["total"],
        f"bytes, an estimate, in {result.precision.number}",
    )
    yield f"  {result.precision.number}: {result.precision.reason}"
    for name in ("blocks", "probabilities", "logits", "gathered"):
        yield _format_count_row(f"  {name}", kept[name], format_gib(kept[name]))
    yield _format_count_row(
        "peak per rank", memory.peak_bytes, f"bytes on a GPU, {memory.peak_instant}"
    )
    items = next(one.items for one in memory.instants if one.name == memory.peak_instant)
    for name, size in sorted(items.items(), key=lambda item: -item[1])[:6]:
        yield _format_count_row(f"  {name}", size, format_gib(size))
    needed, driver = memory.needed_bytes, format_gib(memory.driver_bytes)
    interval = f"{needed.p50 / 2**30:.1f} ({needed.p10 / 2**30:.1f} to {needed.p90 / 2**30:.1f})"
    yield _format_text_row("GiB with the driver", interval, f"P50 (P10 to P90); driver {driver}")
    if memory.capacity_bytes is not None and memory.fit_probability is not None:
        verdict = format_fit_probability(memory.fit_probability)
        yield _format_text_row("", verdict, f"on a device of {format_gib(memory.capacity_bytes)}")


def _iter_run_lines(result: EstimateOutput) -> Iterator[str]:
    run = result.run
    yield ""
    if run is not None:
        yield _format_count_row(
            "tokens of the run",
            run.tokens,
            f"{run.tokens_per_parameter:.1f} per active parameter",
        )
        yield _format_count_row("steps", run.steps, "")
        yield _format_count_row(
            "FLOPs of the run",
            run.flops,
            f"{format_count(run.flops)}, {result.flops.convention}",
        )
    if result.unknown:
        yield f"{', '.join(result.unknown)}: unknown ({next(iter(result.unknown.values()))})"


def iter_tensor_lines(ledger: list[TensorCount], total: int) -> Iterator[str]:
    """Yield a line for every tensor, and the total.

    Args:
        ledger: what `list_tensor_counts` returned.
        total: number of parameters.

    Yields:
        Lines of text.
    """
    width = max(len(one.name) for one in ledger)
    for one in ledger:
        shape = " × ".join(map(str, one.shape))
        times = f" × {one.copies} blocks" if one.copies > 1 else ""
        yield f"{one.name:<{width}}  {one.count:>18,}  {shape}{times}"
    yield f"{'total':<{width}}  {total:>18,}"


def _format_count_row(title: str, count: int, note: str) -> str:
    return f"{title:<22}{count:>26,}  {note}".rstrip()


def format_count(count: float) -> str:
    """Format a count with a decimal prefix.

    Args:
        count: any number.

    Returns:
        Text such as `10M`, `1.2T` or `3.1e+18`.
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= count < 1000 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def format_gib(count: int) -> str:
    """Format bytes in binary units.

    Args:
        count: bytes.

    Returns:
        Text such as `512.0 MiB` or `1.50 GiB`.
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

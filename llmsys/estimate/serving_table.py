"""The estimates of serving and of fine-tuning as lines for people."""

from collections.abc import Iterator

from llmsys.estimate.serving_output import FinetuneOutput, ServingOutput, TimedServingOutput
from llmsys.estimate.summary_table import format_count, format_gib


def format_serving(result: ServingOutput) -> str:
    """Format the estimate of a served model.

    Args:
        result: what `estimate_serving` returned.

    Returns:
        Lines of text.
    """
    return "\n".join(_iter_serving_lines(result))


def _iter_serving_lines(result: ServingOutput) -> Iterator[str]:
    load, memory = result.load, result.memory_bytes
    where = (
        f"{result.gpus} × {result.device}"
        if isinstance(result, TimedServingOutput)
        else f"{result.gpus} devices"
    )
    yield (
        f"serving {load.batch} requests of {load.prompt:,} + {load.output:,} tokens on "
        f"{where}, weights in {load.weights}, cache in {load.cache}"
    )
    for name in ("weights", "cache", "workspace", "total"):
        yield _format_row(f"memory: {name}", format_gib(round(memory[name])), "on each device")
    yield _format_row(
        "cache of a request", format_gib(round(result.cache_bytes_per_request)), "on each device"
    )
    if not isinstance(result, TimedServingOutput):
        yield "time and cost: unknown (need a device: --device NAME)"
        return
    room = format_gib(round(result.device_memory_bytes))
    yield _format_row("fits", "yes" if result.fits else "NO", f"in 95 % of {room}")
    yield _format_row("largest batch", f"{result.largest_batch:,}", "requests of this length")
    yield _format_row(
        "first token", _format_seconds(result.first_token_seconds), "one prompt, alone"
    )
    yield _format_row(
        "",
        _format_seconds(result.all_first_tokens_seconds),
        f"the last of {load.batch} at once",
    )
    rates = result.tokens_per_second
    yield _format_row(
        "next token", _format_seconds(result.step_seconds), "each, halfway through the answer"
    )
    yield _format_row("tokens per second", f"{rates.one_request:,.1f}", "of one request")
    yield _format_row("", f"{rates.decoding:,.0f}", "of all requests, while decoding")
    yield _format_row("", f"{rates.with_prompts:,.0f}", "of all requests, prompts included")
    yield _format_row(
        "utilisation", f"{result.utilisation:.1%}", "of the bf16 peak, prompts included"
    )
    money = result.money
    for title, price in (
        ("million prompt tokens", money.per_million_prompt_tokens),
        ("million output tokens", money.per_million_output_tokens),
        ("million tokens", money.per_million_tokens),
    ):
        yield _format_row(
            title,
            f"{price:.4g} {money.currency}",
            f"at {money.price_per_hour:g} per accelerator-hour",
        )


def iter_finetune_lines(found: FinetuneOutput) -> Iterator[str]:
    """Yield the lines of a fine-tuning estimate.

    Args:
        found: what `estimate_finetuning` returned.

    Returns:
        Lines of text.
    """
    yield ""
    settings = ", ".join(f"{name} {value}" for name, value in found.settings)
    yield f"fine-tuning: {settings}"
    share = (
        f"{found.trained_share:.2%} of all, {format_count(found.adapter_parameters)} in adapters"
    )
    yield _format_row("trained parameters", f"{found.trained_parameters:,}", share)
    flops = found.flops
    yield _format_row(
        "FLOPs of a step", f"{flops.total:,}", f"{flops.share_of_full:.1%} of full training"
    )
    if (memory := found.memory) is not None:
        for name, size in memory.state_bytes.items():
            yield _format_row(f"  {name}", f"{round(size):,}", format_gib(round(size)))
        yield _format_row(
            "peak per rank", f"{memory.peak_bytes:,}", f"bytes, {memory.peak_instant}"
        )
    if (step := found.step_seconds) is not None:
        interval = f"{step.p50:.3g} ({step.p10:.3g} to {step.p90:.3g})"
        yield _format_row(
            "seconds per step", interval, f"{found.speedup:.2f} times as fast as full training"
        )


def _format_row(title: str, value: str, note: str) -> str:
    return f"{title:<24}{value:>22}  {note}".rstrip()


def _format_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"

"""Format the state of a run for a terminal: progress, losses as a line of blocks, speed,
checkpoints.

Reads a `RunRecord`.
"""

import shutil
import textwrap
from collections.abc import Sequence

from llmsys.progress import format_duration
from llmsys.report.html_markup import format_amount, format_bytes, format_number
from llmsys.report.plots import downsample_points
from llmsys.report.run_record import RunRecord, is_finite
from llmsys.report.run_sections import describe_run_state

BLOCKS = "▁▂▃▄▅▆▇█"
MIN_COLUMNS = 40


def format_run_view(record: RunRecord, columns: int | None = None) -> str:
    """Return a few lines about a run.

    Args:
        record: The run, finished or not.
        columns: Width in characters; None: that of the terminal.

    Returns:
        The lines.
    """
    width = max(MIN_COLUMNS, columns or shutil.get_terminal_size().columns) - 14
    state, remark = describe_run_state(record)
    lines = [("run", f"{record.name}: {state}{f' ({remark})' if remark else ''}")]
    steps, curves = record.curves.step, record.curves.columns
    if steps:
        lines += _list_step_lines(record, width)
        losses = downsample_points(steps, curves["loss"], max(2, width // 2 * 2))[1]
        lines.append(("loss", draw_blocks(losses)))
        lines.append(
            ("", f"{losses[0]:.3f} at first, {losses[-1]:.3f} now" if losses else "no finite value")
        )
    if (event := record.last_evaluation) is not None:
        names = (("loss", "loss"), ("bits_per_byte", "bits per byte"), ("accuracy", "accuracy"))
        parts = [
            f"{title} {event[name]:.4f}" for name, title in names if is_finite(event.get(name))
        ]
        lines.append(("held out", f"step {event['step']:,}: {', '.join(parts)}"))
    if record.checkpoints:
        lines.append(
            ("checkpoint", f"step {max(record.checkpoints):,}, {len(record.checkpoints)} written")
        )
    lines += [("note", note) for note in record.notes[:3] if not steps]
    return "\n".join(
        f"{name if first else '':<12}{part}"
        for name, text in lines
        for first, part in _wrap_text(text, width)
    )


def _wrap_text(text: str, width: int) -> list[tuple[bool, str]]:
    """Return (is first, line) of a text: a line that the terminal broke would spoil a live view."""
    parts = textwrap.wrap(text, width, break_long_words=False) or [""]
    return [(number == 0, part) for number, part in enumerate(parts)]


def _list_step_lines(record: RunRecord, width: int) -> list[tuple[str, str]]:
    step, total = record.curves.step[-1], record.get_start_value("steps")
    lines = []
    if is_finite(total) and total > 0:
        share = min(1.0, step / total)
        bar = ("█" * round(share * (width - 24))).ljust(max(0, width - 24), "░")
        lines.append(("step", f"{bar} {step:,.0f} of {total:,.0f} ({share:.0%})"))
    else:
        lines.append(("step", f"{step:,.0f}"))
    tokens, speed = (
        record.curves.get_last_value("tokens"),
        record.curves.get_last_value("tokens_per_second"),
    )
    memory, rate = (
        record.curves.get_last_value("memory_bytes"),
        record.curves.get_last_value("learning_rate"),
    )
    parts = [f"{format_amount(tokens)} tokens"] if tokens == tokens else []
    parts += [f"{format_amount(speed)} a second"] if speed == speed else []
    size = record.get_start_value("tokens_per_step")
    if is_finite(total) and is_finite(size) and speed > 0 and step < total:
        parts.append(f"{format_duration((total - step) * size / speed)} left")
    parts += [f"{format_bytes(memory)} of memory"] if memory == memory else []
    lines.append(("speed", ", ".join(parts) or "not logged yet"))
    if rate == rate:
        lines.append(("rate", format_number(rate)))
    return lines


def draw_blocks(values: Sequence[float]) -> str:
    """Return values as a line of blocks of eight heights, from the lowest value to the highest.

    Args:
        values: Finite numbers.

    Returns:
        One character per value.
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)

"""Compare the memory of `llmsys estimate` with published peaks, and with a paper's analytical
numbers.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from llmsys.estimate.memory_timeline import GIB
from tools.bench.fits.korthikanti import iter_analytical_rows
from tools.bench.fits.published_row import PublishedRow, run_estimate

# Rows by which a constant or a setting of a program was chosen: allocator slack (T1 eager and T3),
# that of pipelines (T5), the float32 gradient of a compiled loss (H200), and the settings of traced
# graphs.
CALIBRATED = (
    "T1 llama3.1-8b eager",
    "T3 llama3.1-8b compile,",
    "T5 llama3.1-405b",
    "H200-trainy",
    "torchtitan_graph",
)


def is_calibration(row: PublishedRow) -> bool:
    """Return whether a constant or a setting was chosen by a row."""
    return row.name.startswith(CALIBRATED)


def compute_error(row: PublishedRow) -> float:
    """Return the signed relative error; below zero, a run would meet an out-of-memory error that
    was not predicted.
    """
    predicted: int = run_estimate(row.words)["memory"]["peak_bytes"]
    return predicted / GIB / row.measured - 1


def iter_memory_lines(rows: Sequence[PublishedRow], *, is_foreign: bool) -> Iterator[str]:
    """Yield the tables of the README: measured peaks, and a paper's analytical numbers.

    Args:
        rows: measured peaks with their commands.
        is_foreign: no constant was chosen by these rows.

    Yields:
        Lines of Markdown.
    """
    yield "### Memory"
    yield ""
    yield "| row | measured, GiB | predicted | error | fullest | |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        memory = run_estimate(row.words)["memory"]
        mark = "calibration" if is_calibration(row) and not is_foreign else ""
        numbers = (
            f"{row.measured:.1f} | {memory['peak_bytes'] / GIB:.1f} | {compute_error(row):+.1%}"
        )
        yield f"| {row.name} | {numbers} | {memory['peak_instant']} | {mark} |"
    yield ""
    held = [one for one in rows if is_foreign or not is_calibration(one)]
    for name, group in (("All rows", rows), ("Rows not used for calibration", held)):
        errors = [compute_error(one) for one in group]
        if errors:
            middle = median(abs(error) for error in errors)
            yield (
                f"{name}: {len(errors)}, median error {middle:.1%}, from {min(errors):+.1%} to "
                f"{max(errors):+.1%}."
            )
    errors = [ours / paper - 1 for _, paper, ours in iter_analytical_rows()]
    yield (
        "Korthikanti 2022, figures 1 and 7 (state and activations of 22B to 1T by its formulas): "
        f"{len(errors)} numbers, from {min(errors):+.1%} to {max(errors):+.1%}."
    )
    yield ""

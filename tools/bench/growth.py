"""Measure quantities at fractions of full size, fit their growth and extrapolate (scale.py,
scale_prepare.py).

The exponent is the slope of log value over log size; 0 for values that stay below the resolution of
the measurement. The value at full size follows from the largest measured one and the exponent.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

FRACTIONS = (1e-3, 1e-2, 1e-1)
MAX_TIME_EXPONENT, MAX_MEMORY_EXPONENT = 1.05, 0.1


class Quantity(NamedTuple):
    """One row of the table.

    Attributes:
        name: what is measured.
        unit: its unit.
        full: full size, in items.
        items: what the size counts.
        limit: largest allowed value at full size.
        max_exponent: largest allowed growth.
        resolution: values below are not told apart.
        measure: returns the value at a size, or those of several quantities by name.
        fractions: fractions of full size, rising.
    """

    name: str
    unit: str
    full: int
    items: str
    limit: float
    max_exponent: float
    resolution: float
    measure: Callable[[int], float | dict[str, float]]
    fractions: Sequence[float] = FRACTIONS


Measured = dict[tuple[Callable[[int], Any], int], float | dict[str, float]]


def measure_growth(
    quantity: Quantity, script: str, fractions: Sequence[float] | None, measured: Measured
) -> dict[str, Any]:
    """Measure a quantity at every size, each in a separate process.

    Args:
        quantity: the quantity.
        script: path of the program that calls `run_program` with it.
        fractions: fractions of full size, rising; None: the quantity's own.
        measured: results so far: one process may measure several quantities.

    Returns:
        The fields of the quantity, sizes, values, exponent, value at full size, and whether both
        limits are met.
    """
    sizes = [
        max(1, round(quantity.full * fraction)) for fraction in fractions or quantity.fractions
    ]
    values = []
    for size in sizes:
        if (quantity.measure, size) not in measured:
            command = [sys.executable, script, "--measure", quantity.name, "--size", str(size)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured[quantity.measure, size] = json.loads(printed.splitlines()[-1])
        found = measured[quantity.measure, size]
        values.append(found[quantity.name] if isinstance(found, dict) else found)
    exponent = fit_exponent(sizes, values, quantity.resolution)
    at_full = values[-1] * (quantity.full / sizes[-1]) ** max(exponent, 0.0)
    is_met = (
        math.isfinite(at_full) and at_full <= quantity.limit and exponent <= quantity.max_exponent
    )
    fields = {
        key: value
        for key, value in quantity._asdict().items()
        if key not in ("measure", "fractions")
    }
    return fields | {
        "sizes": sizes, "values": values, "exponent": exponent, "value_at_full": at_full,
        "is_met": is_met,
    }  # fmt: skip


def fit_exponent(sizes: list[int], values: list[float], resolution: float) -> float:
    """Return the slope of log value over log size; values are raised to the resolution first."""
    logs = np.log(np.maximum(values, resolution))
    return round(float(np.polyfit(np.log(sizes), logs, 1)[0]), 3)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| quantity | unit | measured, by size | exponent | full size | at full size | limit | "
        "met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        values = ", ".join(
            f"{size:,}: {value:.3g}"
            for size, value in zip(row["sizes"], row["values"], strict=True)
        )
        full = f"{row['full']:,} {row['items']} | {row['value_at_full']:.3g} | {row['limit']:g}"
        met = "yes" if row["is_met"] else "NO"
        lines.append(
            f"| {row['name']} | {row['unit']} | {values} | {row['exponent']:.2f} | {full} | {met} |"
        )
    return "\n".join(lines)


def run_program(quantities: Sequence[Quantity], script: str, description: str | None) -> int:
    """Parse the command line of a program, measure and print its quantities.

    Args:
        quantities: all that the program knows.
        script: path of the program.
        description: text of `--help`.

    Returns:
        The exit status: 1 if a limit is not met.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {quantity.name: quantity for quantity in quantities}
    parser.add_argument(
        "--only",
        nargs="+",
        choices=by_name,
        default=list(by_name),
        help="quantities (default: all)",
    )
    parser.add_argument(
        "--fractions",
        nargs="+",
        type=float,
        help="fractions of full size (default: each one's own)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--measure", choices=by_name, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(by_name[arguments.measure].measure(arguments.size)))
        return 0
    measured: Measured = {}
    rows = [
        measure_growth(by_name[name], script, arguments.fractions, measured)
        for name in arguments.only
    ]
    print(json.dumps(rows) if arguments.json else format_table(rows))
    return 0 if all(row["is_met"] for row in rows) else 1

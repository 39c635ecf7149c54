"""Compare the estimate with published and checked numbers: parameters, FLOPs, memory, time, energy.

python tools/bench/estimates.py                      print the tables
python tools/bench/estimates.py --truth FILE         the same for other rows of the same form
python tools/bench/estimates.py --write              calibrate, and write residual.yaml and llmsys/estimate/README.md
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.config.yaml_files import dump_yaml
from llmsys.estimate.residual_model import FILE, ResidualModel, load_residuals
from tools.bench.estimates_count import list_count_lines
from tools.bench.estimates_energy import build_energy_rows, fit_energy
from tools.bench.estimates_memory import iter_memory_lines
from tools.bench.estimates_time import (
    TimeRow,
    build_time_rows,
    compute_utilisation,
    fit_residuals,
    get_shipped_residuals,
    predict_interval,
)
from tools.bench.published import RUNS, SkippedRow, read_setups
from tools.bench.published_setup import Setup

README = Path(__file__).resolve().parents[2] / "llmsys" / "estimate" / "README.md"
BEGIN, END = "<!-- published errors: begin -->", "<!-- published errors: end -->"


def main() -> int:
    """Print the tables; with --write, calibrate and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=RUNS, help="rows of published runs (default: the tests' copy)")
    parser.add_argument("--write", action="store_true", help="calibrate on every second row, and write both files")
    arguments = parser.parse_args()
    everything = list(read_setups(arguments.truth))
    rows = build_time_rows(one for one in everything if isinstance(one, Setup))
    constants = build_time_rows(one for one in read_setups(RUNS) if isinstance(one, Setup))
    if arguments.write:
        write_residuals(fit_residuals([row for row in constants if row.calibrates]))
        load_residuals.cache_clear()
    foreign = arguments.truth.resolve() != RUNS.resolve()
    skipped = [one for one in everything if isinstance(one, SkippedRow)]
    lines = [
        *list_count_lines(),
        *iter_memory_lines(arguments.truth),
        *iter_time_lines(rows, constants, skipped, foreign),
        *iter_energy_lines(arguments.truth, foreign),
    ]
    if arguments.write:
        write_readme(lines)
    print("\n".join(lines))
    return 0


def write_residuals(fitted: dict[str, ResidualModel]) -> None:
    """Write the calibrated constants, with the names of their rows."""
    energies = build_energy_rows(json.loads(RUNS.read_text(encoding="utf-8"))["energy_measured"], fitted["run"])
    values = {kind: one.model_dump(mode="json") for kind, one in fitted.items()}
    values["energy"] = fit_energy(energies, fitted["run"]).model_dump(mode="json")
    head = "# Written by tools/bench/estimates.py --write: measured over modelled, of every second row of each table.\n"
    FILE.write_text(head + dump_yaml(values), encoding="utf-8")


def iter_time_lines(
    rows: Sequence[TimeRow], constants: Sequence[TimeRow], skipped: Sequence[SkippedRow], foreign: bool
) -> Iterator[str]:
    """Yield a summary by table, and every row with its signed error, calibration rows marked."""
    calibration = [row for row in constants if row.calibrates]
    fitted = get_shipped_residuals()
    constant = {run: compute_utilisation(calibration, run=run) for run in (False, True)}
    held = list(rows) if foreign else [row for row in rows if not row.calibrates]
    yield "### Time"
    yield ""
    yield (
        "Rows marked (calibration) gave the three factors and spreads; the summary is of the others. The baseline is a "
        f"constant utilisation, 6 · N · D operations at {constant[False]:.1%} of the peak in steps and "
        f"{constant[True]:.1%} over runs, the medians of the same calibration rows."
    )
    yield ""
    yield from _iter_summary_lines(held, fitted, constant)
    yield ""
    yield "| row | measured | P10 | P50 | P90 | error | covered | constant utilisation |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield _format_time_row(row, fitted, constant, foreign)
    for one in skipped:
        yield f"| {one.table} {one.row} | not priced: {one.reason} | | | | | | |"
    yield ""


def _iter_summary_lines(
    held: Sequence[TimeRow], fitted: dict[str, ResidualModel], constant: dict[bool, float]
) -> Iterator[str]:
    yield "| rows not used for calibration | rows | P10–P90 covers | median error of P50 | of a constant utilisation |"
    yield "|---|---|---|---|---|"
    groups = {"all": held} | {kind: [row for row in held if row.kind == kind] for kind in fitted}
    for name, group in groups.items():
        if not group:
            continue
        inside = sum(predict_interval(row, fitted).contains(row.setup.measured) for row in group)
        ours = median(abs(_compute_error(row, predict_interval(row, fitted).p50)) for row in group)
        base = median(abs(_compute_error(row, row.ideal_time / constant[row.kind == "run"])) for row in group)
        yield f"| {name} | {len(group)} | {inside / len(group):.0%} | {ours:.1%} | {base:.1%} |"


def _format_time_row(row: TimeRow, fitted: dict[str, ResidualModel], constant: dict[bool, float], foreign: bool) -> str:
    one, measured = predict_interval(row, fitted), row.setup.measured
    base = _compute_error(row, row.ideal_time / constant[row.kind == "run"])
    mark = "" if foreign or not row.calibrates else " (calibration)"
    unit = "h" if row.kind == "run" else "s"
    error, covered = _compute_error(row, one.p50), "yes" if one.contains(measured) else "no"
    numbers = " | ".join(f"{value:,.4g}" for value in (measured, one.p10, one.p50, one.p90))
    return f"| {row.setup.name}, {unit}{mark} | {numbers} | {error:+.1%} | {covered} | {base:+.1%} |"


def _compute_error(row: TimeRow, predicted: float) -> float:
    return predicted / row.setup.measured - 1


def iter_energy_lines(path: Path, foreign: bool) -> Iterator[str]:
    """Yield the table of measured energies."""
    yield "### Energy"
    yield ""
    yield "| run | measured, MWh | P10 | P50 | P90 | error | covered | |"
    yield "|---|---|---|---|---|---|---|---|"
    known = load_residuals()
    for row in build_energy_rows(json.loads(path.read_text(encoding="utf-8")).get("energy_measured", []), known.run):
        one = row.predict_interval(known.energy)
        numbers = " | ".join(f"{value:,.4g}" for value in (row.measured, one.p10, one.p50, one.p90))
        mark = " (calibration)" if row.calibrates and not foreign else ""
        covered = "yes" if one.contains(row.measured) else "no"
        yield f"| {row.name}{mark} | {numbers} | {one.p50 / row.measured - 1:+.1%} | {covered} | {row.note} |"
    yield ""


def write_readme(lines: Sequence[str]) -> None:
    """Write the tables between the two marks of the README."""
    text = README.read_text(encoding="utf-8") if README.is_file() else f"# Estimate\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

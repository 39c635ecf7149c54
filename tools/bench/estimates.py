"""Compare the estimate with published and checked numbers: parameters, FLOPs, memory, time, energy.

python tools/bench/estimates.py                      print the tables
python tools/bench/estimates.py --truth FILE         the same for other rows of the same form
python tools/bench/estimates.py --commands           print the command line of every row
python tools/bench/estimates.py --write              fit, and write what ships and its pages
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.errors import LlmsysError
from llmsys.estimate.program_profile import FOLDER, load_packaged_profiles_again
from llmsys.estimate.residual_model import FILE, load_residuals
from tools.bench.fits.counts import list_count_lines
from tools.bench.fits.energy import build_energy_rows, fit_energy
from tools.bench.fits.memory import iter_memory_lines
from tools.bench.fits.published_row import (
    PublishedRow,
    estimate_printed_step,
    read_json,
    run_estimate,
)
from tools.bench.fits.read_rows import RUNS, UNSEEN, SkippedRow, read_rows
from tools.bench.fits.report_rows import (
    DRAWS,
    Half,
    ReportDraw,
    list_report_rows,
    load_report_split,
    load_reports,
)
from tools.bench.fits.time_fit import (
    HeldOutRow,
    build_program_fits,
    build_residuals,
    list_held_out_rows,
    list_printed_rows,
    select_peers,
)
from tools.bench.fits.time_rows import KINDS, TimeClass, TimeRow, build_time_rows, get_model

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = ROOT / "docs" / "measurements" / "estimate.md"
PAGE = ROOT / "llmsys" / "estimate" / "published_errors.md"
SUMMARY_HEAD = (
    "| rows | number | P10–P90 covers | median P90 / P10 | median error of P50 | of a constant "
    "utilisation | less than half of it |\n|---|---|---|---|---|---|---|"
)
BEGIN, END = "<!-- published errors: begin -->", "<!-- published errors: end -->"


def main() -> int:
    """Print the tables; with --write, fit the constants and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--truth", type=Path, default=RUNS, help="rows of published runs (default: the tests' copy)"
    )
    parser.add_argument(
        "--write", action="store_true", help="fit on all rows, and write constants and both pages"
    )
    parser.add_argument(
        "--commands",
        action="store_true",
        help="print the command line of every row, and nothing else",
    )
    arguments = parser.parse_args()
    if arguments.commands:
        found = [one for one in read_rows(arguments.truth) if isinstance(one, PublishedRow)]
        print(
            "\n".join(
                f"# {one.name}: {one.measured:.4g} {one.kind}\n{one.command}" for one in found
            )
        )
        return 0
    is_foreign = arguments.truth.resolve() != RUNS.resolve()
    rows, skipped = select_priced_rows(arguments.truth)
    times = build_time_rows(rows)
    tuned = [] if is_foreign else build_time_rows(list_report_rows("tuning"))
    if arguments.write:
        if is_foreign:
            raise SystemExit(
                "--write fits the constants on the tests' copy of the rows. Remove --truth."
            )
        write_constants([*times, *tuned])
        for _ in range(2):  # the factor of runs changes how often they save
            write_residuals([*build_time_rows(rows), *tuned])
        times = build_time_rows(rows)
    known = build_time_rows(select_priced_rows(RUNS)[0]) if is_foreign else times
    lines = [
        *list_count_lines(),
        *iter_memory_lines([one for one in rows if one.kind == "memory"], is_foreign=is_foreign),
        *iter_time_lines(times, known, skipped, is_foreign=is_foreign, tuned=tuned),
        *iter_energy_lines(arguments.truth, is_foreign),
    ]
    if not is_foreign:
        unseen = [(path, *select_priced_rows(path)) for path in UNSEEN]
        summary = list_summary_lines(
            times, tuned, [row for _, priced, _ in unseen for row in build_time_rows(priced)]
        )
        lines += iter_report_lines(times, tuned)
        for path, priced, missing in unseen:
            lines += ["### Rows that nothing was fitted on", "", *iter_unseen_notes(path)]
            if peaks := [one for one in priced if one.kind == "memory"]:
                lines += iter_memory_lines(peaks, is_foreign=True)
            lines += iter_time_lines(build_time_rows(priced), times, missing, is_foreign=True)
        if arguments.write:
            write_section(SUMMARY, summary)
            write_section(PAGE, lines)
        lines += ["### Summary", "", *summary]
    print("\n".join(lines))
    return 0


def select_priced_rows(path: Path) -> tuple[list[PublishedRow], list[SkippedRow]]:
    """Return the rows whose commands succeed, and the others with the reason."""
    priced: list[PublishedRow] = []
    skipped: list[SkippedRow] = []
    for one in read_rows(path):
        if isinstance(one, SkippedRow):
            skipped.append(one)
            continue
        try:
            (estimate_printed_step if one.kind == "step" else run_estimate)(one.words)
        except LlmsysError as error:
            skipped.append(SkippedRow(one.source, one.name, str(error).splitlines()[0][:160]))
        else:
            priced.append(one)
    return priced, skipped


def write_constants(rows: Sequence[TimeRow]) -> None:
    """Write residual.yaml and the `fit` section of every program, with the names of their rows."""
    fits = build_program_fits(rows)
    for name, fit in fits.items():
        path = FOLDER / f"{name}.yaml"
        own = (
            path.read_text(encoding="utf-8")
            .partition("# Written by tools/bench/estimates.py")[0]
            .rstrip()
        )
        values = {kind: one.model_dump(mode="json") for kind, one in fit.items()}
        head = "# Written by tools/bench/estimates.py --write."
        path.write_text(f"{own}\n{head}\n{dump_yaml({'fit': values})}", encoding="utf-8")
    # Prices depend on what was written; hours of runs on the factors of steps.
    load_packaged_profiles_again()
    clear_prices()
    write_residuals([TimeRow(row.published) for row in rows])


def clear_prices() -> None:
    """Price rows again at their next use."""
    run_estimate.cache_clear()
    estimate_printed_step.cache_clear()


def write_residuals(rows: Sequence[TimeRow]) -> None:
    """Write factor, spread and variance between programs of every class, and forget the prices."""
    fitted = build_residuals(rows)
    energies = build_energy_rows(read_json(RUNS)["energy_measured"], fitted["run"])
    values: dict[str, Any] = {kind: one.model_dump(mode="json") for kind, one in fitted.items()}
    values["energy"] = fit_energy(energies, fitted["run"]).model_dump(mode="json")
    head = "# Written by tools/bench/estimates.py --write: measured over modelled.\n"
    FILE.write_text(head + dump_yaml(values), encoding="utf-8")
    load_residuals.cache_clear()
    clear_prices()


def iter_unseen_notes(path: Path) -> Iterator[str]:
    """Yield what is known of the unseen rows of a file."""
    for table in read_json(path).values():
        yield f"{table['source']}. {table['note']}".rstrip()
        yield ""


def list_summary_lines(
    rows: Sequence[TimeRow], tuned: Sequence[TimeRow], unseen: Sequence[TimeRow]
) -> list[str]:
    """Return a line for each class: reports left out of the fit, rows that nothing was fitted on
    of reports that the fit knows, and reports of which nothing was used.
    """
    found = [SUMMARY_HEAD]
    steps = [*rows, *tuned]
    for kind in KINDS:
        own = [row for row in steps if row.kind == kind]
        held = list_held_out_rows(own, select_peers(kind, steps))
        known = [one for one in held if one.row in rows]
        found.append(format_summary_line(f"{kind}, report left out", known))
        if kind != "run":
            new = [one for one in held if one.row in tuned]
            found.append(format_summary_line(f"{kind}, report of the tuning half left out", new))
    mixtures = [row for row in steps if row.kind == "moe"]
    held = list_held_out_rows(mixtures, select_peers("moe", steps), get_model)
    found.append(format_summary_line("moe, model left out", held))
    never = list_printed_rows(unseen, rows)
    for kind in KINDS:
        group = [one for one in never if one.row.kind == kind]
        found.append(format_summary_line(f"{kind}, other rows of known reports", group))
    for kind in KINDS[:2]:
        everything: list[HeldOutRow] = []
        for draw in DRAWS:
            group = list_never_used_rows("held_out", draw, kind, rows)
            everything += [*group, *list_never_used_rows("shown", draw, kind, rows)]
            found.append(format_summary_line(f"{kind}, held half of {draw.title}", group))
        name = f"{kind}, all reports that nothing was fitted on"
        found.append(format_summary_line(name, everything))
    return found


def list_never_used_rows(
    half: Half, draw: ReportDraw, kind: TimeClass, rows: Sequence[TimeRow]
) -> list[HeldOutRow]:
    """Return the rows of a class and half, with the intervals that the commands print."""
    times = build_time_rows(list_report_rows(half, [draw]))
    return list_printed_rows([one for one in times if one.kind == kind], rows)


def iter_report_lines(rows: Sequence[TimeRow], tuned: Sequence[TimeRow]) -> Iterator[str]:
    """Yield the rows of the halves of the new reports that nothing was fitted or chosen by."""
    yield "### Reports that nothing was fitted on"
    yield ""
    for draw in DRAWS:
        reports, split = load_reports(draw.reports), load_report_split(draw.split)
        drawn = len(split.tuning) + len(split.held_out)
        yield (
            f"{drawn} reports were drawn into two halves on {draw.title} 2026 (seed {split.seed}) "
            "before any of their rows was priced. Constants are fitted on the tuning half: "
            f"{', '.join(split.tuning)}. These are the rows of the other half:"
        )
        yield ""
        for name in (*split.held_out, *split.shown):
            one = reports[name]
            yield f"- {name}: {one.title}, {one.url}. {one.note}".rstrip()
        yield ""
        held = [*list_report_rows("held_out", [draw]), *list_report_rows("shown", [draw])]
        yield from iter_time_lines(build_time_rows(held), rows, (), is_foreign=True)
    yield "### Reports of the tuning halves"
    yield ""
    for draw in DRAWS:
        reports = load_reports(draw.reports)
        for name in load_report_split(draw.split).tuning:
            one = reports[name]
            yield f"- {name}: {one.title}, {one.url}. {one.note}".rstrip()
    yield ""
    yield (
        "Factors, the spread and the variance between programs are fitted on these rows too. The "
        "table has the interval of a fit without the report of the row."
    )
    yield ""
    for draw in DRAWS:
        for name, report in load_reports(draw.reports).items():
            for row in report.rows:
                if row.left_out:
                    yield f"- {name} {row.name} is not fitted on: {row.left_out}."
    yield ""
    steps = [*rows, *tuned]
    yield from iter_held_out_table(
        [
            one
            for kind in KINDS[:2]
            for one in list_held_out_rows(
                [row for row in steps if row.kind == kind], select_peers(kind, steps)
            )
            if one.row in tuned
        ]
    )
    yield ""


def iter_time_lines(
    rows: Sequence[TimeRow],
    known: Sequence[TimeRow],
    skipped: Sequence[SkippedRow],
    *,
    is_foreign: bool,
    tuned: Sequence[TimeRow] = (),
) -> Iterator[str]:
    """Yield a summary by class, and every row with its signed error.

    Rows of `tuned` are in the fit, and not in the table.
    """
    if is_foreign:
        held = list_printed_rows(rows, known)
        how = (
            "P10 to P90 are those that the commands print; no row of this file was used for a fit."
        )
    else:
        fitted = [*rows, *tuned]
        groups = [[row for row in fitted if row.kind == kind] for kind in KINDS]
        held = [
            one
            for group in groups
            for one in list_held_out_rows(group, select_peers(group[0].kind, fitted))
            if one.row in rows
        ]
        how = (
            "Every number of this table is of a fit without any row of the same report (leave one "
            "report out): factors, spread and baseline. The baseline is a constant utilisation: 6 "
            "· N · D operations at the median share of the peak of all other steps, or of all "
            "other runs."
        )
    yield "### Time"
    yield ""
    commands = "`python tools/bench/estimates.py --commands` prints them"
    yield f"Each row is one command; {commands}. {how}"
    yield ""
    yield SUMMARY_HEAD
    for name, group in iter_summary_groups(held):
        yield format_summary_line(name, group)
    yield ""
    yield from iter_held_out_table(held)
    for missing in skipped:
        yield f"| {missing.table} {missing.row} | not priced: {missing.reason} | | | | | | | |"
    yield ""


def iter_held_out_table(held: Sequence[HeldOutRow]) -> Iterator[str]:
    """Yield the head of a table and a line for each row."""
    yield "| row | program | measured | P10 | P50 | P90 | error | covered | constant utilisation |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in held:
        yield format_time_row(one)


def iter_summary_groups(held: Sequence[HeldOutRow]) -> Iterator[tuple[str, list[HeldOutRow]]]:
    """Yield the rows of each class, the steps of long sequences, and the steps of each program."""
    for kind in KINDS:
        yield kind, [one for one in held if one.row.kind == kind]
    steps = [one for one in held if one.row.kind != "run"]
    yield "steps of 8,192 positions or more", [one for one in steps if one.row.length >= 8192]
    yield "steps of 32,768 positions or more", [one for one in steps if one.row.length >= 32_768]
    for program in sorted({one.row.program for one in steps}):
        yield f"steps of {program}", [one for one in steps if one.row.program == program]


def format_summary_line(name: str, group: Sequence[HeldOutRow]) -> str:
    """Return the line of a group of rows."""
    if not group:
        return f"| {name} | 0 | | | | | |"
    covered = sum(one.is_covered for one in group) / len(group)
    width = median(one.interval.p90 / one.interval.p10 for one in group)
    ours, base = (
        median(map(abs, errors))
        for errors in zip(*((o.error, o.baseline_error) for o in group), strict=True)
    )
    is_half = "yes" if ours < base / 2 else "no"
    return (
        f"| {name} | {len(group)} | {covered:.0%} | {width:.2f} | {ours:.1%} | {base:.1%} | "
        f"{is_half} |"
    )


def format_time_row(one: HeldOutRow) -> str:
    """Return the line of a row."""
    row, interval = one.row, one.interval
    unit = "h" if row.kind == "run" else "s"
    numbers = " | ".join(
        f"{value:,.4g}" for value in (row.measured, interval.p10, interval.p50, interval.p90)
    )
    covered = "yes" if one.is_covered else "no"
    return (
        f"| {row.name}, {unit} | {row.program} | {numbers} | {one.error:+.1%} | {covered} | "
        f"{one.baseline_error:+.1%} |"
    )


def iter_energy_lines(path: Path, foreign: bool) -> Iterator[str]:
    """Yield the table of measured energies."""
    yield "### Energy"
    yield ""
    yield "| run | measured, MWh | P10 | P50 | P90 | error | covered | |"
    yield "|---|---|---|---|---|---|---|---|"
    known = load_residuals()
    for row in build_energy_rows(read_json(path).get("energy_measured", []), known.run):
        one = row.predict_interval(known.energy)
        numbers = " | ".join(f"{value:,.4g}" for value in (row.measured, one.p10, one.p50, one.p90))
        mark = " (calibration)" if row.calibrates and not foreign else ""
        covered = "yes" if one.contains(row.measured) else "no"
        yield (
            f"| {row.name}{mark} | {numbers} | {one.p50 / row.measured - 1:+.1%} | {covered} | "
            f"{row.note} |"
        )
    yield ""


def write_section(path: Path, lines: Sequence[str]) -> None:
    """Write lines between the two marks of a file."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(
        f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}",
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())

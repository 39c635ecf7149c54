"""The report of `llmsys doctor pairs` as text: a table, the failed cases, and what is refused."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from llmsys.doctor.pairs.case_processes import CaseResult
from llmsys.doctor.pairs.check import PairsReport
from llmsys.doctor.pairs.covering_array import Pair
from llmsys.doctor.pairs.factor import Factor
from llmsys.doctor.pairs.factors import FACTORS

# Pairs that are listed behind one message.
MAX_LISTED = 4


def format_report(report: PairsReport, factors: Sequence[Factor] = FACTORS) -> str:
    """Format a report.

    Args:
        report: from `PairsCheck`.
        factors: the factors of its cases.

    Returns:
        Lines of text.
    """
    lines = [format_failure(result, factors) for result in report.failures]
    if report.shrunk:
        lines += ["", "Smallest cases that fail:", *_iter_smallest(report.shrunk, factors)]
    array = report.array
    if array.refused_values:
        lines += ["", "Values that no case here has:"]
        lines += [
            f"  {name}={label}: {message}"
            for (name, label), message in array.refused_values.items()
        ]
    lines += [
        "",
        f"Refused pairs ({len(array.refused)}), by message:",
        *_iter_refusals(array.refused),
    ]
    if array.untold:
        lines += [
            "",
            f"Pairs without an accepted case ({len(array.untold)}):",
            *_iter_refusals(array.untold),
        ]
    return "\n".join([*lines, "", *format_table(report)])


def format_table(report: PairsReport) -> list[str]:
    """Return the table of a run: pairs, cases, time, failures and refused pairs.

    Args:
        report: from `PairsCheck`.
    """
    array = report.array
    refused = len(array.refused) + len(array.untold)
    done, planned = len(report.results), len(array.cases)
    run = f"{done}" if done == planned else f"{done} of {planned}"
    minutes, failed = report.seconds / 60, len(report.failures)
    return [
        "| pairs | refused pairs | cases | minutes | failed cases | seed |",
        "|---|---|---|---|---|---|",
        f"| {array.num_pairs:,} | {refused:,} | {run} | {minutes:.1f} | {failed} | {report.seed} |",
    ]


def format_failure(result: CaseResult, factors: Sequence[Factor] = FACTORS) -> str:
    """Format a failed case: its seed and choices, and the first number that is wrong.

    Args:
        result: the result of a case that did not pass.
        factors: the factors of the case.

    Returns:
        Two lines of text.
    """
    choices = _format_choices(result, factors)
    return f"FAIL seed {result.case.seed}: {choices}\n     {result.problem}"


def _iter_smallest(shrunk: Sequence[CaseResult], factors: Sequence[Factor]) -> Iterator[str]:
    for result in shrunk:
        yield f"  {result.problem}"
        choices = _format_choices(result, factors)
        yield f"    llmsys doctor pairs --seed {result.case.seed} --case '{choices}'"


def _format_choices(result: CaseResult, factors: Sequence[Factor]) -> str:
    return ", ".join(f"{name}={label}" for name, label in result.case.list_choices(factors).items())


def _iter_refusals(refused: Mapping[Pair, str]) -> Iterator[str]:
    by_message: dict[str, list[Pair]] = defaultdict(list)
    for pair, message in refused.items():
        by_message[message].append(pair)
    for message, pairs in sorted(by_message.items(), key=lambda entry: -len(entry[1])):
        shown = "; ".join(
            " with ".join(f"{name}={label}" for name, label in pair) for pair in pairs[:MAX_LISTED]
        )
        more = f"; and {len(pairs) - MAX_LISTED} more" if len(pairs) > MAX_LISTED else ""
        yield f"  {message}"
        yield f"    {shown}{more}"

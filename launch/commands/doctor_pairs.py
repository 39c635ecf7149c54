"""Run `llmsys doctor pairs`: every pair of choices, in few cases, against a plain process."""

import argparse
import json
import sys
from itertools import count
from typing import TYPE_CHECKING

from llmsys.errors import ConfigError

if TYPE_CHECKING:
    from llmsys.doctor.pairs.case_processes import CaseResult
    from llmsys.doctor.pairs.cases import Limits, PairCase
    from llmsys.doctor.pairs.covering_array import CoveringArray
    from llmsys.doctor.pairs.factor import Factor

FAILED = 1
MOST_PROCESSES = 4


def add_pairs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only `pairs` reads.

    Args:
        parser: the parser of `llmsys doctor`.
    """
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="N",
        help="pairs: begin no case after N minutes (default: run all); the status is 1 if cases "
        "are left",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="S",
        help="pairs: seed of the array, of weights and of data (default: %(default)s); equal seeds "
        "give equal cases",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="pairs: only pairs with an event or with a schedule of pipeline stages",
    )
    parser.add_argument(
        "--case",
        metavar="NAME=VALUE,…",
        help="pairs: run this case only, as a failure prints it; --case list prints all names and "
        "values",
    )


def run_pairs_check(arguments: argparse.Namespace) -> int:
    """Print failures, refused pairs and the table; status 1 when a case failed or was left out.

    Args:
        arguments: the arguments of `llmsys doctor`.

    Returns:
        The exit status.
    """
    from llmsys.doctor.pairs.cases import Limits
    from llmsys.doctor.pairs.check import PairsCheck
    from llmsys.doctor.pairs.config_factors import replace_defaults
    from llmsys.doctor.pairs.covering_array import CoveringArray
    from llmsys.doctor.pairs.factors import FACTORS
    from llmsys.doctor.pairs.report import format_failure, format_report
    from llmsys.progress import Progress

    factors = FACTORS
    if arguments.config is not None:
        from llmsys.config.loading.load import load_run_config

        factors = replace_defaults(FACTORS, load_run_config(arguments.config, arguments.overrides))
    if arguments.case == "list":
        print(
            "\n".join(
                f"{one.name}: {', '.join(value.label for value in one.values)}" for one in factors
            )
        )
        return 0
    counts: list[int] = arguments.processes or [MOST_PROCESSES]
    if len(counts) > 1:
        raise ConfigError(
            f"--processes {','.join(map(str, counts))}: doctor pairs takes one number, the most of "
            "a case."
        )
    if arguments.minutes < 0 or arguments.seed < 0:
        raise ConfigError(
            f"--minutes {arguments.minutes:g} and --seed {arguments.seed} are 0 or more."
        )
    limits = Limits(counts[0])
    if arguments.case is not None:
        case = _parse_case(arguments.case, arguments.seed, factors)
        array, cases = CoveringArray(cases=[case.labels]), [case]
    else:
        array = _build_array(arguments, limits, factors)
        cases = []
    with Progress("pairs", len(array.cases), "case") as progress:

        def show(result: "CaseResult") -> None:
            progress.advance(1, failed=not result.has_passed, seconds=f"{result.seconds:.0f}")
            # The report comes after the failed cases have been shrunk, which may take minutes.
            if not result.has_passed:
                print(format_failure(result, factors), file=sys.stderr, flush=True)

        trials = count(1)

        def show_trial(smallest: "CaseResult") -> None:
            choices = len(smallest.case.list_choices(factors))
            shown = f"smallest failing case: trial {next(trials)}, choices left: {choices}"
            progress.describe_remainder = lambda: shown
            progress.advance(0)

        check = PairsCheck(limits, factors, arguments.minutes, show, show_trial)
        seed = arguments.seed
        report = check.run_cases(cases, array, seed) if cases else check.run_array(array, seed)
    if arguments.json:
        print(json.dumps({"passed": report.has_passed, **report.to_dict()}))
    else:
        print(format_report(report, factors))
    return 0 if report.has_passed else FAILED


def _build_array(
    arguments: argparse.Namespace, limits: "Limits", factors: "tuple[Factor, ...]"
) -> "CoveringArray":
    """Build the array, and show the cases so far and the pairs that are left."""
    from llmsys.doctor.pairs.check import build_array
    from llmsys.progress import Progress

    with Progress("array", None, "case") as progress:
        return build_array(
            arguments.seed,
            limits,
            is_sample=arguments.sample,
            factors=factors,
            on_case=lambda cases, left: progress.advance(1, pairs_left=left),
        )


def _parse_case(text: str, seed: int, factors: "tuple[Factor, ...]") -> "PairCase":
    """Return the case of `name=value, name=value`; other factors have their defaults."""
    from llmsys.doctor.pairs.cases import PairCase, build_default_assignment

    labels = build_default_assignment(factors)
    known = {factor.name: [value.label for value in factor.values] for factor in factors}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, label = word.partition("=")
        if label not in known.get(name, []):
            legal = ", ".join(known[name]) if name in known else ", ".join(known)
            what = (
                f"--case {word}: {name} has the values"
                if name in known
                else f"--case {word}: the names are"
            )
            raise ConfigError(f"{what} {legal}.")
        labels[name] = label
    return PairCase(tuple(labels.items()), seed)

"""Run `llmsys compare`: write one HTML page about several runs."""

import argparse
import json
from pathlib import Path

from llmsys.errors import ConfigError
from llmsys.log import get_logger
from llmsys.storage.paths import parse_folder_argument, parse_local_path

log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run folders and --output."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=parse_folder_argument, help="run folder; two or more"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=parse_local_path,
        default=Path("comparison.html"),
        help="HTML file to write (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from llmsys.report.compare_page import (
        find_comparability,
        read_compared_runs,
        write_comparison,
    )

    for folder in arguments.runs:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder (in {Path.cwd()}). Give the folders of runs."
            )
    runs = read_compared_runs(arguments.runs)
    path = write_comparison(runs, arguments.output)
    found = find_comparability(runs)
    if arguments.json:
        measure = None if found.measure == "nothing" else found.measure
        print(json.dumps({"page": str(path), "compared_by": measure, "reason": found.reason}))
        return 0
    print(path)
    if found.reason:
        log.warning("%s", found.reason)
    return 0

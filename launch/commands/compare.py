"""Run `llmsys compare`: write one HTML page about several runs."""

import argparse
import json
from pathlib import Path

from llmsys.errors import ConfigError
from llmsys.storage.paths import parse_local_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run folders and --output."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=parse_local_path, help="run folder; two or more"
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
    from llmsys.report.compare_page import write_comparison

    for folder in arguments.runs:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder (in {Path.cwd()}). Give the folders of runs."
            )
    path = write_comparison(arguments.runs, arguments.output)
    print(json.dumps({"page": str(path)}) if arguments.json else str(path))
    return 0

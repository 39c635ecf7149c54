"""Run `llmsys watch`: show a run in the terminal while it trains, and keep its page current."""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from llmsys.errors import ConfigError
from llmsys.storage.paths import parse_folder_argument

HOME, CLEAR_BELOW, CLEAR_LINE = "\033[H", "\033[J", "\033[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run folder, the interval, --once and --page."""
    parser.add_argument("run_folder", metavar="RUN", type=parse_folder_argument, help="run folder")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two readings (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument(
        "--page",
        action="store_true",
        help="also write report.html of the run at every reading; an open page loads itself again "
        "while the run trains",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the state until the run is finished or Ctrl-C; with --json once, as one object."""
    folder: Path = arguments.run_folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder (in {Path.cwd()}). Give the folder of a run.")
    if (folder / "manifest.json").exists() and not (folder / "events.jsonl").exists():
        raise ConfigError(
            f"{folder} is a dataset folder, and a run is watched. Give the folder of a run."
        )
    if not 0 < arguments.every < math.inf:
        raise ConfigError(
            f"--every {arguments.every:g} is not a time. Give seconds above 0, such as 2."
        )
    from llmsys.log import can_show_escapes
    from llmsys.report.run_record import read_run

    is_live = can_show_escapes(sys.stdout) and not (arguments.once or arguments.json)
    if is_live:
        print("\033[2J", end="")
    before: tuple[int, ...] = ()
    while True:
        # a long file is read again only when it has changed
        if (now := _compute_stamp(folder)) != before or not before:
            before, record = now, read_run(folder)
            _show(record, arguments, is_live)
        if arguments.once or arguments.json or record.finish is not None:
            return 0
        time.sleep(arguments.every)


def _compute_stamp(folder: Path) -> tuple[int, ...]:
    path = folder / "events.jsonl"
    about = path.stat() if path.exists() else None
    return (0, 0) if about is None else (about.st_size, about.st_mtime_ns)


def _show(record: Any, arguments: argparse.Namespace, is_live: bool) -> None:
    if arguments.page:
        from llmsys.report.html_page import write_report

        write_report(
            record.folder, None, reload_seconds=None if record.finish else max(5.0, arguments.every)
        )
    if arguments.json:
        from llmsys.report.run_sections import describe_run_state

        state = {
            "run": record.name,
            "state": describe_run_state(record)[0],
            "step": record.last_step,
        }
        print(json.dumps(state | {"evaluation": record.last_evaluation}))
        return
    from llmsys.report.terminal_view import format_run_view

    text = format_run_view(record)
    if is_live:
        text = HOME + text.replace("\n", f"{CLEAR_LINE}\n") + CLEAR_LINE + "\n" + CLEAR_BELOW
    print(text, end="" if is_live else "\n", flush=True)

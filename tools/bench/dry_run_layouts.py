"""Compare the peak memory of dry runs with `llmsys estimate` on the layouts of
data/dry_run_layouts.txt.

Reads lines of `llmsys dryrun`. Prints a table, with the largest difference last.

    python tools/bench/dry_run_layouts.py                    all layouts, some twenty CPU minutes
    python tools/bench/dry_run_layouts.py --only pipeline    those whose line has this word
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.dryrun.dry_run import run_dry_run
from llmsys.errors import LlmsysError
from llmsys.estimate.memory_timeline import GIB
from llmsys.launch.commands.dryrun import build_request
from llmsys.launch.main import build_parser

LAYOUTS = Path(__file__).resolve().parent / "data" / "dry_run_layouts.txt"
ADDED = ("device=h100-sxm", "train.precision=bf16")
# Largest difference, as a share of the estimate.
LIMIT = 0.10


def list_layouts(only: str = "") -> list[list[str]]:
    """Return the words of every line that has a word.

    Args:
        only: part of a line; empty: every line.

    Returns:
        CONFIG and overrides of `llmsys dryrun`, without the device.
    """
    lines = LAYOUTS.read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line and not line.startswith("#") and only in line]


def run_layout(words: list[str]) -> dict[str, Any]:
    """Return the result of the dry run of a line."""
    return run_dry_run(
        build_request(build_parser("dryrun").parse_intermixed_args([*words, *ADDED]))
    )


def format_layout(words: list[str], result: dict[str, Any]) -> str:
    """Return the row of a layout: its line, both peaks in GiB, and the difference of the dry run
    from the estimate.
    """
    estimate = result["estimate"]
    cells = [
        f"`{' '.join(words)}`",
        f"{result['memory']['peak_bytes'] / GIB:.1f}",
        f"{estimate['peak_bytes'] / GIB:.1f}",
        f"{estimate['difference']:+.1%}",
        f"{sum(result['seconds'].values()):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def iter_rows(layouts: list[list[str]], differences: list[float]) -> Iterator[str]:
    """Yield the rows of the table, and collect the differences."""
    for words in layouts:
        try:
            result = run_layout(words)
        except LlmsysError as error:
            yield f"| `{' '.join(words)}` | {str(error).splitlines()[0]} | | | |"
            continue
        differences.append(result["estimate"]["difference"])
        yield format_layout(words, result)


def main() -> int:
    """Run the layouts one after the other, print the table, and return 1 where a difference is
    above a tenth.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a line (default: all lines)")
    layouts, differences = list_layouts(parser.parse_args().only), list[float]()
    print(
        "| dry run | peak, GiB | estimate, GiB | difference | CPU seconds |\n|---|---|---|---|---|",
        flush=True,
    )
    for row in iter_rows(layouts, differences):
        print(row, flush=True)
    agreeing = sum(abs(one) <= LIMIT for one in differences)
    print(
        f"\n{agreeing} of {len(layouts)} within {LIMIT:.0%}; largest "
        f"{max(map(abs, differences), default=0):.1%}."
    )
    return 0 if agreeing == len(layouts) else 1


if __name__ == "__main__":
    sys.exit(main())

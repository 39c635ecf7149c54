"""Programs without what published rows of one model, or of one report, gave.

A fit that leaves this model or report out does not know it, so its error is that of the command
without it.
"""

import atexit
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from llmsys.config.loading.yaml_files import dump_yaml
from tools.bench.fits.published_row import read_tables


def find_blind_words(
    name: str, words: Sequence[str], *, is_model_out: bool
) -> tuple[str, ...] | None:
    """Return the command of a row without what rows of its report, or of its model, alone gave.

    Args:
        name: name of the row in tables.
        words: arguments of `llmsys`, with --program.
        is_model_out: Its model is left out, in whichever report; else its report is.

    Returns:
        The same arguments with another profile of the program; None where nothing is of this model
        or report alone.
    """
    place = list(words).index("--program") + 1
    for rule in read_tables()["blind"]:
        if rule["of"] == "model" and not is_model_out:
            continue
        if re.search(rule["pattern"], name) and rule.get("program", words[place]) == words[place]:
            path = _write_program(words[place], tuple(sorted(rule["time"].items())))
            return (*words[:place], str(path), *words[place + 1 :])
    return None


@cache
def _write_program(program: str, changes: tuple[tuple[str, float | str], ...]) -> Path:
    """Write the profile of a program with some constants changed."""
    path = Path(mkdtemp()) / f"{program}.yaml"
    values = {
        "name": program,
        "description": "Without what rows of one model or report gave.",
        "base": program,
    }
    path.write_text(dump_yaml(values | {"time": dict(changes)}), encoding="utf-8")
    atexit.register(rmtree, path.parent)
    return path

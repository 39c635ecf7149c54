"""Which crawl files a configuration names: patterns in, existing files out, each once, in the order of their paths."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from llmsys.errors import DataError


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Return the files that the patterns match, sorted; DataError when a pattern matches none."""
    if not patterns:
        raise DataError("data.inputs is empty. Name crawl files, such as data.inputs='[crawl/*.warc.gz]'.")
    found: set[str] = set()
    for pattern in patterns:
        matches = [os.path.normpath(match) for match in glob.glob(pattern, recursive=True)]
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            raise DataError(_nothing(pattern, matches))
        found.update(files)
    return [Path(path) for path in sorted(found)]


def _nothing(pattern: str, folders: Sequence[str]) -> str:
    if folders:
        return f"data.inputs: '{pattern}' is a folder, not a file. Name the files in it: '{folders[0]}/*.warc.gz'."
    return (
        f"data.inputs: no file matches '{pattern}' (in {Path.cwd()}). "
        f"Correct the pattern; relative ones start in the working directory."
    )

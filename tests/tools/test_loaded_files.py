"""Laws of how much there is to open: the number of our files that one process runs for one command."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Measured; lower them with the code. Counted are all files that a process runs, __init__.py and the main file too.
MAX_ESTIMATE, MAX_PREPARE_WORKER, MAX_PREPARE_DRIVER = 65, 106, 132

# Python imports this file first, in a worker process too. The hook sees an import before the file runs.
HOOK = """
import os, sys

def note(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in ("llmsys", "data_pipeline", "launch"):
        with open(os.path.join(os.environ["NOTES"], str(os.getpid())), "a") as notes:
            notes.write(arguments[0] + "\\n")

sys.addaudithook(note)
"""


def count_files_by_process(words: Sequence[str], repository: Path, folder: Path) -> list[int]:
    """Run a command and return the number of our files that each of its processes ran, largest first."""
    notes = folder / "notes"
    notes.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(folder), str(repository)])
    subprocess.run(
        [sys.executable, "-m", "launch.main", *words], cwd=repository, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "NOTES": str(notes)},
    )  # fmt: skip
    # the main file is no import
    return sorted((len({*path.read_text().split()}) + 1 for path in notes.iterdir()), reverse=True)


def test_an_estimate_opens_few_files(repository: Path, tmp_path: Path) -> None:
    [count] = count_files_by_process(["estimate", "train/demo"], repository, tmp_path)
    assert 30 < count <= MAX_ESTIMATE


def test_one_shard_through_prepare_opens_few_files(repository: Path, tmp_path: Path) -> None:
    shard = "tests/data/sample_crawl/shard-00000.warc.gz"
    settings = [f"data.inputs=[{shard}]", f"data.folder={tmp_path / 'data'}", "data.executor.workers=1"]
    driver, worker = count_files_by_process(["prepare", "train/demo", *settings], repository, tmp_path)
    assert 60 < worker <= MAX_PREPARE_WORKER
    assert driver <= MAX_PREPARE_DRIVER

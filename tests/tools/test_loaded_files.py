"""Laws of how much there is to open: the number of our files of which a command runs a function,
and how often a reader who follows a key of a config comes back to a file.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType

from llmsys.config.loading.load import load_run_config

# Measured; lower them with the code. Counted are the files with a function that a process ran.
# Nine of an estimate's know the model types of Hugging Face, for its promise of an export; two of
# both are the kinds of layers and the hash of a section with types of columns.
MAX_ESTIMATE, MAX_PREPARE = 42, 120
LOADING = os.path.join("llmsys", "config", "loading", "")

# Python imports this file first, in a worker process too. Code of modules, classes and module
# constants is no function.
HOOK = """
import os, sys, threading

ran = set()

def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & 2 and code.co_qualname[0] != "<"
    if event == "call" and code.co_filename not in ran and is_function:
        ran.add(code.co_filename)
        if code.co_filename.startswith(os.environ["REPOSITORY"]):
            with open(os.path.join(os.environ["NOTES"], str(os.getpid())), "a") as notes:
                notes.write(code.co_filename + "\\n")

os.register_at_fork(after_in_child=ran.clear)
threading.setprofile(note)
sys.setprofile(note)
"""


def count_files(words: Sequence[str], repository: Path, folder: Path) -> int:
    """Run a command and return the number of our files of which one of its processes ran a
    function.
    """
    notes = folder / "notes"
    notes.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(folder), str(repository)])
    subprocess.run(
        [sys.executable, "-m", "llmsys.launch.main", *words], cwd=repository, check=True,
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "NOTES": str(notes),
            "REPOSITORY": os.path.join(repository, "")},
    )  # fmt: skip
    files = {name for path in notes.iterdir() for name in path.read_text().splitlines()}
    return sum(not name.startswith(str(repository / ".venv")) for name in files)


def test_an_estimate_opens_few_files(repository: Path, tmp_path: Path) -> None:
    assert 20 < count_files(["estimate", "model/llama-7b"], repository, tmp_path) <= MAX_ESTIMATE


def test_one_shard_through_prepare_opens_few_files(repository: Path, tmp_path: Path) -> None:
    shard = "tests/data/sample_crawl/shard-00000.warc.gz"
    settings = [
        f"data.inputs=[{shard}]",
        f"data.folder={tmp_path / 'data'}",
        "data.executor.workers=1",
    ]
    assert (
        60 < count_files(["prepare", "train/demo", *settings], repository, tmp_path) <= MAX_PREPARE
    )


# Calls into a file that a reader of the loader had left, from the name of a config to its values.
MAX_RETURNS = 4


def test_a_key_reaches_its_section_with_few_returns_to_a_file_left_before() -> None:
    read: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        where = frame.f_code.co_filename, frame.f_code.co_qualname
        is_function = where[1][0] != "<" and "<locals>" not in where[1]
        if event == "call" and is_function and where not in read and LOADING in where[0]:
            read.append(where)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        load_run_config("train/demo", ["optimizer.learning_rate=3e-4"])
    finally:
        sys.setprofile(before)
    files = [file for file, _ in groupby(file for file, _ in read)]
    assert len(set(files)) > 3, "the loader is several files"
    assert len(files) - len(set(files)) <= MAX_RETURNS

"""Plant small bugs one at a time and print those that no test notices: `python tools/mutate.py
[--only PATTERN]`.

Reads `mutations.yaml`: groups of bugs with the file they are planted in and the tests that must
fail. Tests run in a temporary copy of the checkout, so the working tree is never changed. The exit
status is 1 if a bug is not caught.

Invariants:
- A bug is tested by tests of its package alone.
- A test that fails without any bug catches nothing: the tests that failed run once more in the
  clean copy.
"""

import argparse
import contextlib
import importlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
OWN_FOLDERS = (ROOT, ROOT / "tools")
MUTATIONS = Path(__file__).with_name("mutations.yaml")
TIMEOUT_SECONDS = 300
# Libraries that are imported before a process is forked for each bug.
PRELOADED = (
    "numpy",
    "pyarrow",
    "pydantic",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
# Lines of pytest's summary that name a test; an error outside of a test names a file alone.
SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.+?\.py::.+?)(?: - .*)?$", re.MULTILINE)

Status = Literal["caught", "survived", "timeout", "broken", "unsound"]


_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


def compile_pattern(code: str) -> re.Pattern[str]:
    """Compile a pattern that finds code whatever its line breaks are.

    Args:
        code: A part of a source file. ruff may break its lines elsewhere, which adds white space
            between tokens and a comma before a closing bracket.

    Returns:
        The pattern.
    """
    pattern = ""
    pieces = _PIECE.findall(code.strip())
    for number, piece in enumerate(pieces):
        if piece.isspace():
            joins_words = pieces[number - 1][-1].isalnum() and pieces[number + 1][0].isalnum()
            pattern += r"\s+" if joins_words else r"\s*"
        elif piece in ")]}":
            pattern += r",?\s*" + re.escape(piece)
        elif piece == ".":
            pattern += r"\s*\."
        elif piece in "([{":
            pattern += re.escape(piece) + r"\s*"
        else:
            pattern += re.escape(piece)
    return re.compile(pattern)


class MutantError(Exception):
    """A mutant that does not fit the source."""


@dataclass(frozen=True)
class Mutant:
    """A bug: `old`, which occurs once in `file`, becomes `new`. At least one of `tests` must
    fail.
    """

    title: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply_to_source(self, source: str) -> str:
        """Return the source with the bug. Raises MutantError unless the old text occurs once."""
        found = list(compile_pattern(self.old).finditer(source))
        if (count := len(found)) != 1:
            raise MutantError(
                f"{self.file} has {count} times the text {self.old!r} of the mutant "
                f"{self.title!r}, and must have it once. Adapt {MUTATIONS.name} to the source."
            )
        return source[: found[0].start()] + self.new.strip() + source[found[0].end() :]


@dataclass(frozen=True)
class MutantResult:
    """The result of one mutant: `test` is the one that failed first, `output` the end of
    pytest's.
    """

    mutant: Mutant
    status: Status
    seconds: float
    test: str = ""
    output: str = ""


def load_mutants(path: Path) -> list[Mutant]:
    """Load the mutants of a file, in its order."""
    return [
        Mutant(mutant["title"], group["file"], mutant["old"], mutant["new"], tuple(group["tests"]))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))
        for mutant in group["mutants"]
    ]


def select_mutants(mutants: Sequence[Mutant], pattern: str) -> list[Mutant]:
    """Return the mutants whose file or title has the pattern, a regular expression."""
    return [mutant for mutant in mutants if re.search(pattern, f"{mutant.file}: {mutant.title}")]


def copy_checkout(root: Path, target: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        path = root / name
        # llmsys/launch and llmsys/data_pipeline are links to folders.
        if path.is_file() or path.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name, follow_symlinks=False)


@contextlib.contextmanager
def apply_mutant(mutant: Mutant, folder: Path, number: int) -> Iterator[None]:
    """Write the bug into a copy of the checkout, and the original afterwards."""
    path = folder / mutant.file
    source, before = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(mutant.apply_to_source(source), encoding="utf-8")
    # Bytecode is found by size and whole seconds, which must therefore differ between mutants of
    # one file.
    os.utime(path, (number, number))
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def run_pytest(
    tests: Sequence[str], folder: Path, timeout: float, *options: str
) -> tuple[int | None, str]:
    """Run tests in a copy of the checkout, and return the exit status (None after a timeout) and
    the output.
    """
    arguments = ["-q", "-p", "no:cacheprovider", "-rfE", "--tb=short", *options, *tests]
    with tempfile.TemporaryFile() as output:
        # Forked, because importing torch takes longer than most tests.
        child = os.fork()
        if not child:
            _run_pytest_in_child(arguments, folder, output.fileno())
        status = _wait_for_child(child, timeout)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _run_pytest_in_child(arguments: list[str], folder: Path, output: int) -> NoReturn:
    status = 3  # pytest's own for an internal error
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "COLUMNS": "200"}
        sys.path[:] = [
            str(folder),
            *(entry for entry in sys.path if Path(entry or ".").resolve() not in OWN_FOLDERS),
        ]
        status = int(pytest.main(arguments))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait_for_child(child: int, timeout: float) -> int | None:
    """Return the exit status of a child, None after a timeout, and end the processes that it has
    started.
    """
    end, found = time.monotonic() + timeout, (0, 0)
    while not found[0] and time.monotonic() < end:
        time.sleep(0.05)
        found = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(child, signal.SIGKILL)
    if found[0]:
        return os.waitstatus_to_exitcode(found[1])
    os.waitpid(child, 0)
    return None


def run_mutant(mutant: Mutant, folder: Path, number: int, timeout: float) -> MutantResult:
    """Plant one bug in a copy of the checkout and run its tests until the first failure."""
    began = time.perf_counter()
    with apply_mutant(mutant, folder, number):
        status, output = run_pytest(mutant.tests, folder, timeout, "-x")
    failed = SUMMARY.search(output)
    verdict: Status = "broken"
    if status is None:
        verdict = "timeout"
    elif status == 0:
        verdict = "survived"
    elif failed:
        verdict = "caught"
    return MutantResult(
        mutant, verdict, time.perf_counter() - began, failed[1] if failed else "", output[-4000:]
    )


def run_mutants(
    mutants: Sequence[Mutant], root: Path, jobs: int = 1, timeout: float = TIMEOUT_SECONDS
) -> list[MutantResult]:
    """Run all mutants, each in one of `jobs` copies of the checkout, and print a line for each.

    Args:
        mutants: The bugs.
        root: The checkout.
        jobs: Number of mutants that are tested at the same time.
        timeout: Seconds for the tests of one mutant.

    Returns:
        Results in the order of the mutants.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # as in tests/conftest.py, which comes after torch here
    for library in PRELOADED:
        importlib.import_module(library)
    with (
        tempfile.TemporaryDirectory(prefix="mutate-") as temporary,
        ThreadPoolExecutor(jobs) as pool,
    ):
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            copy_checkout(root, Path(temporary) / str(job))
            folders.put(Path(temporary) / str(job))

        def run_in_free_folder(number: int, mutant: Mutant) -> MutantResult:
            folder = folders.get()
            try:
                result = run_mutant(mutant, folder, number, timeout)
            finally:
                folders.put(folder)
            caught_by = f" ({result.test})" if result.test else ""
            print(
                f"{result.status:8} {result.seconds:4.0f} s  {mutant.file}: "
                f"{mutant.title}{caught_by}",
                flush=True,
            )
            return result

        results = list(pool.map(run_in_free_folder, range(1, len(mutants) + 1), mutants))
        return _mark_unsound_results(results, Path(temporary) / "0", timeout)


def _mark_unsound_results(
    results: list[MutantResult], folder: Path, timeout: float
) -> list[MutantResult]:
    """Mark the results whose test fails without any bug too."""
    tests = sorted({result.test for result in results if result.status == "caught"})
    if not tests:
        return results
    status, output = run_pytest(tests, folder, timeout * len(tests))
    failed = set(SUMMARY.findall(output))
    if status not in (0, 1):
        raise MutantError(
            f"the tests that failed could not be run again without a bug:\n{output[-4000:]}"
        )
    return [
        replace(result, status="unsound") if result.test in failed else result for result in results
    ]


def format_summary(results: Sequence[MutantResult]) -> str:
    """Format the bugs that were not caught, each with its location and the end of pytest's
    output.
    """
    missed = [result for result in results if result.status != "caught"]
    lines = [f"{len(results) - len(missed)} of {len(results)} bugs were caught."]
    for result in missed:
        mutant = result.mutant
        lines.append(
            f"\n{result.status}: {mutant.title} ({mutant.file})\n  - {mutant.old}\n  + {mutant.new}"
        )
        lines.append(
            f"  tests: {' '.join(mutant.tests)}{f'; {result.test}' if result.test else ''}"
        )
        if result.status in ("broken", "timeout"):
            lines.append(result.output)
    return "\n".join(lines)


def format_list(mutants: Sequence[Mutant], *, markdown: bool) -> str:
    """Format the bugs, each with the tests that must notice it: as lines, or as a table."""
    if not markdown:
        return "\n".join(
            f"{mutant.file}: {mutant.title} ({' '.join(mutant.tests)})" for mutant in mutants
        )
    lines = ["| Bug | Planted in | Tests that must notice it |", "|---|---|---|"]
    for mutant in mutants:
        tests = "<br>".join(f"`{test}`" for test in mutant.tests)
        lines.append(f"| {mutant.title} | `{mutant.file}` | {tests} |")
    return "\n".join(lines)


def format_markdown(results: Sequence[MutantResult]) -> str:
    """Format the results as a table: each bug with the test that failed, or with what became of
    it.
    """
    lines = ["| Bug | Planted in | Test that fails |", "|---|---|---|"]
    for result in results:
        test = (
            re.sub(r"\[.*", "", result.test).rpartition("::")[2]
            if result.status == "caught"
            else result.status
        )
        lines.append(f"| {result.mutant.title} | `{result.mutant.file}` | `{test}` |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that the command line chooses, and return the exit status."""
    parser = argparse.ArgumentParser(prog="mutate.py", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="bugs whose file or title has this expression"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the bugs and their tests, and run nothing"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="bugs that are tested at the same time (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for the tests of one bug"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the bugs, or the results, as a table"
    )
    options = parser.parse_args(arguments)
    mutants = select_mutants(load_mutants(MUTATIONS), options.only)
    if not mutants:
        parser.error(f"--only {options.only} names no bug; --list prints them")
    if options.list:
        print(format_list(mutants, markdown=options.markdown))
        return 0
    try:
        for mutant in mutants:
            mutant.apply_to_source((ROOT / mutant.file).read_text(encoding="utf-8"))
    except MutantError as error:
        parser.error(str(error))
    results = run_mutants(mutants, ROOT, options.jobs, options.timeout)
    if options.markdown:
        print(f"\n{format_markdown(results)}")
    print(f"\n{format_summary(results)}")
    return int(any(result.status != "caught" for result in results))


if __name__ == "__main__":
    sys.exit(main())

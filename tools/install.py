"""Install this checkout and every pinned dependency into `.venv`; do nothing when it is installed
already.

Reads pyproject.toml and constraints.txt, writes `.venv`. `make install` runs it with any Python
3.11 or newer before anything is installed, so it uses the standard library alone.

Invariants:
- A finished install is recognized by a hash of its inputs, and costs nothing.
- An extra that was installed once (`--extra docs`) is installed again with every later change of
  the inputs.
- An install that was killed is deleted and repeated, because a half-copied package looks complete
  to pip.
- Two installs at the same time wait for each other.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "dev,test,track"
# libraries that every command of llmsys with a config imports
EVERY_COMMAND = (
    "annotated_types",
    "numpy",
    "pyarrow",
    "pydantic",
    "pydantic_core",
    "typing_extensions.py",
    "typing_inspection",
    "yaml",
)
# the three files of ours inside .venv
LOCK, LOG, STATE = "install.lock", "install.log", "install.state"
PROGRESS_SECONDS = 1.0 if sys.stdout.isatty() else 15.0  # between two lines about a running step


class InstallState(NamedTuple):
    """Inputs of an environment: its path, the hash of the files that list its content, and
    extras besides EXTRAS.
    """

    place: str
    content: str
    extras: frozenset[str] = frozenset()


UNFINISHED = InstallState("unfinished", "unfinished")
UNKNOWN = InstallState("", "")  # an environment this script did not make, or none at all


def compute_digest(*parts: bytes) -> str:
    """Return a short hash of a list of byte strings, borders included."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :32
    ]


def compute_wanted_state(root: Path, extras: Iterable[str] = ()) -> InstallState:
    """Return the state of a finished install of the checkout at `root`. Scripts in .venv/bin
    hold absolute paths.
    """
    names = ["pyproject.toml", "constraints.txt"]
    # the compiled core is built while the checkout is installed
    built = sorted([*(root / "native").glob("*"), *(root / "tools").glob("build_native.py")])
    files = [path.read_bytes() for path in (*(root / name for name in names), *built)]
    content = compute_digest(EXTRAS.encode(), *files)
    return InstallState(compute_digest(str(root).encode()), content, frozenset(extras))


def read_state(venv: Path) -> InstallState:
    """Return the state that the last install wrote."""
    path = venv / STATE
    if not path.exists():
        return UNKNOWN
    place, content, *extras = [*path.read_text().split(), "", ""]
    return InstallState(place, content, frozenset(filter(None, extras))) if content else UNFINISHED


def write_state(venv: Path, state: InstallState) -> None:
    """Write `state` by one rename, so that a kill never leaves half of it."""
    aside = venv / f"{STATE}.tmp"
    aside.write_text(" ".join([state.place, state.content, *sorted(state.extras)]) + "\n")
    aside.replace(venv / STATE)


def can_start(venv: Path) -> bool:
    """Return whether the environment's Python and pip run; its base Python may be gone."""
    command = [
        str(venv / "bin" / "python"),
        "-c",
        "import sys, pip; sys.exit(sys.version_info < (3, 11))",
    ]
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def clear_environment(venv: Path) -> None:
    """Remove everything in the environment except our three files."""
    for entry in venv.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (LOCK, LOG, STATE):
            entry.unlink()


@contextmanager
def hold_lock(venv: Path) -> Iterator[int]:
    """Hold the lock, waiting while another install holds it.

    Children inherit it: it is free when the last has ended.
    """
    with (venv / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                "install: another install of this checkout is running; waiting for it", flush=True
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise SystemExit(
                f"install: {venv} lies on a file system where flock does not work "
                f"({error.strerror}), and without a lock two installs could mix. Mount it with "
                "locks, or put the checkout on another file system."
            ) from None
        yield lock.fileno()


def describe_progress(written: str) -> str:
    """Return what pip does now, in a few words, from what it wrote; empty before it found a
    package.
    """
    lines = written.splitlines()
    if installing := [line for line in lines if line.startswith("Installing collected packages:")]:
        return f"writing {installing[-1].count(',') + 1} packages"
    # `Processing` is a wheel of a local folder
    found = sum(line.startswith(("Collecting ", "Processing ")) for line in lines)
    # pip names the size after the file: `Downloading torch-2.13.0-cp311-….whl (183.2 MB)`
    loads = [line.split()[1:] for line in lines if line.lstrip().startswith("Downloading ")]
    now = (
        f", now {loads[-1][0].rpartition('/')[2]} {' '.join(loads[-1][1:])}".rstrip()
        if loads
        else ""
    )
    return f"{found} packages found{now}" if found else ""


def wait_for_command(process: "subprocess.Popen[bytes]", log: Path, start: int) -> int:
    """Return the exit status of a command, and print its progress until then, from its log after
    `start`.

    A terminal shows one line that changes every second; elsewhere a line appears every 15 seconds.
    """
    began, is_terminal = time.monotonic(), sys.stdout.isatty()
    while True:
        try:
            status = process.wait(PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            now = describe_progress(log.read_bytes()[start:].decode(errors="replace"))
            if now:
                line = f"install: {now} ({time.monotonic() - began:.0f} s)"
                # \r and the escape code: the same line again, cleared
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{line[:width]}" if is_terminal else f"{line}\n", end="", flush=True)
            continue
        if is_terminal:
            print("\r\033[K", end="", flush=True)
        return status


def run_command(command: list[str], root: Path, lock: int, log: IO[str]) -> None:
    """Run one command with its output in the log; on failure print the end of the log and exit
    with status 1.
    """
    # DS_BUILD_OPS=0: deepspeed compiles no kernel, so neither gcc nor a second torch is needed to
    # build it. The constraints also hold for what builds it: pip before 25.3 reads the first
    # variable for that, later the second.
    environment = os.environ | {
        "DS_BUILD_OPS": "0",
        "PIP_CONSTRAINT": "constraints.txt",
        "PIP_BUILD_CONSTRAINT": "constraints.txt",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    start = log.tell()
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[lock],
    )
    status = wait_for_command(process, Path(log.name), start)
    if status == 0:
        return
    print(
        "\n".join(Path(log.name).read_bytes()[start:].decode(errors="replace").splitlines()[-30:]),
        file=sys.stderr,
    )
    sys.exit(
        f"install: `{' '.join(command)}` ended with status {status}; the whole log is {log.name}. "
        "Check that a package index can be reached and that the disk has 10 GB free, then run "
        "`make install` again."
    )


def build_environment(root: Path, present: InstallState, wanted: InstallState, lock: int) -> None:
    """Create the environment where needed, and install into it. It is marked unfinished before
    it starts.
    """
    venv, pip = root / ".venv", [".venv/bin/python", "-m", "pip", "install"]
    with (venv / LOG).open("w") as log:
        if present.place not in ("", wanted.place) or not can_start(venv):
            print("install: creating .venv", flush=True)
            write_state(venv, UNFINISHED)
            clear_environment(venv)
            # The real path: this very Python may be the one in .venv, when that is active.
            run_command(
                [str(Path(sys.executable).resolve()), "-m", "venv", ".venv"], root, lock, log
            )
        write_state(venv, UNFINISHED)
        print(
            "install: the packages of constraints.txt (one to three minutes; log in "
            ".venv/install.log)",
            flush=True,
        )
        extras = ",".join([EXTRAS, *sorted(wanted.extras)])
        run_command([*pip, "--no-compile", "--use-pep517", "-e", f".[{extras}]"], root, lock, log)
    write_state(venv, wanted)


def compile_imported_modules(root: Path) -> None:
    """Compile the checkout, and the libraries that every command imports, to bytecode.

    Where PYTHONDONTWRITEBYTECODE is set, as in many containers, Python would compile them again in
    every process: a third of the time in which an unchanged dataset is known. The other libraries
    are compiled at their first import, because torch alone takes a minute.
    """
    libraries = (root / ".venv").glob("lib/python*/site-packages")
    folders = [root / name for name in ("llmsys", "data_pipeline", "launch")]
    folders += [site / name for site in libraries for name in EVERY_COMMAND]
    names = [str(folder) for folder in folders if folder.exists()]
    command = [str(root / ".venv/bin/python"), "-m", "compileall", "-q", "-x", "/tests?/", *names]
    # What cannot be compiled or written is compiled at its import, which shows the error.
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def describe_core(venv: Path) -> str:
    """Return in a few words which core prepares data, as the installed package says it."""
    program = "from llmsys.data_pipeline.core.native import describe_core; print(describe_core())"
    command = [str(venv / "bin" / "python"), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def install_checkout(root: Path = ROOT, extras: Sequence[str] = ()) -> None:
    """Bring `root/.venv` to the wanted state, printing one line per step."""
    venv = root / ".venv"
    venv.mkdir(exist_ok=True)
    with hold_lock(venv) as lock:
        present = read_state(venv)
        wanted = compute_wanted_state(root, {*extras, *present.extras})
        if present == wanted and can_start(venv):
            return
        started = time.monotonic()
        build_environment(root, present, wanted, lock)
        compile_imported_modules(root)
        if core := describe_core(venv):
            print(f"install: data is prepared by the {core}", flush=True)
        size = sum(path.lstat().st_size for path in venv.rglob("*"))
        print(
            f"install: done in {time.monotonic() - started:.0f} s, {size / 1e9:.1f} GB in .venv",
            flush=True,
        )


def main() -> None:
    """Parse the command line and install."""
    parser = argparse.ArgumentParser(
        description="Create .venv with llmsys and its pinned dependencies."
    )
    parser.add_argument(
        "--extra", action="append", default=[], help="an extra of pyproject.toml to install as well"
    )
    install_checkout(extras=parser.parse_args().extra)


if __name__ == "__main__":
    main()

"""Evidence of a crash of native code: what the process printed, its threads and its core, kept
beside the checkout.

Reads `/proc/sys/kernel/core_pattern`. Writes `build/native-crashes/TEST/`, which `make clean`
removes.

Invariants:

- What could not be kept is said with the reason: another limit, another program that takes cores,
  no gdb.
"""

import ctypes
import faulthandler
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "native-crashes"
SIGNALS = {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
}
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
GDB_SECONDS = 120
SHOWN_LINES = 60


def prepare_crash_report(path: Path) -> None:
    """Make the kernel write a core of this process, and stderr and the threads' Python frames go
    to `path`.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2, all_threads=True)


def keep_crash(name: str, status: int, pid: int, log: Path) -> str:
    """Keep what a crashed process leaves, and return it for people.

    Args:
        name: The process among those of a test, such as "rank 1".
        status: Its exit status; minus the signal.
        pid: Its process id.
        log: The file that `prepare_crash_report` was given.

    Returns:
        What it died of, the folder with the evidence, and the start of each file.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" ")[0]
    folder = FOLDER / re.sub(r"[^\w.=-]+", "-", test)[-150:]
    folder.mkdir(parents=True, exist_ok=True)
    prefix = name.replace(" ", "")
    kept = folder / f"{prefix}.stderr"
    # A process that is still importing has none.
    kept.write_bytes(log.read_bytes() if log.exists() else b"")
    core = folder / f"{prefix}.core"
    found = _find_core(pid)
    if isinstance(found, Path):
        shutil.move(found, core)
        threads = _read_threads(core, folder / f"{prefix}.threads")
    else:
        threads = found
    printed = kept.read_text(errors="replace").strip() or "It printed nothing."
    return (
        f"{name} was killed by {signal.Signals(-status).name}. Evidence is in {folder}.\n"
        f"{_shorten(printed)}\n{_shorten(threads)}"
    )


def _find_core(pid: int) -> Path | str:
    """Return the core of a process that ended, or why there is none."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        return "No core: the hard limit is 0. Raise it with `ulimit -Hc unlimited` as root."
    if not CORE_PATTERN.exists():
        return f"No core: this system has no {CORE_PATTERN}."
    pattern = CORE_PATTERN.read_text().strip()
    if pattern.startswith("|"):
        return f"No core here: the kernel hands it to {pattern[1:]}."
    # %p is the process id; %e, %h, %s, %t, … are not known here. Ranks keep the folder of the
    # tests.
    path = Path(re.sub(r"%[^p]", "*", pattern).replace("%p", str(pid)))
    candidates = [*Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))]
    candidates += [*Path(path.anchor or ".").glob(f"{path.relative_to(path.anchor)}.{pid}")]
    if not candidates:
        return f"No core: none is at {path} (the pattern is {pattern})."
    return max(candidates, key=lambda one: one.stat().st_mtime)


def _read_threads(core: Path, path: Path) -> str:
    if shutil.which("gdb") is None:
        return f"No native frames: gdb is not installed. `gdb {sys.executable} {core}` shows them."
    command = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off", "-ex", "bt"]
    command += ["-ex", "thread apply all bt", sys.executable, str(core)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GDB_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"No native frames: gdb took more than {GDB_SECONDS} s over {core}."
    path.write_text(done.stdout + done.stderr)
    frames = [line for line in done.stdout.splitlines() if line.startswith("#")]
    return "\n".join(frames) or f"gdb found no frames: {done.stderr[-500:]}"


def _shorten(text: str) -> str:
    lines = text.splitlines()
    left = len(lines) - SHOWN_LINES
    return "\n".join(lines[:SHOWN_LINES] + ([f"… {left} more lines"] if left > 0 else []))


def build_heap_checks() -> dict[str, str]:
    """Return the environment that makes glibc check each block of the heap when it is freed.

    Since glibc 2.34 the checks are in a library of their own: without it the variable does nothing.

    Returns:
        Variables for a process that starts; none on a system without glibc.
    """
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if name != "glibc":
        return {}
    checks = {"MALLOC_CHECK_": "3"}
    if tuple(map(int, version.split("."))) >= (2, 34):
        library = "libc_malloc_debug.so.0"
        ctypes.CDLL(library)  # raises where it is missing; the loader would only print a line
        before = os.environ.get("LD_PRELOAD")
        checks["LD_PRELOAD"] = library if before is None else f"{library}:{before}"
    return checks

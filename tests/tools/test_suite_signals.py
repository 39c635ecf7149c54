"""The suite does not depend on how it is started."""

import subprocess
import sys
from pathlib import Path

LOOK = (
    "import signal; print(*(signal.getsignal(one) is signal.SIG_IGN for one in (signal.SIGINT, "
    "signal.SIGHUP)))"
)


def test_what_a_test_starts_hears_signals_that_nohup_and_a_background_job_ignore(
    repository: Path,
) -> None:
    """And pytest itself stays deaf to them."""
    code = (
        "import os, signal, subprocess, sys, tests.conftest\n"
        "for number in (signal.SIGINT, signal.SIGHUP): os.kill(os.getpid(), number)\n"
        f"subprocess.run([sys.executable, '-c', {LOOK!r}])"
    )
    words = ["bash", "-c", "trap '' INT HUP; exec \"$@\"", "_", sys.executable, "-c", code]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr

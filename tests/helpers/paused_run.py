"""A run that stands still in the middle until a test lets it go on: whatever is done to it then, it
cannot have ended.

Tiny steps are over in milliseconds, and a test that looks for a step and then kills comes too late
on a fast machine, or where it gets no processor for a moment. Nothing in the code that users run
knows of this: the environment names a folder with a `sitecustomize.py`, which hears of every folder
that a rank makes and halts rank 0 at one checkpoint's.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.process import wait_until

SITE = """
import os, signal, sys, time
FOLDER = {folder!r}
def hold(event, arguments):
    is_partial = event == "os.mkdir" and str(arguments[0]).endswith({partial!r})
    if is_partial and not os.path.exists(FOLDER + "/go"):
        with open(FOLDER + "/reached", "w"):
            pass
        while not os.path.exists(FOLDER + "/go"):
            time.sleep(0.02)
if "RANK" in os.environ:
    if os.environ["RANK"] == "0":
        sys.addaudithook(hold)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    heard = os.open(FOLDER + "/heard-" + os.environ["RANK"], flags)
    # The number of each signal that a handler of Python is called for, as one byte.
    signal.set_wakeup_fd(heard)
"""


@dataclass(frozen=True)
class Standstill:
    """A run that was started with this `python_path` first on its PYTHONPATH halts as it saves a
    step, on rank 0.
    """

    python_path: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, for a run that is to stand still."""
        return os.environ | {
            "PYTHONPATH": f"{self.python_path}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}"
        }

    @property
    def words(self) -> list[str]:
        """The same, to be put before a command."""
        return ["env", f"PYTHONPATH={self.environment['PYTHONPATH']}"]

    @property
    def reached(self) -> bool:
        """Whether the run stands still."""
        return (self.python_path / "reached").exists()

    def wait(
        self,
        *processes: subprocess.Popen[str] | subprocess.Popen[bytes],
        patience_seconds: float = 300,
    ) -> None:
        """Until the run stands still. Fails when one of its processes has ended before."""

        def reached() -> bool:
            assert all(process.poll() is None for process in processes), (
                "the run ended before it stood still"
            )
            return self.reached

        wait_until(
            reached,
            "the run did not come to where it is to stand still",
            patience_seconds=patience_seconds,
        )

    def heard(self, number: int, rank: int = 0) -> bool:
        """Whether a rank has heard a signal: its handler is called before the next step."""
        return number in (self.python_path / f"heard-{rank}").read_bytes()

    def go_on(self) -> None:
        """Let it."""
        (self.python_path / "go").touch()


def pause_run(python_path: Path, step: int) -> Standstill:
    """A run that will stand still as it begins to save this step."""
    python_path.mkdir()
    text = SITE.format(folder=str(python_path), partial=f"step-{step:08d}.partial")
    (python_path / "sitecustomize.py").write_text(text)
    return Standstill(python_path)

"""A run that stands still in the middle until a test lets it go on: whatever is done to it then, it cannot have ended.

Tiny steps are over in milliseconds, and a test that looks for a step and then kills comes too late on a fast machine,
or where it gets no processor for a moment. Nothing in the code that users run knows of this: the environment names a
folder with a `sitecustomize.py`, which hears of every folder that a rank makes and halts it at one checkpoint's.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.process import wait_until

SITE = """
import os, signal, sys, time
FOLDER = {folder!r}
def hold(event, arguments):
    if event == "os.mkdir" and str(arguments[0]).endswith({partial!r}) and not os.path.exists(FOLDER + "/go"):
        with open(FOLDER + "/reached", "w"):
            pass
        while not os.path.exists(FOLDER + "/go"):
            time.sleep(0.02)
if os.environ.get("RANK") == "0":
    sys.addaudithook(hold)
    heard = os.open(FOLDER + "/heard", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK)
    signal.set_wakeup_fd(heard)  # the number of each signal that a handler of Python is called for, as one byte
"""


@dataclass(frozen=True)
class Standstill:
    """A run that was started with this `python_path` first on its PYTHONPATH halts as it saves a step, on rank 0."""

    python_path: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, for a run that is to stand still."""
        later = os.environ.get("PYTHONPATH")
        return os.environ | {"PYTHONPATH": os.pathsep.join([str(self.python_path), *([later] if later else [])])}

    def wait(self, *processes: subprocess.Popen[str] | subprocess.Popen[bytes], patience_seconds: float = 300) -> None:
        """Until the run stands still. Fails when one of its processes has ended before."""

        def reached() -> bool:
            assert all(process.poll() is None for process in processes), "the run ended before it stood still"
            return (self.python_path / "reached").exists()

        wait_until(reached, "the run did not come to where it is to stand still", patience_seconds=patience_seconds)

    def wait_for_signal(self, number: int, patience_seconds: float = 300) -> None:
        """Until rank 0 has heard a signal, which its handler then knows of before the next step."""
        heard = self.python_path / "heard"
        wait_until(
            lambda: number in heard.read_bytes(), f"signal {number} did not come", patience_seconds=patience_seconds
        )

    def go_on(self) -> None:
        """Let it."""
        (self.python_path / "go").touch()


def standstill(python_path: Path, step: int) -> Standstill:
    """A run that will stand still as it begins to save this step."""
    python_path.mkdir()
    text = SITE.format(folder=str(python_path), partial=f"step-{step:08d}.partial")
    (python_path / "sitecustomize.py").write_text(text)
    return Standstill(python_path)

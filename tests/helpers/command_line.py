"""The llmsys command as a process, and the result that its run wrote."""

import subprocess
import sys
from pathlib import Path

from llmsys.events import read_latest_events
from tests.helpers.paths import ROOT


def run_llmsys(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `llmsys` with the given arguments; fail on a nonzero status unless `check` is false."""
    command = [sys.executable, "-m", "llmsys.launch.main", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def read_final_loss(config: Path) -> float:
    """Return the loss of the last evaluation in the run folder next to a config."""
    events = read_latest_events(config.parent / "run" / "events.jsonl")
    return [event["loss"] for event in events if event["event"] == "evaluation"][-1]

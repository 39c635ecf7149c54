"""Losses of the steps of a run."""

from pathlib import Path

from llmsys.events import read_latest_events


def list_step_losses(folder: Path) -> list[float]:
    """Return the loss of each logged step of the run in a folder, in nats."""
    events = read_latest_events(folder / "events.jsonl")
    return [event["loss"] for event in events if event["event"] == "step"]

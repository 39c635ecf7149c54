"""Write and read events.jsonl, the append-only event file of a run.

Reads/Writes: events.jsonl.

Invariants:
- The first line is an event `format` with the version of the format; readers do not return it.
- One event is one line and one write: a killed process can damage the last line only.
- Readers skip damaged lines.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmsys.errors import DataError
from llmsys.log import get_logger, redact_secrets
from llmsys.storage.stored_formats import EVENTS, VERSION_KEY, require_version

Event = dict[str, Any]
FORMAT = "format"  # kind of the first event
# More than the first line has.
FIRST_BYTES = 4096


class EventWriter:
    """A writer that appends events to a file, one JSON object per line: {"time": unix seconds,
    "event": kind, …}.

    Several processes may append to one file. Numbers that are not finite are written as null,
    because JSON has no nan.
    """

    def __init__(self, path: Path | str) -> None:
        """Open the file, or create it with its folder. A half-written last line is closed off.

        Args:
            path: File of events. Others may append to it at the same time.

        Raises:
            FormatError: The file has another format version.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # O_APPEND: every write goes to the end, also where several processes write
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        if not size:
            self.write(FORMAT, **{VERSION_KEY: EVENTS.version})
            return
        try:
            _check_version(
                os.pread(self._descriptor, FIRST_BYTES, 0).partition(b"\n")[0], self.path
            )
        except DataError:
            self.close()
            raise
        # the next event must not join a line that a killed writer left without its end
        if os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time of now, in seconds with 3 decimals.

        Args:
            event: name of the event.
            fields: its other fields; numbers that are not finite become null, secrets are redacted.

        Raises:
            OSError: the disk is full; a part of the line may have been written.
        """
        record = {"time": round(time.time(), 3), "event": event, **fields}
        text = json.dumps(
            _to_json_value(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        # text of pages and models may hold lone surrogates, which UTF-8 has not
        line = text.encode("utf-8", errors="replace") + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            # os.write does not know its file
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        # a disk that is almost full takes part of a write without an error
        if written != len(line):
            raise OSError(errno.ENOSPC, "partially written event", str(self.path))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def _to_json_value(value: Any) -> Any:
    """Return `value` as strict JSON: nan and inf become null, paths become text, arrays become
    plain numbers.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return redact_secrets(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, dict):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    if isinstance(value, Path):
        return redact_secrets(str(value))
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _to_json_value(value.tolist())
    raise TypeError(f"an event takes only JSON values, not {type(value).__name__}: {value!r}")


def _check_version(line: bytes, path: Path) -> None:
    """Raise FormatError unless the first line of a file has the version of this release. A
    damaged line passes.
    """
    first = _parse_event(line)
    if first is not None:
        require_version(EVENTS, first, path)


def iter_events(path: Path | str) -> Iterator[Event]:
    """Yield the events of a file in the order written, without holding them all in memory.

    Args:
        path: The event file.

    Yields:
        Events. A broken last line is skipped silently, because a killed writer leaves one.
        Broken lines before it are skipped, counted and logged as a warning.

    Raises:
        DataError: The file does not exist.
        FormatError: It has another format version.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: the event file does not exist. `llmsys train CONFIG` writes it to the run "
            "folder."
        )
    broken = 0
    last_was_broken = False
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if not number:
                _check_version(line, path)
            if not line.strip():
                continue
            event = _parse_event(line)
            last_was_broken = event is None
            broken += last_was_broken
            # Two writers that create a file at the same time write two of them.
            if event is not None and event["event"] != FORMAT:
                yield event
    # The last line may be one that is being written.
    broken -= last_was_broken
    if broken:
        get_logger(__name__).warning(
            "%s: skipped %d invalid line(s) before the end: a writer was killed or the file was "
            "edited. All other lines were read.",
            path,
            broken,
        )


def _parse_event(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def read_events(path: Path | str) -> list[Event]:
    """Return all events of a file in the order written. Broken lines are skipped as in
    `iter_events`.
    """
    return list(iter_events(path))


def require_events(run_folder: Path) -> Path:
    """Return the event file of a run.

    Args:
        run_folder: Folder of the run.

    Returns:
        Its path.

    Raises:
        DataError: The folder has none.
    """
    path = run_folder / "events.jsonl"
    if not path.exists():
        raise DataError(
            f"{run_folder} has no events.jsonl, so no run was trained there. Run llmsys train "
            "first."
        )
    return path


def read_latest_events(path: Path | str) -> list[Event]:
    """Return the last event for each (event, step): after a crash, steps are logged again.

    A `start` event that resumed from step s (null: from nothing) removes every earlier event of a
    later step, because that part of the trajectory was lost.

    Args:
        path: The event file.

    Returns:
        Events in the order last written. Events without a step are all returned.

    Raises:
        DataError: The file does not exist.
    """
    kept: dict[tuple[str, object], Event] = {}
    for number, event in enumerate(iter_events(path)):
        if event["event"] == "start":
            resumed_from = event.get("resumed_from") or 0
            kept = {
                key: old
                for key, old in kept.items()
                if "step" not in old or old["step"] <= resumed_from
            }
        key = (event["event"], event.get("step", f"record {number}"))
        # To the end: a dictionary keeps the place of a key that is replaced.
        kept.pop(key, None)
        kept[key] = event
    return list(kept.values())

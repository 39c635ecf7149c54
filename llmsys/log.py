"""What a run says to people while it works: log lines. `get_logger` for modules, `configure_logging` for entry points.

Reads RANK and WORLD_SIZE from the environment, never torch.
"""

import logging
import os
import sys
from typing import TextIO

from llmsys.redact import redact_secrets


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; call it as `logger(__name__)`. Lines appear once `configure_logging` has run."""
    return logging.getLogger(name)


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all log lines to `stream` (standard error); with several ranks each line names its own.

    Other ranks say only warnings. Called once by each entry point; a second call replaces the first.
    """
    rank, world_size = _read_rank_and_world_size()
    handler = _LineHandler(stream)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if world_size > 1 else "%(message)s"))
    root = logging.getLogger()
    for previous in [one for one in root.handlers if isinstance(one, _LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own_level = level if rank == 0 else max(level, logging.WARNING)
    for room in ("llmsys", "data_pipeline", "launch"):
        logging.getLogger(room).setLevel(own_level)


def _read_rank_and_world_size() -> tuple[int, int]:
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


class _LineHandler(logging.Handler):
    """Writes one line, and lifts a progress bar out of the way while it does."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._stream or sys.stderr
        try:
            line = redact_secrets(self.format(record))
            if record.levelno >= logging.WARNING:
                line = f"{record.levelname.lower()}: {line}"
            bar_library = sys.modules.get("tqdm")  # imported only where a bar was drawn
            if bar_library is not None:
                bar_library.tqdm.write(line, file=stream)
            else:
                stream.write(line + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)

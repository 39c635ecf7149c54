"""Configure and get the loggers of a run.

Reads: RANK and WORLD_SIZE from the environment, never torch.
"""

import logging
import os
import sys
from typing import TextIO

from llmsys.redact import redact_secrets


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module.

    Args:
        name: `__name__` of the module.

    Returns:
        The logger. It prints nothing before `configure_logging` was called.
    """
    return logging.getLogger(name)


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all log lines to one stream. Each entry point calls it once.

    With several ranks, each line names its rank. A second call replaces the first.

    Args:
        level: The level of rank 0. Other ranks log warnings and errors only.
        stream: The output. None means standard error.
    """
    rank, world_size = _read_rank_and_world_size()
    handler = _LineHandler(stream)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if world_size > 1 else "%(message)s"))
    root = logging.getLogger()
    for previous in [handler for handler in root.handlers if isinstance(handler, _LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own_level = level if rank == 0 else max(level, logging.WARNING)
    for package in ("llmsys", "data_pipeline", "launch"):
        logging.getLogger(package).setLevel(own_level)


def _read_rank_and_world_size() -> tuple[int, int]:
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


class _LineHandler(logging.Handler):
    """A handler that writes one line and clears a progress bar first."""

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

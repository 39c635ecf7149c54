"""Places where the host waits for the device: a value that is read, a blocking copy, a
synchronization.

Invariants:
- A wait is named by the line of llmsys that causes it, or by the line of torch where none of llmsys
  is on the stack, and by the innermost module whose forward runs.
- Waits are counted while `is_recording`, which is one steady step.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parents[1]) + "/"
OWN_FOLDER = str(Path(__file__).parent) + "/"
TORCH_SITES = (
    "/torch/distributed/fsdp/",
    "/torch/optim/",
    "/torch/nn/utils/",
    "/torch/nn/parallel/",
)


@dataclass(frozen=True)
class HostWait:
    """One kind of wait at one line.

    Attributes:
        cause: the operation that waits.
        line: file and line number, such as `llmsys/engine/engine.py:115`.
        count: waits in the recorded part.
        module: name of the module that runs, with `*` for the layer; empty outside of modules.
    """

    cause: str
    line: str
    count: int
    module: str


@dataclass
class HostWaitLog:
    """A counter of waits by cause and line."""

    is_recording: bool = False
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    modules: list[str] = field(default_factory=list)
    """Names of the modules that run, innermost last."""

    def record(self, cause: str) -> None:
        """Count one wait at the line of llmsys that is being executed."""
        if self.is_recording:
            module = self.modules[-1] if self.modules else ""
            self.counts[cause, find_calling_line(), module] += 1

    def list_waits(self) -> list[HostWait]:
        """Return the waits, most frequent first."""
        return [
            HostWait(cause, line, count, module)
            for (cause, line, module), count in self.counts.most_common()
        ]


def find_calling_line() -> str:
    """Return file and line of the innermost frame in llmsys outside of the dry run, else of a
    known part of torch.
    """
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.startswith(OWN_FOLDER):
            return f"llmsys/{name.removeprefix(PACKAGE)}:{frame.f_lineno}"
        if not fallback and any(site in name for site in TORCH_SITES):
            fallback = f"torch/{name.rpartition('/torch/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback or "autograd"  # C++ runs the backward of what llmsys called

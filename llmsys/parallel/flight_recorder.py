"""The flight recorder of collectives: torch keeps the last ones of every group, and a hang writes
them to a file.

Reads torch's ring buffer; writes one file per rank, which torch's `fr_trace` compares across ranks.
Importing this file does not import torch, because the variables must be set before torch is.

Invariants:
- A variable that the user has set is kept.
- A dump has every collective that torch still keeps, completed ones too.
"""

import shlex
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from llmsys.log import get_logger

log = get_logger(__name__)

FILE_PREFIX = "collectives-rank-"
# a step of Llama-3.1 405B on 2,048 ranks has about 1,800; torch keeps 2,000 by default
NUM_COLLECTIVES = 10_000
# Limit of a dump: torch's recorder takes a lock that a hanging thread may hold.
WRITE_SECONDS = 10.0

SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def set_flight_recorder_variables(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Turn the recorder on, and let NCCL's own watchdog write into the folder of ours.

    Args:
        folder: folder of the files, which `write_collective_trace` gets too.
        environment: variables to read and to fill.
    """
    if not any(name in environment for name in SIZE_VARIABLES):
        environment[SIZE_VARIABLES[0]] = str(NUM_COLLECTIVES)
    if not any(name in environment for name in FILE_VARIABLES):
        environment[FILE_VARIABLES[0]] = str(folder.absolute() / FILE_PREFIX)
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def start_collective_trace(folder: Path, rank: int) -> threading.Thread:
    """Start to write the last collectives of this rank: those of NCCL on an accelerator, else those
    of gloo.

    Args:
        folder: an existing folder.
        rank: number of this rank.

    Returns:
        The writing thread. Join it for `WRITE_SECONDS` at most.
    """
    # A daemon: a writer that waits for torch's lock must not keep the process from ending.
    writer = threading.Thread(
        target=_write_trace, args=(folder / f"{FILE_PREFIX}{rank}",), daemon=True
    )
    writer.start()
    return writer


def _write_trace(path: Path) -> None:
    import torch

    c10d: Any = torch._C._distributed_c10d  # its functions depend on the build
    try:
        # A torch with CUDA has two recorders, and that of NCCL is empty in a run on CPUs.
        dump = c10d._dump_nccl_trace if torch.cuda.is_available() else c10d._dump_fr_trace
        # torch names the lines of a stack by its compiler, whose import takes seconds that a hang
        # before the first step does not have.
        has_stacks = "torch._dynamo" in sys.modules
        # Collectives included, stacks if they are cheap, completed ones too.
        trace: bytes = dump(True, has_stacks, False)
        path.write_bytes(trace)
    except (OSError, RuntimeError) as error:
        log.debug("%s could not be written: %s", path, error)


def format_trace_command(folder: Path) -> str:
    """Return the command that compares the files of all ranks.

    Args:
        folder: folder of the files.

    Returns:
        A line for a shell.
    """
    tool = "python -m torch.distributed.flight_recorder.fr_trace"
    # A rank that was killed has left no file.
    return f"{tool} --allow-incomplete-ranks --prefix {FILE_PREFIX} {shlex.quote(str(folder))}"

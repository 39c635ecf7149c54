"""The code that makes tables of positions by positions: whether the config asks for it.

A table belongs to the innermost line that is neither torch's nor of the dry run. Those of a
backward pass have no such line besides the engine's: they follow from the tables of the forward.
"""

import sys
from pathlib import Path
from typing import Any

import torch

PACKAGE = str(Path(__file__).parents[1]) + "/"
OWN_FOLDER = str(Path(__file__).parent) + "/"
# They do with a tensor what their caller asks for.
PASSED = frozenset({f"{PACKAGE}model/dropout.py"})
BACKWARD_CALLS = (f"{PACKAGE}engine/", f"{PACKAGE}parallel/pipeline")
AUTOGRAD = "autograd"
KEPT_TABLE = "kept from an earlier step"


def find_table_maker() -> str:
    """Find the code that makes a tensor, on the stack of the caller.

    Returns:
        File and function, such as `model/relative_attention.py:_shift`; the file in full where it
        is none of llmsys; `AUTOGRAD` where only the backward pass asks for it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        frame = frame.f_back
        if "/torch/" in file or file.startswith(OWN_FOLDER) or file in PASSED:
            continue
        if torch._C._current_graph_task_id() != -1 and file.startswith(BACKWARD_CALLS):
            return AUTOGRAD
        return f"{file.removeprefix(PACKAGE)}:{code.co_name}"
    return AUTOGRAD

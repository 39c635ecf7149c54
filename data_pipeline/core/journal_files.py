"""Records of an earlier version: journal/STAGE/ITEM.json and journal/inputs.json.

Reads them into the journal and removes the files, so that an interrupted preparation continues.

Invariants:
    - A stage's files are removed after all its records are saved.
    - An unreadable record counts as none.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.core.task_record import TaskOutput


def import_record_files(
    stages: Iterable[Path],
    inputs: Path,
    save_record: Callable[..., Any],
    save_input_digest: Callable[..., None],
) -> None:
    """Save the records of the files in a journal, and remove the files.

    Args:
        stages: Folders with the records of a stage each.
        inputs: File of input digests; it may be missing.
        save_record: The method of the journal.
        save_input_digest: The method of the journal.
    """
    for stage in stages:
        for path in stage.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                content = json.loads(path.read_bytes())
                outputs = [TaskOutput(**output) for output in content["outputs"]]
                save_record(f"{stage.name}/{path.stem}", content["key"], outputs, content["result"])
        shutil.rmtree(stage)
    with suppress(OSError, ValueError):
        for name, stamp in dict(json.loads(inputs.read_bytes())).items():
            save_input_digest(name, stamp)
        inputs.unlink()

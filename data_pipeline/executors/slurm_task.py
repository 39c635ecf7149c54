"""Run the jobs of one Slurm array task.

    python -m llmsys.data_pipeline.executors.slurm_task FOLDER JOBS_PER_TASK NUMBER

Reads pickled jobs from FOLDER, which only the driver of the same dataset folder writes, and writes
their results there.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.executors.base import TaskDone, try_job
from llmsys.storage.atomic_write import write_bytes_atomically


def main(folder: Path, jobs: int, task: int) -> int:
    """Run the jobs of one task of a Slurm array.

    Args:
        folder: The folder of the array, which all nodes see.
        jobs: Jobs of a task.
        task: Number of this task.

    Returns:
        0 when every result was written, of jobs that failed too.
    """
    for number in range(task * jobs, (task + 1) * jobs):
        if (folder / f"{number}.job").exists():  # the last task has fewer
            _run_job(folder, number)
    return 0


def _run_job(folder: Path, number: int) -> None:
    job = pickle.loads((folder / f"{number}.job").read_bytes())
    reports: list[tuple[float, int]] = []
    # Progress is summed: the driver polls files and sees a job only when it ends.
    outcome = try_job(number, job, lambda amount, dropped: reports.append((amount, dropped)))
    result: dict[str, Any] = {
        "amount": sum(amount for amount, _ in reports),
        "dropped": sum(dropped for _, dropped in reports),
    }
    if isinstance(outcome, TaskDone):
        result["result"] = outcome.result
    else:
        result |= {
            "message": outcome.message,
            "traceback": outcome.traceback,
            "cause": outcome.cause,
        }
    write_bytes_atomically(folder / f"{number}.result", json.dumps(result).encode())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

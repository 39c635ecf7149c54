"""sbatch, squeue and scancel for tests without Slurm: an array is one process that runs its tasks
one after the other.

python -m tests.helpers.fake_slurm COMMAND ARGUMENTS…     (the state lies in the folder $FAKE_SLURM)
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.helpers.paths import ROOT

COMMANDS = ("sbatch", "squeue", "scancel")


def install(folder: Path) -> dict[str, str]:
    """Write the three commands into a folder and return the environment that finds them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "state").mkdir()
    for command in COMMANDS:
        script = folder / "bin" / command
        words = shlex.join([sys.executable, "-m", "tests.helpers.fake_slurm", command])
        script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {words} "$@"\n')
        script.chmod(0o755)
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SLURM": str(folder / "state"),
    }


def main(command: str, words: list[str]) -> int:
    state = Path(os.environ["FAKE_SLURM"])
    options = dict(
        word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word
    )
    if command == "sbatch":
        return submit(state, options, words[-1])
    if command == "serve":
        return serve(state, options, words[-1])
    for path in sorted(state.glob("*.array")):
        array, _, name = path.name.partition("-")[0], "", path.read_text().split("\n")[1]
        if options.get("name") != name and options.get("jobs") != array:
            continue
        if command == "scancel":
            with suppress(ProcessLookupError):  # it has ended, and left its note
                os.killpg(int(path.read_text().split("\n")[0]), signal.SIGKILL)
            path.unlink(missing_ok=True)
        elif "%K" in options["format"]:
            print("\n".join(f"{array} {task}" for task in path.read_text().split("\n")[2].split()))
        else:
            print(array)
    return 0


def submit(state: Path, options: dict[str, str], script: str) -> int:
    """Start the array in a separate process, as sbatch does."""
    last = int(options["array"].partition("%")[0].split("-")[1])
    array = str(100 + len(list(state.iterdir())))
    (state / f"{array}.seen").touch()
    words = [
        f"--last={last}",
        f"--array={array}",
        f"--name={options['job-name']}",
        f"--output={options['output']}",
    ]
    command = [sys.executable, "-m", "tests.helpers.fake_slurm", "serve", *words, script]
    with open(state / f"{array}.log", "w") as log:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=log, stderr=log, cwd=options["chdir"]
        )
    note = state / f"{array}-.array"
    tasks = " ".join(map(str, range(last + 1)))
    note.with_suffix(".new").write_text(f"{process.pid}\n{options['job-name']}\n{tasks}\n")
    note.with_suffix(".new").rename(note)
    print(array)
    return 0


def serve(state: Path, options: dict[str, str], script: str) -> int:
    note = state / f"{options['array']}-.array"
    while not note.exists():
        time.sleep(0.01)
    for task in range(int(options["last"]) + 1):
        with open(options["output"].replace("%a", str(task)), "w") as log:
            environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(task)}
            subprocess.run(["sh", script], stdout=log, stderr=log, env=environment)
        left = " ".join(map(str, range(task + 1, int(options["last"]) + 1)))
        note.with_suffix(".new").write_text(f"{os.getpid()}\n{options['name']}\n{left}\n")
        note.with_suffix(".new").rename(note)
    note.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

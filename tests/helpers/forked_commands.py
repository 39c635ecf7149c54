"""The llmsys command in a process that has imported torch before it begins, for tests whose claim
is what a command does and not how its process starts: an import of torch and the engines costs more
than most commands do.

The ranks of `llmsys train` are forked too, without a launcher. The launchers, the signals that they
forward and the death of a rank have tests that start real processes
(tests/llmsys/train/test_run.py, tests/launch).
"""

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.process import PATIENCE_SECONDS
from tests.helpers.ranks import PRELOADED

RANKS = re.compile(r"--(?:nproc-per-node=|num_processes |num_accelerators )(\d+)")


def run_forked(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `llmsys` with the given arguments; fail on a nonzero status unless `check` is false."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    given = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = context.Process(target=_run_command, args=(given, dict(os.environ), folder))
        process.start()
        process.join(PATIENCE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        out, err = ((folder / name).read_text() for name in ("out", "err"))
    assert process.exitcode is not None
    assert not check or process.exitcode == 0, err[-3000:]
    return subprocess.CompletedProcess(given, process.exitcode, out, err)


def _run_command(words: list[str], environment: dict[str, str], folder: Path) -> None:
    for number, name in ((1, "out"), (2, "err")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()  # the server's is that of its first use
    os.environ |= environment
    os.chdir(ROOT)
    from llmsys.launch.launchers import local
    from llmsys.launch.main import main

    local._run_launcher = _fork_ranks
    sys.exit(main(words))


def _fork_ranks(command: Sequence[str], environment: dict[str, str]) -> int:
    """Fork the ranks that a launcher would start, and return the first status that is not 0."""
    from llmsys.launch.launchers.local import HOST, SCRIPT
    from llmsys.parallel.port import find_free_port

    found = RANKS.search(" ".join(command))
    ranks = int(found[1]) if found else 1
    words = list(command[command.index(str(SCRIPT)) + 1 :])
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(find_free_port())} if ranks > 1 else {}
    sys.stdout.flush()
    children = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        named = {name: str(value) for name, value in place.items()} if ranks > 1 else {}
        if not (child := os.fork()):
            _train_rank(words, environment | meeting | named)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next(filter(None, statuses), 0)


def _train_rank(words: list[str], environment: dict[str, str]) -> None:
    status = 1
    try:
        os.environ.clear()
        os.environ |= environment
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        from llmsys.launch.train import main

        status = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)

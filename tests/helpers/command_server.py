"""The command line in a process of its own that cannot import torch nor start ranks: what it
answers, it answers early.

Reads a JSON list of words a line from stdin, and writes status, stdout and stderr as JSON.
"""

import contextlib
import io
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn


class LateAnswerError(BaseException):
    """A command that went on to torch or to ranks. No code of the program catches it."""


class Answer(NamedTuple):
    """What a command printed; its status is -1 where it was late and -2 where it crashed."""

    status: int
    out: str
    err: str


class NoTorch(MetaPathFinder, Loader):
    """Refuses to import torch; that it is installed may be asked."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torch":
            return ModuleSpec(name, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise LateAnswerError("torch is imported")


class CommandServer:
    """The parent's side of the process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.command_server"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def run(self, folder: str, words: Sequence[str]) -> Answer:
        """Run one command in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([folder, *words]) + "\n")
        self._process.stdin.flush()
        return Answer(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextlib.contextmanager
def start_server() -> Iterator[CommandServer]:
    """Run a server until the block ends."""
    server = CommandServer()
    try:
        yield server
    finally:
        server.close()


def refuse_ranks(*_: Any) -> NoReturn:
    raise LateAnswerError("ranks are started")


def run_command(words: Sequence[str]) -> Answer:
    """Run `llmsys` in this process."""
    from llmsys.launch.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.stdin = io.StringIO()
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except LateAnswerError as late:
            err.write(f"{late}\n")
            status = -1
        except BaseException:
            traceback.print_exc()
            status = -2
    return Answer(status, out.getvalue(), err.getvalue())


def serve() -> None:
    """Answer until stdin ends."""
    import logging
    import os

    sys.meta_path.insert(0, NoTorch())
    answers, questions = sys.stdout, sys.stdin
    from llmsys.launch.launchers import local

    local._run_launcher = refuse_ranks  # type: ignore[assignment]
    for line in questions:
        folder, *words = json.loads(line)
        os.chdir(folder)
        logging.getLogger("llmsys").handlers.clear()  # or it keeps the stderr of the command before
        print(json.dumps(run_command(words)), file=answers, flush=True)


if __name__ == "__main__":
    serve()

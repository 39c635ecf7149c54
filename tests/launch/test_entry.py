"""Signals of the program `llmsys`, from its first import to its verb, each in a process of its
own.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# `interrupt` is called in place of the verb, before or after its start.
PROGRAM = """
import os, signal, sys, time
import llmsys.launch.entry, llmsys.launch.main

class Dropping:
    def __del__(self):
        raise KeyboardInterrupt

def run_command(name, words, before_verb):
    {body}
    time.sleep(60)

llmsys.launch.main._run_command = run_command
sys.argv = ["llmsys", {verb!r}, "a b.yaml"]
sys.exit(llmsys.launch.entry.main())
"""
# A library that turns exceptions of its imports into its own.
WRAPPED = "try: os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: raise ImportError"
AGAIN = "llmsys: interrupted. Start it again with: llmsys show 'a b.yaml'\n"
CONTINUES = "What is done is kept; the same command continues: llmsys prepare 'a b.yaml'\n"


@pytest.mark.parametrize(
    ("verb", "body", "status", "printed"),
    [
        ("show", WRAPPED, 130, AGAIN),
        ("show", "before_verb(name); os.kill(os.getpid(), signal.SIGINT)", 130, AGAIN),
        (
            "prepare",
            "before_verb(name); os.kill(os.getpid(), signal.SIGINT)",
            130,
            f"llmsys: interrupted. {CONTINUES}",
        ),
        (
            "prepare",
            "before_verb(name); os.kill(os.getpid(), signal.SIGTERM)",
            75,
            f"llmsys: stopped. {CONTINUES}",
        ),
        ("show", "before_verb(name); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("show", "before_verb(name); Dropping()", 130, AGAIN),
        (
            "show",
            f"before_verb(name)\n    {WRAPPED}",
            130,
            AGAIN,
        ),
    ],
    ids=[
        *(
            "ctrl-c while importing",
            "ctrl-c",
            "ctrl-c in prepare",
            "sigterm in prepare",
            "sigterm",
            "dropped ctrl-c",
        ),
        "ctrl-c in an import of a verb",
    ],
)
def test_a_signal_ends_a_verb_with_the_way_to_continue(
    verb: str, body: str, status: int, printed: str, repository: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(verb=verb, body=body)],
        env=os.environ | {"PYTHONPATH": str(repository)}, capture_output=True, text=True,
        timeout=50,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (status, printed)


def test_an_ignored_interrupt_stays_ignored(repository: Path) -> None:
    """`nohup llmsys … &` of a shell without job control."""
    body = "before_verb(name); os.kill(os.getpid(), signal.SIGINT); os._exit(7)"
    ended = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c",
            PROGRAM.format(verb="show", body=body)],
        env=os.environ | {"PYTHONPATH": str(repository)}, timeout=50,
    )  # fmt: skip
    assert ended.returncode == 7


@pytest.mark.parametrize("has_torch", [False, True])
def test_the_end_of_the_process_looks_for_no_cycles_unless_torch_may_need_it(
    has_torch: bool,
) -> None:
    program = (
        "import gc, sys, llmsys.launch.entry\n"
        "sys.argv = ['llmsys', '--version']\n"
        f"if {has_torch}: sys.modules['torch'] = sys\n"
        "llmsys.launch.entry.main()\n"
        "print(gc.get_freeze_count() > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == str(not has_torch)

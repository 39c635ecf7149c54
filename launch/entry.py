"""The program `llmsys`: signals from its first import to its verb, which may handle them otherwise.

- Until the verb runs, Ctrl-C ends the process at once. There is nothing to undo, and imports and
  argparse answer an exception inside them with their own errors.
- An interrupt that Python dropped, because it was raised in a callback, is repeated. One that a
  library turned into an error of its own, as imports of compiled modules do, ends the process like
  any other.
- SIGTERM ends a preparation as Ctrl-C does: workers are killed, and the way to continue is printed.
"""

import gc
import os
import shlex
import signal
import sys
from types import FrameType

REPEAT_SECONDS = 0.1

# Signals that were raised as exceptions while the verb ran.
received: list[int] = []


def main() -> int:
    """Run the command line of this process and return the exit status."""
    sys.unraisablehook = repeat_interrupt
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored under nohup
        signal.signal(signal.SIGINT, exit_at_once)
    from llmsys.launch.main import main as run_command_line
    from llmsys.log import allow_every_character

    allow_every_character()
    try:
        status = run_command_line(before_verb=raise_on_signals)
    except Exception:
        if not received:
            raise
        os.write(2, format_interrupt())
        return 130
    leave_objects_to_exit()
    return status


def leave_objects_to_exit() -> None:
    """Let the interpreter end without a last search for cycles, which takes a fifth of the time in
    which an unchanged dataset is known. The memory goes with the process.
    """
    # Objects of torch, such as process groups, may have to be closed by that search.
    if "torch" not in sys.modules:
        gc.freeze()


def format_interrupt() -> bytes:
    """Return a line with the command that starts again."""
    command = shlex.join(["llmsys", *sys.argv[1:]])
    return f"llmsys: interrupted. Start it again with: {command}\n".encode(errors="replace")


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process; os.write because the signal may have interrupted a print."""
    os.write(2, format_interrupt())
    os._exit(130)


def raise_on_signals(verb: str) -> None:
    """Raise KeyboardInterrupt at Ctrl-C, and at SIGTERM in verbs that resume and do not handle
    it themselves.
    """
    if signal.getsignal(signal.SIGINT) is exit_at_once:
        signal.signal(signal.SIGINT, raise_interrupt)
    if verb in ("prepare", "tokenizer") and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, raise_interrupt)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise a KeyboardInterrupt that has the signal."""
    received.append(number)
    raise KeyboardInterrupt(number)


def repeat_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt the main thread again after a moment, when this hook has returned; print
    anything else.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    main_thread = threading.main_thread().ident
    assert main_thread is not None
    timer = threading.Timer(REPEAT_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.daemon = True
    timer.start()

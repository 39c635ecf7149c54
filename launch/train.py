"""Train on one rank: `launch/train.py CONFIG [key=value …]`, started by a launcher such as torchrun
or srun.

Reads the config and the launcher's environment variables; prints one message for an error that the
user can fix.

Exit status: 0 finished, 1 a bug (with its traceback), 2 an error that the user can fix, 3 a lost
peer, 4 a hung peer, 5 a launcher whose hosts did not meet, 75 (EX_TEMPFAIL) stopped on request
after a save: start it again, 130 Ctrl-C before the first step. `llmsys train` and `llmsys launch`
end with the same statuses.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Started as a file, as launchers do: imports begin at the folder of llmsys/, not at launch/.
    _parent = Path(__file__).resolve().parent.parent
    # launch/ is a folder of the installed package, and stands next to llmsys/ in a checkout.
    sys.path[0] = str(_parent.parent if (_parent / "__init__.py").exists() else _parent)

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError, StopRequested, to_data_error
from llmsys.launch.process.parent_watch import die_with_parent
from llmsys.launch.process.rank_environment import (
    adopt_launcher,
    choose_interface,
    set_device_variables,
    strip_local_rank,
)
from llmsys.launch.process.run_requirements import require_layout
from llmsys.launch.process.standby import is_standby, wait_as_rank
from llmsys.log import allow_every_character, configure_logging, get_logger
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.train.stop_request import HANGUP, HANGUP_SAVES

CRASHED, MENDABLE, LOST_PEER, HUNG, UNMET, STOPPED, INTERRUPTED = 1, 2, 3, 4, 5, 75, 130
# gloo and NCCL raise plain RuntimeErrors, which only their text tells apart
LOST_PEER_WORDS = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused",
    "Connection was likely closed",
    "Broken pipe", "Timed out waiting", "Gloo", "gloo", "NCCL communicator was aborted",
    "ncclRemoteError",
)  # fmt: skip
# These errors of torch.distributed always mean a lost peer; others are recognized by
# LOST_PEER_WORDS.
LOST_PEER_ERRORS = ("DistNetworkError", "DistStoreError")
TRACE_FOLDER = "heartbeats"  # that of llmsys/train/watchdog.py, which imports torch
# set where the launcher prints the one message about a lost rank
LAUNCHER_REPORTS = "LLMSYS_LAUNCHER_REPORTS"
# a rank that lost its peer exits later than the peer, so that the launcher sees the cause
CAUSE_FIRST_SECONDS = 2.0
USAGE = "usage: launch/train.py CONFIG [section.key=value …]"

log = get_logger("llmsys.launch.train")  # not __name__, which is __main__ in a rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this rank and return the exit status."""
    die_with_parent()
    # ignored by the launcher; until the run handles it, it ends the rank
    if os.environ.get(HANGUP) == HANGUP_SAVES:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    started = time.time()
    # its warnings of a lost peer are pages of C++ frames
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = strip_local_rank(sys.argv[1:] if arguments is None else arguments)
    allow_every_character()
    configure_logging()
    if not words or words[0] in ("-h", "--help"):
        print(__doc__ if words else USAGE)
        return 0 if words else MENDABLE
    try:
        if is_standby():
            _wait_as_standby(words)
        adopt_launcher()
        choose_interface()
        config = load_run_config(words[0], words[1:])
        _check_layout(config)
        set_device_variables(config.run.folder / TRACE_FOLDER)
        from llmsys.generate.prompt_completion import complete_prompts
        from llmsys.train.build_trainer import train_run

        train_run(config, complete_prompts)
    except StopRequested as stopped:
        # Every rank has stopped: one message is enough.
        if _get_rank() == "0":
            print(f"llmsys: stopped: {stopped}", file=sys.stderr, flush=True)
        return STOPPED
    # before the run handles signals; who started the ranks prints how to continue
    except KeyboardInterrupt:
        return INTERRUPTED
    except LlmsysError as error:
        return _print_error(error)
    except OSError as error:
        if (problem := to_data_error(error)) is None:
            raise
        return _print_error(problem)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        # The first rank of a host reports; its launcher ends the others before they would.
        time.sleep(CAUSE_FIRST_SECONDS * (1 if os.environ.get("LOCAL_RANK", "0") == "0" else 3))
        from llmsys.train.watchdog import is_hang_named

        if is_hang_named(config.run.folder, started):
            return HUNG
        _report_lost_peer(str(error).partition("\n")[0].rstrip("."))
        return LOST_PEER
    return 0


def _wait_as_standby(words: Sequence[str]) -> None:
    """Import all that training needs, and wait until a restart has work for this process."""

    def import_everything() -> None:
        # before torch
        set_device_variables(load_run_config(words[0], words[1:]).run.folder / TRACE_FOLDER)
        import llmsys.generate.prompt_completion
        import llmsys.train.build_trainer  # noqa: F401

    seconds = wait_as_rank(import_everything)
    configure_logging()  # again: until now this process had no rank
    if _get_rank() == "0":
        log.info(
            "this restart began with processes that had imported torch: %.1f s of imports saved",
            seconds,
        )


def _report_lost_peer(reason: str) -> None:
    """Log that another rank is gone, or leave the message to the launcher, which may know the
    cause.
    """
    message = (
        f"rank {_get_rank()} lost contact with another rank: {reason}. Checkpoints are intact: "
        "the same command continues from the newest one."
    )
    if LAUNCHER_REPORTS in os.environ and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # what torch's ProcessFailure reads
        report = {"message": message, "timestamp": int(time.time())}
        write_bytes_atomically(Path(file), json.dumps(report).encode())
    else:
        log.error("%s", message)


def _check_layout(config: RunConfig) -> None:
    """Reject a layout before torch is imported. Every rank finds the same error, so rank 0 alone
    prints it.
    """
    try:
        require_layout(config, int(os.environ.get("WORLD_SIZE") or 1))
    except LlmsysError:
        if _get_rank() == "0":
            raise
        time.sleep(CAUSE_FIRST_SECONDS)
        raise SystemExit(MENDABLE) from None


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether an error of a collective or of the store means that another rank is gone."""
    if type(error).__name__ in LOST_PEER_ERRORS:
        return True
    return any(word in str(error) for word in LOST_PEER_WORDS)


def _print_error(error: LlmsysError) -> int:
    """Print the message once: every rank met the same error. Rank 0 prints first, and the
    launcher ends the others.
    """
    if _get_rank() != "0":
        time.sleep(CAUSE_FIRST_SECONDS)
    print(f"llmsys: error: {error}", file=sys.stderr, flush=True)
    return MENDABLE


def _get_rank() -> str:
    return os.environ.get("RANK", "0")


if __name__ == "__main__":
    status = main()
    # os._exit flushes nothing
    sys.stdout.flush()
    sys.stderr.flush()
    # A library's clean-up at interpreter exit may wait for peers that are gone; everything of ours
    # is on disk by now.
    os._exit(status)

"""Run torchrun, and report a failed rank in one message instead of three tracebacks.

`python -m llmsys.launch.launchers.torchrun [torchrun's options] SCRIPT …` exits with the status of
the rank that failed first, after naming it. A rank that has printed its own message (status 1, 2, 4
or 75) is not reported again. Restarts are the job of launch/launchers/restart_agent.py:
--max-restarts is rejected, because torchrun would also restart ranks that were stopped on request.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

# read as torch is imported: a lost host is pages of C++ frames
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import parse_args, run

from llmsys.launch.launchers.restart_agent import Rendezvous
from llmsys.launch.process.parent_watch import die_with_parent
from llmsys.launch.process.signal_forwarding import forward_signals, get_signals_to_forward
from llmsys.launch.process.standby import StandbyRanks, is_standby, wait_for_turn
from llmsys.launch.train import CRASHED, HUNG, LAUNCHER_REPORTS, LOST_PEER, MENDABLE, STOPPED, UNMET
from llmsys.log import configure_logging, get_logger
from llmsys.parallel.rendezvous import bind_rendezvous

NO_RESTARTS = (
    "llmsys: error: --max-restarts={0} would restart ranks that were stopped on purpose. Leave it "
    "out, and put `python -m llmsys.launch.launchers.restart_agent --meet FIRST:PORT --restarts "
    "{0} --patience SECONDS` before this command."
)

# Signals at which torch ends the ranks at once. llmsys handles SIGTERM itself, to give ranks time
# to save.
SIGNALS_OF_TORCH = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

log = get_logger("llmsys.launch.launchers.torchrun")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks.

    Args:
        arguments: torchrun's arguments, by default those of the command line.

    Returns:
        0, or the exit status of the rank that failed first.
    """
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", get_signals_to_handle())
    options = parse_args(sys.argv[1:] if arguments is None else list(arguments))
    # torchrun would also restart ranks that were stopped on request
    if options.max_restarts:
        print(NO_RESTARTS.format(options.max_restarts), file=sys.stderr)
        return MENDABLE
    if is_standby():
        command = [sys.executable, "-u", options.training_script, *options.training_script_args]
        use_standby_ranks(StandbyRanks(command, int(options.nproc_per_node)))
        wait_for_turn()
    return run_elastic_agent(lambda: run(options), find_first_host(options))


def use_standby_ranks(standby: StandbyRanks) -> None:
    """Let torch's agent start ranks as processes that have imported torch, as long as there are
    some.

    Args:
        standby: The processes.
    """

    start_process = SubprocessHandler._popen

    def take_or_start(
        handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        # output that torch writes to files was set when the process began
        can_take = handler._stdout is None and handler._stderr is None
        taken = standby.take(args, env) if can_take else None
        return start_process(handler, args, env) if taken is None else taken

    handlers: Any = SubprocessHandler
    handlers._popen = take_or_start  # the method of torch that starts a worker


def find_first_host(options: argparse.Namespace) -> Rendezvous | None:
    """Return where the first host of the run holds the rendezvous; None where this is the first,
    or the only one.

    Args:
        options: torchrun's.
    """
    host, _, port = str(options.rdzv_endpoint).rpartition(":")
    if options.standalone or not host or not port.isdigit() or not int(port):
        return None
    first = Rendezvous(host.strip("[]"), int(port))
    # torch, too, asks the setting before the name
    is_here = _parse_rendezvous_config(options.rdzv_conf).get("is_host", first.is_local)
    return first if str(is_here).lower() in ("0", "false") else None


def run_elastic_agent(start: Callable[[], None], first: Rendezvous | None = None) -> int:
    """Run torch's elastic agent by `start`; return 0, or the status of the rank that failed
    first.

    Where the first host of the run, which may be another, is gone, that is the one message.
    """
    die_with_parent()
    configure_logging()
    # it logs a traceback for every failed rank, and one message is enough
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", get_signals_to_handle())
    bind_rendezvous(agents=True)
    # Ranks have a separate store: one that joins late reads old addresses in that of the
    # agents.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[LAUNCHER_REPORTS] = "1"
    try:
        with forward_signals():
            start()
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return _report_first_failure(failures, first)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        reason = _format_error(error)
        log.error("%s", _format_lost_host(first) or _format_unmet(reason))
        return UNMET
    return 0


def get_signals_to_handle() -> str:
    """Return the default of --signals-to-handle: without SIGHUP where it means save, and without
    ignored signals.

    torch would take a signal that `nohup`, or a shell's `&`, has ignored.
    """
    own = [one for one in SIGNALS_OF_TORCH if one not in get_signals_to_forward()]
    kept = [one for one in own if signal.getsignal(one) is not signal.SIG_IGN]
    return ",".join(one.name for one in kept or [signal.SIGQUIT])


def _format_error(error: Exception) -> str:
    """Return the first line of an error of the rendezvous, or its class where it has no text."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _format_unmet(reason: str) -> str:
    return (
        f"the agents of the hosts cannot reach each other ({reason}). Checkpoints are intact: see "
        "that every host runs and reaches the others; the same command continues from the newest "
        "one."
    )


def _format_lost_host(first: Rendezvous | None) -> str:
    """Return the message that the first host is gone; "" where it answers."""
    return "" if first is None or first.is_open() else first.format_loss()


def _report_first_failure(
    failures: list[tuple[int, ProcessFailure]], host: Rendezvous | None = None
) -> int:
    """Log the rank that failed first and return its status. A rank that lost its peer is not the
    cause.
    """
    # after the first failure torch ends the other ranks with SIGTERM
    causes = [item for item in failures if item[1].exitcode not in (LOST_PEER, -signal.SIGTERM)]
    rank, first = (causes or failures)[0]
    if first.exitcode == LOST_PEER:
        log.error("%s", _format_lost_host(host) or first.message)
    if first.exitcode in (CRASHED, MENDABLE, LOST_PEER, STOPPED, HUNG):
        return first.exitcode
    ending = (
        f"was killed by signal {-first.exitcode}"
        if first.exitcode < 0
        else f"ended with status {first.exitcode}"
    )
    log.error(
        "rank %s (process %s) %s. Checkpoints are intact: run the same command again to continue "
        "from the newest one.", rank, first.pid, ending,
    )  # fmt: skip
    return LOST_PEER if first.exitcode < 0 else first.exitcode


if __name__ == "__main__":
    sys.exit(main())

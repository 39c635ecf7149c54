"""torchrun with one message instead of three tracebacks when a rank ends badly.

`python -m launch.torchrun [torchrun's options] SCRIPT …` exits with the status of the rank that failed first, after
naming it. A rank that has printed its own message (status 2, 4 or 75) is not repeated. With --max-restarts lost ranks
are started again, on the nodes that are left; what was stopped, or a person must mend, is not (launch/restart.py).
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from launch.forward import forwarding
from launch.orphan import die_with_parent
from launch.restart import rest_when_final
from launch.train import HUNG, LOST_PEER, MENDABLE, STOPPED
from llmsys.log import configure_logging, logger

log = logger("launch.torchrun")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks; return 0, or the exit status that tells what became of the first that failed."""
    return outcome_of(lambda: run(parse_args(sys.argv[1:] if arguments is None else list(arguments))))


def outcome_of(start: Callable[[], None]) -> int:
    """What became of ranks that `start` runs by torch's elastic agent: 0, or the status of the first that failed."""
    die_with_parent()
    configure_logging()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGINT,SIGHUP,SIGQUIT")  # the default of --signals-to-handle
    # A store for each attempt: agents that have counted different numbers of restarts read each other's old addresses
    # in a shared one, and after a cut cable no rank finds another.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    rest_when_final()
    try:
        with forwarding():
            start()
    except ChildFailedError as error:
        return _report(sorted(error.failures.items(), key=lambda item: item[1].timestamp))
    except RendezvousError as error:
        log.error("the hosts did not meet again (%s). The same command goes on from the last checkpoint.", _told(error))
        return LOST_PEER
    return 0


def _told(error: RendezvousError) -> str:
    """What torch says of hosts that do not meet: of some kinds only the name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _report(failures: list[tuple[int, ProcessFailure]]) -> int:
    """A rank that lost its peer is a consequence; name the rank that was the cause, if one is there."""
    causes = [item for item in failures if item[1].exitcode not in (LOST_PEER, -signal.SIGTERM)]
    rank, first = (causes or failures)[0]
    if first.exitcode in (MENDABLE, STOPPED, HUNG):
        return first.exitcode
    ending = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else f"ended with status {first.exitcode}"
    log.error("rank %s (process %s) %s", rank, first.pid, ending)
    return LOST_PEER if first.exitcode < 0 else first.exitcode


if __name__ == "__main__":
    sys.exit(main())

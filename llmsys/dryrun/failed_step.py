"""Name what was wrong in a step that ended with an exception: a mistake often makes shapes that do
not fit before the step has sent everything.
"""

import traceback
from collections.abc import Iterator

from llmsys.dryrun.block_check import check_blocks, iter_run_differences
from llmsys.dryrun.collective_check import (
    compare_collectives,
    iter_missing_messages,
    iter_unexpected_messages,
)
from llmsys.dryrun.host_waits import OWN_FOLDER, PACKAGE
from llmsys.dryrun.operation_watch import GRADIENTS_COMPLETE
from llmsys.dryrun.rank_result import list_kernels
from llmsys.dryrun.rank_session import RankSession
from llmsys.dryrun.shard_check import find_wrong_shards

PASSES = "_add_gradients"
"""The method of the engine that runs forward and backward of all micro-batches."""
MAX_DIFFERENCES = 20
MAX_MESSAGE = 400
MAX_FRAMES = 12


def describe_failure(session: RankSession, error: Exception) -> str:
    """Describe a step that did not end.

    Args:
        session: The session, whose engine was built.
        error: What ended its step.

    Returns:
        The error with its place, what differs from the config until then, and the end of the
        traceback.
    """
    request = session.request
    differences = [*_iter_differences(session, error)]
    lines = [
        f"rank {request.rank} of {request.world_size} cannot run a step: "
        f"{type(error).__name__}: {str(error)[:MAX_MESSAGE]} at {_find_line(error)}, in "
        f"{session.recorder.phase.name}.",
        f"{len(differences)} differences from what config and layout ask for until then:",
        *(f"  {one}" for one in differences[:MAX_DIFFERENCES]),
        "Without one, a dry run may lack what an operation of the step needs. Report it then with "
        "this traceback:",
        *(line.rstrip() for line in traceback.format_tb(error.__traceback__)[-MAX_FRAMES:]),
    ]
    return "\n".join(lines)


def _iter_differences(session: RankSession, error: Exception) -> Iterator[str]:
    context = session.context
    recorder = session.recorder
    if session.is_compared:  # the step of the probe failed
        yield from compare_collectives(
            recorder.collectives, session.first_sizes, context
        ).differences
        kernels = list_kernels(session.config, session.profile, session.stage.layers)
        yield from check_blocks(recorder, context, kernels).differences
        return
    yield from find_wrong_shards(session.first_sizes, context)
    yield from iter_unexpected_messages(recorder.collectives, context)
    frames = traceback.extract_tb(error.__traceback__)
    # Blocks that come later in an interrupted pass are not skipped.
    if all(frame.name != PASSES for frame in frames):
        if recorder.phase.name.endswith(GRADIENTS_COMPLETE):
            yield from iter_missing_messages(recorder.collectives, context)
        yield from iter_run_differences(recorder.block_runs, context)


def _find_line(error: Exception) -> str:
    """Return the innermost line of llmsys outside of the dry run."""
    found = "torch"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(PACKAGE) and not frame.filename.startswith(OWN_FOLDER):
            found = f"llmsys/{frame.filename.removeprefix(PACKAGE)}:{frame.lineno}"
    return found

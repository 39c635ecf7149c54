"""Workers look for cycles of objects as often as the process that starts them, and not while many
objects are made that stay.
"""

import gc
from contextlib import suppress

import pytest

from llmsys.data_pipeline.executors.base import Report, TaskDone
from llmsys.data_pipeline.executors.garbage_collection import THRESHOLDS, pause_collection
from llmsys.data_pipeline.executors.local import LocalExecutor


def tell_thresholds(report: Report) -> dict[str, object]:
    return {"thresholds": list(gc.get_threshold())}


def test_a_worker_looks_for_cycles_less_often() -> None:
    events = list(LocalExecutor(workers=1).run_jobs([tell_thresholds]))
    results = [event.result for event in events if isinstance(event, TaskDone)]
    assert results == [{"thresholds": list(THRESHOLDS)}]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_a_pause_ends_with_the_block_and_leaves_a_collector_that_was_off(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with suppress(KeyError), pause_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()

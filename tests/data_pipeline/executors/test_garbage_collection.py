"""Workers look for cycles of objects as often as the process that starts them."""

import gc

from llmsys.data_pipeline.executors.base import Report, TaskDone
from llmsys.data_pipeline.executors.garbage_collection import THRESHOLDS
from llmsys.data_pipeline.executors.local import LocalExecutor


def tell_thresholds(report: Report) -> dict[str, object]:
    return {"thresholds": list(gc.get_threshold())}


def test_a_worker_looks_for_cycles_less_often() -> None:
    events = list(LocalExecutor(workers=1).run_jobs([tell_thresholds]))
    results = [event.result for event in events if isinstance(event, TaskDone)]
    assert results == [{"thresholds": list(THRESHOLDS)}]

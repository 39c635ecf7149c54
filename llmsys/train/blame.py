"""Which sequences and documents were in a step, for the record of one that was refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsys.data.steps import GroupedSteps, Steps, WindowSteps
from llmsys.shards import TokenShards

LISTED = 200
"""Documents that one record names; a step of many short ones has more, and says how many."""


def contents(steps: Steps, sources: Sequence[TokenShards], step: int) -> dict[str, Any]:
    """Sequence numbers (first and last) and document ids of step `step`, counted from 0, over all ranks."""
    if isinstance(steps, WindowSteps):
        numbers = np.unique(steps.dealt(step)).tolist()
        places = [place for number in numbers for place in steps.windows.documents(number)]
        return {"sequences": [numbers[0], numbers[-1]], **_named(places, sources)}
    if isinstance(steps, GroupedSteps):
        rows = sorted({int(row) for group in steps.grouping.step(step) for row in group})
        return _named([(0, row) for row in rows], [steps.pairs.targets])
    return {}


def _named(places: list[tuple[int, int]], sources: Sequence[TokenShards]) -> dict[str, Any]:
    distinct = list(dict.fromkeys(places))
    ids = [str(sources[source].lineage(document)["id"]) for source, document in distinct[:LISTED]]
    return {"documents": ids, "num_documents": len(distinct)}

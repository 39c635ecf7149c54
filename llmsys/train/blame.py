"""Which sequences and documents were in a step, for the record of one that was refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsys.data.steps import BucketedStepBatches, StepBatches, WindowStepBatches
from llmsys.shards import TokenShards

LISTED = 200
"""Documents that one record names; a step of many short ones has more, and says how many."""


def describe_step_contents(steps: StepBatches, sources: Sequence[TokenShards], step: int) -> dict[str, Any]:
    """Sequence numbers (first and last) and document ids of step `step`, counted from 0, over all ranks."""
    if isinstance(steps, WindowStepBatches):
        numbers = np.unique(steps.get_assignment(step)).tolist()
        places = [place for number in numbers for place in steps.windows.list_documents(number)]
        return {"sequences": [numbers[0], numbers[-1]], **_describe_documents(places, sources)}
    if isinstance(steps, BucketedStepBatches):
        rows = sorted({int(row) for group in steps.grouping.get_step_buckets(step) for row in group})
        return _describe_documents([(0, row) for row in rows], [steps.pairs.targets])
    return {}


def _describe_documents(places: list[tuple[int, int]], sources: Sequence[TokenShards]) -> dict[str, Any]:
    distinct = list(dict.fromkeys(places))
    ids = [str(sources[source].get_lineage(document)["id"]) for source, document in distinct[:LISTED]]
    return {"documents": ids, "num_documents": len(distinct)}

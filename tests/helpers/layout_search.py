"""A search of few layouts, for tests whose subject is another one."""

from collections.abc import Callable
from typing import Any

import pytest

from llmsys.estimate.plan import layout_search
from llmsys.estimate.plan.candidate_enumeration import iter_candidates
from llmsys.estimate.plan.layout_candidate import LayoutCandidate


def limit_search(
    monkeypatch: pytest.MonkeyPatch,
    is_wanted: Callable[[LayoutCandidate], bool] = lambda one: True,
    most: int | None = None,
) -> None:
    """Search layouts whose ranks all shard, and no neighbours of the best.

    Args:
        monkeypatch: Takes it back after the test.
        is_wanted: Which of them.
        most: The first ones only. Default: all.
    """

    def iter_few(*arguments: Any) -> list[LayoutCandidate]:
        found = [
            one
            for one in iter_candidates(*arguments)
            if (one.tensor, one.context, one.pipeline, one.replicate) == (1, 1, 1, 1)
        ]
        return [one for one in found if is_wanted(one)][:most]

    monkeypatch.setattr(layout_search, "iter_candidates", iter_few)
    monkeypatch.setattr(layout_search, "iter_rejected_neighbours", lambda *arguments: [])

"""Laws of turns: the micro-batches of a step are one list, whoever takes them, however windows
are dealt.
"""

from typing import Any

import pytest

from llmsys.config.batch import BatchConfig
from llmsys.data.length_buckets import LengthBuckets
from llmsys.data.step_batches import (
    BucketedStepBatches,
    StepBatches,
    StridedStepBatches,
    WindowStepBatches,
)
from llmsys.data.step_plan import RunPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import TokenShards, open_tokens
from tests.helpers.dataset import make_dataset


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return open_tokens(make_dataset(tmp_path_factory.mktemp("data") / "toy"), "train")


def windows(shards: TokenShards, **settings: Any) -> StepBatches:
    batch = BatchConfig.model_validate(
        {"sequence_length": 32, "micro_sequences": 2, "sequences": 16} | settings
    )
    packed = StreamWindows(require_paged(shards), length=32, seed=5)
    return WindowStepBatches(
        packed, RunPlan(batch, 1, 0), separate_documents=True, deal=batch.assignment
    )


RAMP = {"start_tokens": 8 * 32, "ramp_tokens": 60 * 32, "increment_sequences": 8}


@pytest.mark.parametrize("settings", [{}, {"assignment": "balanced"}, {"ramp": RAMP}])
def test_ranks_take_the_same_list_in_turns(shards: TokenShards, settings: dict[str, Any]) -> None:
    for step in (0, 3, 11):
        expected = [
            batch.tokens_BT.tolist()
            for batch in windows(shards, **settings).get_micro_batches(step)
        ]
        for ranks in (1, 2, 4):
            steps = [
                StridedStepBatches(windows(shards, **settings), ranks, rank)
                for rank in range(ranks)
            ]
            dealt = [
                [batch.tokens_BT.tolist() for batch in one.get_micro_batches(step)] for one in steps
            ]
            assert [one for turn in zip(*dealt, strict=True) for one in turn] == expected
            assert all(one.count_micro_batches(step) == len(expected) // ranks for one in steps)
            assert steps[0].get_step_metrics(step) == windows(shards, **settings).get_step_metrics(
                step
            )


def test_groups_of_similar_length_stay_whole() -> None:
    import numpy as np

    lengths = np.random.default_rng(0).integers(3, 20, 200)
    grouping = LengthBuckets(lengths, lengths * 0, 256, 4, ("key",))
    taken: list[list[int]] = []

    def make(pairs: Any, rows: list[int]) -> Any:
        taken.append(rows)

    whole: Any = BucketedStepBatches(None, grouping, make, data_ranks=1, data_rank=0)  # type: ignore[arg-type]
    for rank in (0, 1):
        StridedStepBatches(whole, 2, rank).get_micro_batches(7)
    groups = [group.tolist() for group in grouping.get_step_buckets(7)]
    assert taken == groups[0::2] + groups[1::2]

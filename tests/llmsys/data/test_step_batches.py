"""Laws of dealing: every window has one place, work is even where it can be, and a ramp is dealt
evenly.
"""

import numpy as np
import pytest

from llmsys.config.batch import BatchConfig
from llmsys.data.step_batches import (
    WindowStepBatches,
    assign_balanced,
    assign_sequentially,
    compute_imbalance,
)
from llmsys.data.step_plan import RunPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import ConfigError
from tests.helpers.dataset import make_dataset

LENGTH = 32
SHAPES = [(1, 1, 8), (2, 1, 4), (4, 2, 1), (2, 4, 3), (3, 1, 1), (8, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_window_has_one_place_and_balance_is_never_worse(shape: tuple[int, int, int]) -> None:
    generator = np.random.default_rng(1)
    for _ in range(20):
        work = generator.integers(1, 1000, int(np.prod(shape)))
        dealt = assign_balanced(work, *shape[:2])
        assert dealt.shape == shape
        assert sorted(dealt.flatten().tolist()) == list(range(len(work)))
        assert (
            compute_imbalance(work, dealt)
            <= compute_imbalance(work, assign_sequentially(*shape)) + 1e-9
        )
        assert compute_imbalance(work, dealt) >= 1 - 1e-9


def test_documents_of_all_lengths_are_dealt_almost_evenly() -> None:
    generator = np.random.default_rng(2)
    work = (generator.lognormal(0, 1.2, 256) * 1000).astype(np.int64) + 1
    assert compute_imbalance(work, assign_sequentially(8, 2, 16)) > 1.2
    assert compute_imbalance(work, assign_balanced(work, 8, 2)) < 1.02


def test_where_a_window_fills_a_micro_batch_like_meets_like() -> None:
    work = np.array([9, 1, 8, 2, 7, 3])
    rounds = work[assign_balanced(work, 2, 3)][:, :, 0].T
    assert [sorted(one.tolist()) for one in rounds] == [[8, 9], [3, 7], [1, 2]]
    assert abs(int(rounds[:, 0].sum()) - int(rounds[:, 1].sum())) <= 2


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return open_tokens(make_dataset(tmp_path_factory.mktemp("data") / "toy"), "train")


def steps(shards: TokenShards, ranks: int, rank: int, **settings: object) -> WindowStepBatches:
    batch = BatchConfig.model_validate({"sequence_length": LENGTH, **settings})
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    return WindowStepBatches(
        packed, RunPlan(batch, ranks, rank), separate_documents=True, deal=batch.assignment
    )


def test_the_work_of_a_window_is_the_sum_of_its_squared_document_lengths(
    shards: TokenShards,
) -> None:
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    numbers = np.array([0, 3, packed.windows_per_epoch - 1, packed.windows_per_epoch + 2, 77])
    for number, work in zip(
        numbers.tolist(), packed.compute_attention_cost(numbers).tolist(), strict=True
    ):
        _, counts = np.unique(packed.get_window(number).documents[:-1], return_counts=True)
        assert work == (counts**2).sum()


def test_the_log_says_how_uneven_attention_is_before_and_after(shards: TokenShards) -> None:
    found = steps(shards, 2, 0, sequences=16, assignment="balanced").get_step_metrics(3)
    assert 1 <= found["attention_imbalance"] <= found["attention_imbalance_sequential"]
    assert (
        steps(shards, 2, 0, sequences=16).get_step_metrics(3)["attention_imbalance"]
        == found["attention_imbalance_sequential"]
    )


RAMP = {"sequences": 12, "ramp": {"start_tokens": 4 * LENGTH, "ramp_tokens": 60 * LENGTH}}


@pytest.mark.parametrize(("ranks", "micro"), [(1, 0), (2, 2), (4, 0), (4, 1)])
def test_a_ramp_gives_every_sequence_once_whatever_the_ranks_and_wherever_it_is_resumed(
    shards: TokenShards, ranks: int, micro: int
) -> None:
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    seen: list[list[int]] = []
    for step in range(14):
        # A fresh object for every step: nothing is remembered from the one before, as after a kill.
        dealt = [steps(shards, ranks, rank, micro_sequences=micro, **RAMP) for rank in range(ranks)]
        for one in dealt:
            batches = one.get_micro_batches(step)
            assert len(batches) == one.count_micro_batches(step)
            seen += [row for batch in batches for row in batch.tokens_BT.tolist()]
    sizes = BatchConfig.model_validate({"sequence_length": LENGTH, **RAMP})
    assert len(seen) == sizes.count_sequences_before(14)
    assert [sizes.get_step_sequences(step) for step in (0, 13)] == [4, 12]
    assert seen == packed.get_rows(np.arange(len(seen))).tokens[:, :-1].tolist()


def test_a_ramp_that_ranks_cannot_share_is_refused_with_one_that_they_can() -> None:
    batch = BatchConfig.model_validate({"sequence_length": LENGTH, **RAMP})
    with pytest.raises(
        ConfigError,
        match=r"grows by 4 sequences .* from 4, which 3 data ranks with micro-batches of 1 cannot "
        r"share evenly. Use batch.ramp.increment_sequences=6 .* multiples of 192 tokens",
    ):
        RunPlan(batch, 3, 0)

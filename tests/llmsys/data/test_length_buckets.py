"""Laws of length-grouped batches: everything once, similar lengths together, shuffled, whoever
handles the rows.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmsys.data.dataloader import StepLoader
from llmsys.data.heldout_batches import HeldoutPairs
from llmsys.data.length_buckets import LengthBuckets, compute_padding_stats
from llmsys.data.sequence_pairs import (
    ClassificationCollator,
    SequencePairs,
    TranslationCollator,
    open_pairs,
)
from llmsys.data.step_batches import BucketedStepBatches
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import ConfigError, DataError
from tests.helpers.dataset import make_dataset
from tests.helpers.tiny_pairs import write_pairs_config

START = 1


class ListedRows(NamedTuple):
    rows: list[list[int]]

    def get_tokens(self, document: int, /) -> NDArray[Any]:
        return np.array(self.rows[document])


class ListedPairs(NamedTuple):
    sources: ListedRows
    targets: ListedRows


def lengths(count: int = 5000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    target = generator.integers(2, 40, count)
    return target, np.maximum(2, target + generator.integers(-4, 5, count))


def grouping(tokens: int = 1000, groups: int = 1, seed: int = 3) -> LengthBuckets:
    return LengthBuckets(*lengths(), tokens, groups, ("f00d", seed))


@pytest.mark.parametrize(("tokens", "groups"), [(1000, 1), (1000, 4), (300, 2), (10**7, 1)])
@pytest.mark.parametrize("epoch", [0, 2])
def test_an_epoch_has_every_pair_once(tokens: int, groups: int, epoch: int) -> None:
    plan = grouping(tokens, groups)
    first = epoch * plan.steps_per_epoch
    seen = [plan.get_step_buckets(step) for step in range(first, first + plan.steps_per_epoch)]
    assert all(len(step) == groups for step in seen)
    assert sorted(np.concatenate([group for step in seen for group in step])) == list(range(5000))


def test_steps_have_about_their_tokens_and_little_padding() -> None:
    plan = grouping(1000, 2)
    for step in range(plan.steps_per_epoch):
        found = compute_padding_stats(plan.get_step_buckets(step), *lengths())
        assert abs(found["tokens"][0] - 1000) <= 100
        assert abs(found["tokens"][1] - 1000) <= 400
    shares = [
        compute_padding_stats(plan.get_step_buckets(step), *lengths())["padding_share"]
        for step in range(plan.steps_per_epoch)
    ]
    assert np.mean(shares) < 0.12


def test_padding_is_counted_to_the_longest_of_each_bucket() -> None:
    groups, sources, targets = (
        [np.array([0, 2]), np.array([1])],
        np.array([3, 1, 5]),
        np.array([2, 4, 2]),
    )
    assert compute_padding_stats(groups, sources, targets) == {
        "tokens": [9, 8],
        "padding": (2 * 5 + 1) + (2 * 2 + 4) - 17,
        "padding_share": 1 - 17 / 19,
    }


def test_a_text_to_classify_begins_with_the_token_that_opens_it_and_loses_its_end() -> None:
    pairs = ListedPairs(ListedRows([[5, 6, 7, 2], [8, 2]]), ListedRows([[0, 2], [1, 2]]))
    batch = ClassificationCollator(START)(pairs, [0, 1])
    assert batch.tokens_BT.tolist() == [[START, 5, 6, 7], [START, 8, 0, 0]]
    assert batch.targets_BT.tolist() == [[0], [1]]


def test_steps_are_shuffled_and_epochs_differ() -> None:
    plan = grouping()
    longest = [
        int(lengths()[0][plan.get_step_buckets(step)[0]].max())
        for step in range(plan.steps_per_epoch)
    ]
    # a step says nothing about the next
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.3
    again = [plan.get_step_buckets(step)[0].tolist() for step in range(plan.steps_per_epoch)]
    other = [
        plan.get_step_buckets(step + plan.steps_per_epoch)[0].tolist()
        for step in range(plan.steps_per_epoch)
    ]
    together = {tuple(sorted(group)) for group in again}
    assert sum(tuple(sorted(group)) in together for group in other) == 0


def test_the_order_is_a_pure_function_of_data_seed_and_step() -> None:
    backwards = [grouping().get_step_buckets(step)[0].tolist() for step in reversed(range(20))][
        ::-1
    ]
    assert [grouping().get_step_buckets(step)[0].tolist() for step in range(20)] == backwards
    assert grouping(seed=4).get_step_buckets(0)[0].tolist() != backwards[0]


def test_a_pair_that_fits_no_group_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"batch.tokens=80 in batch.num_length_buckets=4 buckets leaves \d+ tokens .* 39\.",
    ):
        grouping(80, 4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> SequencePairs:
    config = write_pairs_config(tmp_path_factory.mktemp("pairs"))
    prepare_dataset(config)
    return open_pairs(config.data.folder, "train")


def steps(pairs: SequencePairs, ranks: int, rank: int, groups: int = 2) -> BucketedStepBatches:
    plan = LengthBuckets(
        pairs.targets.lengths, pairs.sources.lengths, 200, groups, (pairs.fingerprint, 0)
    )
    return BucketedStepBatches(
        pairs, plan, TranslationCollator(START), data_ranks=ranks, data_rank=rank
    )


def test_targets_are_opened_shifted_and_beside_their_source(pairs: SequencePairs) -> None:
    rows = [5, 9, 2]
    batch = TranslationCollator(START)(pairs, rows)
    assert batch.source_BS is not None
    for row, number in enumerate(rows):
        target, source = (
            pairs.targets.get_tokens(number).tolist(),
            pairs.sources.get_tokens(number).tolist(),
        )
        assert batch.tokens_BT[row, : len(target)].tolist() == [START, *target[:-1]]
        assert batch.targets_BT[row].tolist() == target + [-100] * (
            batch.targets_BT.shape[1] - len(target)
        )
        assert batch.source_BS[row, : len(source)].tolist() == source
        assert batch.source_documents_BS is not None
        assert batch.source_documents_BS[row].tolist() == [0] * len(source) + [-1] * (
            batch.source_BS.shape[1] - len(source)
        )
    assert set(batch.to_model_inputs()) == {
        "tokens_BT",
        "source_BS",
        "source_documents_BS",
        "real_BT",
    }
    assert batch.num_tokens == batch.num_valid_targets
    assert batch.num_source_tokens == sum(len(pairs.sources.get_tokens(number)) for number in rows)
    assert TranslationCollator(START)(pairs, [5]).real_BT is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_ranks_change_only_who_handles_a_pair(pairs: SequencePairs, ranks: int) -> None:
    def rows_of(rank: int, ranks: int) -> list[list[int]]:
        batches = [
            batch
            for _, step in StepLoader(steps(pairs, ranks, rank)).iter_steps(0, 3)
            for batch in step
        ]
        assert len(batches) == 3 * 2  # every rank meets the others equally often
        return [
            [t for t in row.tolist() if t != -100] for batch in batches for row in batch.targets_BT
        ]

    dealt = [row for rank in range(ranks) for row in rows_of(rank, ranks) if row]
    assert sorted(dealt) == sorted(rows_of(0, 1))


def test_a_rank_without_a_row_has_one_that_counts_for_nothing(pairs: SequencePairs) -> None:
    for make in (TranslationCollator(START), ClassificationCollator(2)):
        batch = make(pairs, [])
        assert batch.tokens_BT.shape == (1, 1)
        assert (batch.num_valid_targets, batch.num_tokens, batch.num_source_tokens) == (0, 0, 0)


def test_every_heldout_pair_is_asked_for_once_by_length(pairs: SequencePairs) -> None:
    heldout = HeldoutPairs(pairs, TranslationCollator(START))
    batches = [heldout.get_batch(first, 8) for first in range(0, heldout.num_rows + 16, 8)]
    assert sum(batch.num_valid_targets for batch in batches) == pairs.targets.lengths.sum()
    widths = [batch.targets_BT.shape[1] for batch in batches if batch.num_valid_targets]
    assert widths == sorted(widths)
    few = HeldoutPairs(pairs, TranslationCollator(START), max_tokens=100)
    assert pairs.targets.lengths[: few.num_rows].sum() <= 100


def test_a_longer_pair_than_the_config_says_is_named(pairs: SequencePairs) -> None:
    with pytest.raises(
        ConfigError,
        match=r"batch.target_sequence_length=5 is less than the \d+ tokens of the longest target "
        r".*",
    ):
        pairs.require_lengths(256, 5)


def test_documents_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds documents, not pairs"):
        open_pairs(make_dataset(tmp_path / "toy"), "train")


def test_moving_a_batch_keeps_all_of_it(pairs: SequencePairs) -> None:
    batch = TranslationCollator(START)(pairs, [0, 1])
    moved = batch.to(torch.device("cpu"))
    assert moved.to_model_inputs().keys() == batch.to_model_inputs().keys()
    assert torch.equal(moved.targets_BT, batch.targets_BT)

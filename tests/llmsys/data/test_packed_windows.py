"""Laws of order, packing and dealing: what step n sees depends on the data and the seed alone."""

import numpy as np
import pytest

from llmsys.config.batch import BatchConfig
from llmsys.data.batch import build_batch
from llmsys.data.dataloader import StepLoader
from llmsys.data.heldout_batches import HeldoutWindows
from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.data.step_batches import WindowStepBatches
from llmsys.data.step_plan import RunPlan, StepPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import ConfigError, DataError
from tests.helpers.dataset import make_dataset

LENGTH = 32


def plan(sequences: int, ranks: int, rank: int, micro: int) -> RunPlan:
    return RunPlan(
        BatchConfig(sequence_length=LENGTH, sequences=sequences, micro_sequences=micro), ranks, rank
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return open_tokens(make_dataset(tmp_path_factory.mktemp("data") / "toy"), "train")


def test_a_permutation_holds_every_number_once_and_never_changes() -> None:
    order = build_permutation(1000, derive_order_key("documents", "f00d", 3, 0))
    assert sorted(order) == list(range(1000))
    assert build_permutation(5, derive_order_key("pinned", 1)).tolist() == [2, 3, 0, 4, 1]
    assert (
        build_permutation(1000, derive_order_key("documents", "f00d", 3, 1)).tolist()
        != order.tolist()
    )


def test_the_closing_token_opens_the_next_document(shards: TokenShards) -> None:
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    end = int(shards.get_tokens(0)[-1])
    for index in range(20):
        window = packed.get_window(index)
        starts = np.flatnonzero(np.diff(window.documents)) + 1
        assert np.array_equal(starts, np.flatnonzero(window.tokens[1:] == end) + 1)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (4, 1), (8, 1)])
def test_ranks_and_micro_batches_do_not_change_what_a_step_sees(
    shards: TokenShards, ranks: int, micro: int
) -> None:
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    rows = []
    for rank in range(ranks):
        loader = StepLoader(
            WindowStepBatches(packed, plan(8, ranks, rank, micro), separate_documents=False)
        )
        for _, batches in loader.iter_steps(3, 4):
            rows += [row for batch in batches for row in batch.tokens_BT.tolist()]
    assert rows == [packed.get_window(index).tokens[:-1].tolist() for index in range(24, 32)]


def test_dealing_that_does_not_divide_is_refused_with_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"batch.sequences=8 cannot be divided evenly over 3 data ranks. Use .*=9"
    ):
        StepPlan(8, 3, 0, 1)
    with pytest.raises(
        ConfigError, match=r"batch.micro_sequences=3 does not divide the 4 .* Use one of 1, 2, 4"
    ):
        StepPlan(8, 2, 0, 3)


def test_an_error_while_reading_ahead_reaches_the_trainer(shards: TokenShards) -> None:
    packed = StreamWindows(require_paged(shards), length=LENGTH, seed=5)
    packed.get_rows = lambda numbers: (_ for _ in ()).throw(  # type: ignore[method-assign]
        DataError("train-00000.arrow is damaged")
    )
    loader = StepLoader(WindowStepBatches(packed, plan(8, 1, 0, 8), separate_documents=False))
    with pytest.raises(DataError, match="train-00000"):
        next(loader.iter_steps(0, 2))


def test_every_heldout_token_is_a_target_once(shards: TokenShards) -> None:
    windows = HeldoutWindows(shards, length=LENGTH, opening_token=2, separate_documents=True)
    targets = [
        t
        for w in range(0, windows.windows, 4)
        for t in windows.get_batch(w, 4).targets_BT.flatten().tolist()
    ]
    everything = np.concatenate(
        [shards.get_tokens(document) for document in range(shards.num_documents)]
    )
    assert [target for target in targets if target != -100] == everything.tolist()
    assert windows.text_bytes == shards.text_bytes.sum()


def test_a_batch_has_the_documents_of_its_tokens_and_the_tokens_after_them_as_targets(
    shards: TokenShards,
) -> None:
    rows = StreamWindows(require_paged(shards), length=LENGTH, seed=5).get_rows(range(8))
    batch = build_batch(rows, separate_documents=True)
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == rows.documents[:, :-1].tolist()
    assert (batch.tokens_BT.tolist(), batch.targets_BT.tolist()) == (
        rows.tokens[:, :-1].tolist(),
        rows.tokens[:, 1:].tolist(),
    )


def test_a_heldout_document_begins_with_the_token_that_opens_it(shards: TokenShards) -> None:
    windows = HeldoutWindows(shards, length=LENGTH, opening_token=2, separate_documents=True)
    numbers = windows.get_batch(0, windows.windows).documents_BT
    assert numbers is not None
    expected = np.repeat(np.arange(shards.num_documents), shards.lengths)
    assert numbers.flatten()[: windows.tokens].tolist() == expected.tolist()


def test_a_limit_on_heldout_tokens_cuts_after_whole_documents(shards: TokenShards) -> None:
    windows = HeldoutWindows(shards, length=LENGTH, opening_token=2, max_tokens=300)
    count = len(windows.documents)
    assert windows.tokens == shards.lengths[:count].sum() <= 300
    assert windows.text_bytes == shards.text_bytes[:count].sum()

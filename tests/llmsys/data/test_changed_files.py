"""Files that change under a run: it stops at the step that needs them, names the file, and says
what to do.
"""

from pathlib import Path

import numpy as np
import pytest

from llmsys.config.batch import BatchConfig
from llmsys.data.dataloader import StepLoader
from llmsys.data.step_batches import WindowStepBatches
from llmsys.data.step_plan import RunPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import DataError
from tests.helpers.dataset import make_dataset

LENGTH = 32


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "toy")


def loader(shards: TokenShards) -> StepLoader:
    batch = BatchConfig(sequence_length=LENGTH, sequences=4)
    windows = StreamWindows(require_paged(shards), length=LENGTH, seed=0)
    return StepLoader(
        WindowStepBatches(windows, RunPlan(batch, 1, 0), separate_documents=True), ahead=1
    )


def test_a_file_that_vanishes_in_the_middle_of_a_run_is_named(dataset: Path) -> None:
    steps = loader(open_tokens(dataset, "train")).iter_steps(0, 100)
    next(steps)
    (dataset / "tokens" / "train-00000.arrow").unlink()
    with pytest.raises(
        DataError, match=r"train-00000.arrow disappeared during the run. Restore it, or"
    ):
        for _ in steps:
            pass


@pytest.mark.parametrize("touched", [False, True])
def test_a_file_that_is_cut_short_while_it_is_mapped_is_named_and_kills_nothing(
    dataset: Path, touched: bool
) -> None:
    shards = open_tokens(dataset, "train")
    if touched:
        shards.get_tokens(0)
    path = dataset / "tokens" / "train-00000.arrow"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(100)  # reading beyond it through the map would be a bus error
    with pytest.raises(
        DataError, match=rf"changed during the run: 100 bytes, expected from the manifest: {size:,}"
    ):
        list(loader(shards).iter_steps(0, 3))


def test_a_token_that_changed_on_disk_is_never_given(dataset: Path) -> None:
    shards = open_tokens(dataset, "train")
    path = dataset / "tokens" / "train-00000.arrow"
    needle, data = np.asarray(shards.get_tokens(5)).tobytes(), bytearray(path.read_bytes())
    fresh = open_tokens(dataset, "train")
    data[data.index(needle)] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(DataError, match=r"train-00000.arrow, page 0 .*: its checksum .* damaged"):
        list(loader(fresh).iter_steps(0, 100))


def test_spans_are_what_whole_documents_hold(dataset: Path) -> None:
    shards = open_tokens(dataset, "train")
    documents = np.array([7, 0, 7, 119])
    lengths = shards.lengths[documents] // 2
    out = np.empty(int(lengths.sum()), np.int64)
    shards.copy_spans(documents, np.full(4, 1), lengths, out)
    wanted = [
        shards.get_tokens(int(one))[1 : 1 + int(length)]
        for one, length in zip(documents, lengths, strict=True)
    ]
    assert out.tolist() == np.concatenate(wanted).tolist()

"""Laws of opening data on many ranks: one rank reads the small files of a dataset, and the
others get its bytes.
"""

from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import DataError
from llmsys.train.shared_dataset import share_dataset_files
from tests.helpers.dataset import make_dataset
from tests.helpers.ranks import run_ranks


def open_without_files(rank: int, folder: Path, missing: Path) -> list[Any]:
    """What a rank has of a dataset and how it ends without one. Rank 1 can read no file of them
    by itself.
    """
    readable = Path.read_bytes
    if rank:
        Path.read_bytes = lambda path: missing.joinpath("x").open("rb")  # type: ignore[assignment,return-value]
    with share_dataset_files(open_config(folder)):
        found: list[Any] = [
            load_manifest(folder).fingerprint,
            open_tokens(folder, "train").num_tokens,
        ]
    for action in (
        lambda: load_manifest(folder),
        lambda: share_dataset_files(open_config(missing)).__enter__(),
    ):
        try:
            action()
            found.append("read")
        except (DataError, SystemExit) as error:
            found.append(type(error))
    Path.read_bytes = readable  # type: ignore[method-assign]
    return found


def open_config(folder: Path) -> RunConfig:
    return load_run_config("train/demo", [f"data.folder={folder}"])


@pytest.mark.distributed
def test_ranks_open_a_dataset_that_rank_0_alone_has_read(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "toy")
    own = [load_manifest(folder).fingerprint, open_tokens(folder, "train").num_tokens]
    assert open_tokens(folder, "train").manifest.splits["train"].index is not None
    first, second = run_ranks(open_without_files, 2, folder, tmp_path / "missing")
    assert first == [*own, "read", DataError]
    assert second == [*own, DataError, SystemExit]

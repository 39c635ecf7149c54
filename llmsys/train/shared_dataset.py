"""Read the small files of a run's datasets once for all ranks: thousands would ask one file system
at once.

Reads: manifests and indexes of local datasets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.config.data import list_dataset_folders
from llmsys.config.run import RunConfig
from llmsys.dataset.manifest import MANIFEST_NAME, load_manifest
from llmsys.parallel.process_group import get_world_size, run_on_rank_zero
from llmsys.storage.paths import find_folder_url
from llmsys.storage.received_files import hold_received_files


@contextmanager
def share_dataset_files(config: RunConfig) -> Iterator[None]:
    """Read manifests and indexes on rank 0 and send them to all ranks, for `open_run_data`.
    Collective.

    A remote dataset is copied to each host by one of its processes.

    Args:
        config: the config of the run.

    Raises:
        DataError: on rank 0, a file is missing or damaged; the other ranks exit with status 2.
    """
    files = run_on_rank_zero(lambda: read_dataset_files(config)) if get_world_size() > 1 else {}
    with hold_received_files(files):
        yield


def read_dataset_files(config: RunConfig) -> dict[Path, bytes]:
    """Read the manifests and the indexes of all local datasets of a run.

    Args:
        config: the config of the run.

    Returns:
        Contents by path.

    Raises:
        DataError: a manifest is missing or damaged.
    """
    files: dict[Path, bytes] = {}
    for folder in list_dataset_folders(config.data):
        if find_folder_url(folder) is None:
            splits = load_manifest(folder).splits.values()
            indexes = [
                folder / "tokens" / split.index.name for split in splits if split.index is not None
            ]
            # A missing one is named where it is opened.
            files |= {
                path: path.read_bytes()
                for path in (folder / MANIFEST_NAME, *indexes)
                if path.exists()
            }
    return files

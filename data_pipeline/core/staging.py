"""Keep a published dataset complete while its next version is made in staging/.

Reads and writes below a dataset folder. Without a manifest nothing is published, and files are
written in place.

Invariants:
    - While manifest.json exists, no file that it names changes.
    - A staged file is the newer version of the published file of its name.
    - staging/ exists from the first change after a publication until the next publication.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmsys.dataset.manifest import MANIFEST_NAME

STAGING = "staging"
JOURNAL = "journal"
LISTS = "lists"
SCORES = "scores"  # in work/: what models gave to texts, which no task lists as its output
PUBLIC_FOLDERS = frozenset({"documents", "dropped", "decontamination", "tokenizer", "tokens"})


def get_write_path(folder: Path, name: str) -> Path:
    """Return the path to which a task writes an output.

    Args:
        folder: Dataset folder.
        name: Output, relative to the folder.

    Returns:
        A path in staging/ if the output is public and a manifest exists, else the path in place.
    """
    # Files in work/ and journal/ are named by no manifest and are written in place.
    if Path(name).parts[0] in PUBLIC_FOLDERS and (folder / MANIFEST_NAME).exists():
        return folder / STAGING / name
    return folder / name


def find_output(folder: Path, name: str) -> Path:
    """Return the path of the newest version of an output.

    Args:
        folder: Dataset folder.
        name: Output, relative to the folder.

    Returns:
        The staged file if there is one, else the path in place, whether or not it exists.
    """
    staged = folder / STAGING / name
    return staged if staged.exists() else folder / name


def discard_stale(folder: Path, name: str) -> None:
    """Remove a staged file that differs from its record while the published file matches it.

    Args:
        folder: The dataset folder.
        name: Name of the output, relative to the folder.
    """
    (folder / STAGING / name).unlink(missing_ok=True)


def begin_change(folder: Path) -> None:
    """Create staging/ in a published dataset: files made from now on belong to the next version.

    Args:
        folder: Dataset folder. Without a manifest nothing happens.
    """
    if (folder / MANIFEST_NAME).exists():
        (folder / STAGING).mkdir(exist_ok=True)


def is_change_unfinished(folder: Path) -> bool:
    """Return whether a preparation began to change a published dataset and did not publish the next
    version.

    Args:
        folder: Dataset folder.

    Returns:
        True while both staging/ and the manifest exist.
    """
    return (folder / STAGING).is_dir() and (folder / MANIFEST_NAME).exists()


def finish_interrupted_publication(folder: Path) -> None:
    """Move every staged file into place if no manifest exists, because a publication was
    interrupted.

    Args:
        folder: Dataset folder, whose lock is held.
    """
    if not (folder / MANIFEST_NAME).exists():
        publish_staged(folder, lambda name: True)


def publish_staged(folder: Path, is_output: Callable[[str], bool]) -> None:
    """Move the staged versions of outputs into place and remove the rest of staging/.

    Args:
        folder: Dataset folder. Its manifest must be withdrawn.
        is_output: Returns whether a name, relative to the folder, is an output of this run.
    """
    if not (folder / STAGING).is_dir():
        return
    for staged in sorted(path for path in (folder / STAGING).rglob("*") if path.is_file()):
        name = staged.relative_to(folder / STAGING)
        if is_output(str(name)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # rename fails across disks, and a folder may be a link
            shutil.move(staged, folder / name)
    # Last: the next run completes a publication that was interrupted before.
    shutil.rmtree(folder / STAGING)


class OutputNames:
    """The names of the outputs of a run, 8 bytes each in files without a name: a set of them
    would fill the memory.
    """

    def __init__(self, folder: Path) -> None:
        """Keep the names in temporary files of a folder.

        Args:
            folder: Created with the first name. The files have no names: they are gone when the
                process ends.
        """
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._sorted: dict[Path, np.ndarray[Any, np.dtype[np.uint64]]] = {}

    def add(self, name: str) -> None:
        """Add the name of an output.

        Args:
            name: Path relative to the dataset folder.
        """
        parent = Path(name).parent
        if parent not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[parent] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._files[parent].write(_hash_name(name))
        # The sorted copy lacks the new name.
        self._sorted.pop(parent, None)

    def __contains__(self, name: str) -> bool:
        """Return whether a name was added. The hashes of one folder are in memory at a time, so
        names are best asked for folder by folder.

        Args:
            name: Path relative to the dataset folder.

        Returns:
            True for every name that was added; of 10^12 others one would be taken for it.
        """
        parent = Path(name).parent
        if parent not in self._files:
            return False
        if parent not in self._sorted:
            self._sorted.clear()  # one folder at a time is in memory
            self._files[parent].seek(0)
            self._sorted[parent] = np.sort(np.fromfile(self._files[parent], np.uint64))
            # Names that come later are appended.
            self._files[parent].seek(0, os.SEEK_END)
        hashes = self._sorted[parent]
        wanted = np.frombuffer(_hash_name(name), np.uint64)
        index = int(np.searchsorted(hashes, wanted)[0])
        return index < len(hashes) and bool(hashes[index] == wanted[0])

    @property
    def folders(self) -> set[Path]:
        """The folders of the outputs, relative to the dataset folder."""
        return set(self._files)


def _hash_name(name: str) -> bytes:
    return xxhash.xxh3_64_digest(os.fsencode(name))


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files of killed writers.

    Args:
        folder: Dataset folder. Its lock must be held: another live writer would lose its files.
    """
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)

"""Keep a published dataset complete while its next version is made in staging/.

Reads and writes below a dataset folder. Without a manifest nothing is published, and files are written in place.

Invariants:
    - While manifest.json exists, no file that it names changes.
    - A staged file is the newer version of the published file of its name.
    - staging/ exists from the first change after a publication until the next publication.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from llmsys.manifest import MANIFEST_NAME

STAGING = "staging"
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
    """Remove a staged file that differs from its record while the published file matches it."""
    (folder / STAGING / name).unlink(missing_ok=True)


def begin_change(folder: Path) -> None:
    """Create staging/ in a published dataset: files made from now on belong to the next version.

    Args:
        folder: Dataset folder. Without a manifest nothing happens.
    """
    if (folder / MANIFEST_NAME).exists():
        (folder / STAGING).mkdir(exist_ok=True)


def is_change_unfinished(folder: Path) -> bool:
    """Return whether a preparation began to change a published dataset and did not publish the next version.

    Args:
        folder: Dataset folder.

    Returns:
        True while both staging/ and the manifest exist.
    """
    return (folder / STAGING).is_dir() and (folder / MANIFEST_NAME).exists()


def finish_interrupted_publication(folder: Path) -> None:
    """Move every staged file into place if no manifest exists, because a publication was interrupted.

    Args:
        folder: Dataset folder, whose lock is held.
    """
    if not (folder / MANIFEST_NAME).exists():
        staged = [path for path in (folder / STAGING).rglob("*") if path.is_file()]
        publish_staged(folder, [folder / path.relative_to(folder / STAGING) for path in staged])


def publish_staged(folder: Path, outputs: Iterable[Path]) -> None:
    """Move the staged versions of outputs into place and remove the rest of staging/.

    Args:
        folder: Dataset folder. Its manifest must be withdrawn.
        outputs: Final paths of the outputs, staged or not.
    """
    if not (folder / STAGING).is_dir():
        return
    for path in outputs:
        staged = folder / STAGING / path.relative_to(folder)
        if staged.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(staged, path)  # rename fails across disks, and a folder may be a link
    shutil.rmtree(folder / STAGING)

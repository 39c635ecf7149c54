"""Keep a published dataset whole while its next version is made: new files wait in staging/ until all are there.

Reads and writes below a dataset folder. Without a manifest nothing is published, and files are written in place.

Invariants:
    - While manifest.json exists, no file that it names changes.
    - A staged file is the newer version of the file of its name; `discard_stale` removes one that no record knows.
    - staging/ exists from the first change after a publication until the next one.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from llmsys.manifest import MANIFEST_NAME

STAGING = "staging"
PUBLIC_FOLDERS = frozenset({"documents", "dropped", "decontamination", "tokenizer", "tokens"})


def get_place_to_write(folder: Path, name: str) -> Path:
    """Return where a task writes the output `name`: in staging/ when a published file could be the one before it."""
    if Path(name).parts[0] in PUBLIC_FOLDERS and (folder / MANIFEST_NAME).exists():
        return folder / STAGING / name
    return folder / name


def find_output(folder: Path, name: str) -> Path:
    """Return where the newest version of an output is: in staging/, or in its place."""
    staged = folder / STAGING / name
    return staged if staged.exists() else folder / name


def discard_stale(folder: Path, name: str) -> None:
    """Remove a staged file that is not what its record says, the file in its place being so."""
    (folder / STAGING / name).unlink(missing_ok=True)


def begin_change(folder: Path) -> None:
    """Note that what follows is not the published dataset any more."""
    if (folder / MANIFEST_NAME).exists():
        (folder / STAGING).mkdir(exist_ok=True)


def is_change_unfinished(folder: Path) -> bool:
    """Whether a preparation has begun to change a published dataset and has not published the next one."""
    return (folder / STAGING).is_dir() and (folder / MANIFEST_NAME).exists()


def finish_interrupted_publication(folder: Path) -> None:
    """Put every staged file in its place when no manifest exists: a publication ended between two files."""
    if not (folder / MANIFEST_NAME).exists():
        staged = [path for path in (folder / STAGING).rglob("*") if path.is_file()]
        publish_staged(folder, [folder / path.relative_to(folder / STAGING) for path in staged])


def publish_staged(folder: Path, outputs: Iterable[Path]) -> None:
    """Put the staged versions of these files in their places, and remove what else is staged."""
    if not (folder / STAGING).is_dir():
        return
    for path in outputs:
        staged = folder / STAGING / path.relative_to(folder)
        if staged.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(staged, path)  # a folder that is a link may lie on another disk
    shutil.rmtree(folder / STAGING)

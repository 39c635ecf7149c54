"""The file system that a folder lies on.

Reads: /proc/mounts.
"""

import contextlib
from pathlib import Path

MOUNTS = Path("/proc/mounts")


def describe_lockless_folder(folder: Path, error: OSError) -> str:
    """Return the error message for a folder whose file system has no locks.

    Args:
        folder: The folder.
        error: The error of flock.

    Returns:
        The type of the file system, its mount point and the next step.
    """
    kind, place = find_mount(folder)
    return (
        f"{folder} lies on {kind} mounted at {place}, where flock does not work "
        f"({error.strerror}), and without a lock two commands could write the same folder. Mount "
        "it with locks (Lustre: -o flock; NFS: version 4, or without nolock and with lockd "
        "running), or name a folder on another file system (run.folder, data.folder)."
    )


def find_mount(folder: Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Return the type and the mount point of the file system of a folder.

    Args:
        folder: The folder.
        mounts: The list of mounted file systems.

    Returns:
        Such as ("nfs", "/data"); words for a person where they are unknown.
    """
    rows = []
    whole = folder.resolve()
    with contextlib.suppress(OSError):
        rows = [line.split() for line in mounts.read_text().splitlines()]
    # /proc/mounts writes a space as \040
    places = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    around = [(place, kind) for place, kind in places if place == whole or place in whole.parents]
    if not around:
        return "a file system", "an unknown place"
    # of two at one place, the later one
    place, kind = max(reversed(around), key=lambda one: len(one[0].parts))
    return kind, str(place)

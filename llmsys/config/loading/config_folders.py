"""Find the config of a folder: of a Hugging Face model, a run or a dataset.

Reads the names of files alone.
"""

from pathlib import Path

RUN_CONFIG = "config.yaml"
MANIFEST = "manifest.json"  # that of llmsys/dataset/manifest.py, which is slow to import
_RUN_FILES = ("environment.json", "events.jsonl", "checkpoints", "hostfile")


def is_recorded_config(path: Path) -> bool:
    """Return whether a file is the config.yaml that a run, a launch or a conversion wrote into
    its folder.
    """
    return path.name == RUN_CONFIG and any((path.parent / name).exists() for name in _RUN_FILES)


def find_folder_config(folder: Path) -> Path | None:
    """Return the file that configures a folder: a model's config.json, a run's config.yaml or a
    dataset's manifest.

    Args:
        folder: an existing folder.

    Returns:
        The file; None for a folder of another sort.
    """
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if (folder / RUN_CONFIG).is_file() and is_recorded_config(folder / RUN_CONFIG):
        return folder / RUN_CONFIG
    return folder / MANIFEST if (folder / MANIFEST).is_file() else None


def describe_other_folder(folder: Path, name: str) -> str:
    """Return why a folder is no config, and the next step."""
    if folder.parent.name == "checkpoints" and find_folder_config(folder.parent.parent):
        return f"{name} is a checkpoint, not a run. Give its run folder: {Path(name).parent.parent}"
    head = (
        f"{name} is a folder without a config: it has no config.json (a model), {RUN_CONFIG} of a "
        f"run or {MANIFEST}"
    )
    if files := sorted(folder.glob("*.y*ml")):
        return f"{head}. Give the path of a file, such as {Path(name) / files[0].name}"
    return f"{head} (a dataset). To write a config for the files in it: llmsys init {name}"

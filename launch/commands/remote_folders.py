"""Copy the folders in object storage that a command names, so that every verb reads them as it
reads local ones.

Reads the objects of a run, or the small ones of a dataset. Writes their copies in the cache.
"""

import argparse
from pathlib import Path
from typing import Any

from llmsys.errors import ConfigError
from llmsys.storage.paths import find_folder_url, is_remote, parse_folder

# Arguments that name a run, a dataset, or a config, which may be the folder of either.
FOLDER_ARGUMENTS = ("config", "dataset", "source", "run_folder", "runs")

# A config file is read on this machine alone.
FILE_SUFFIXES = (".yaml", ".yml", ".json")

# Verbs that read checkpoints of the folder they are given. `train`, `generate` and others that
# work with a config copy those of its run.folder themselves, wherever the config is.
CHECKPOINT_VERBS = frozenset({"convert", "replay", "trace"})


def fetch_named_folders(verb: str, arguments: argparse.Namespace) -> None:
    """Copy the remote folders among the arguments of a verb, and name the copies instead.

    Args:
        verb: The verb.
        arguments: Its parsed arguments, which are changed.

    Raises:
        ConfigError: A folder holds neither a run nor a dataset.
        DataError: The storage cannot be read.
    """
    for name in FOLDER_ARGUMENTS:
        value = getattr(arguments, name, None)
        if isinstance(value, list):
            setattr(arguments, name, [_fetch_folder(verb, one) for one in value])
        elif value is not None:
            setattr(arguments, name, _fetch_folder(verb, value))


def _fetch_folder(verb: str, value: Any) -> Any:
    """Return the name of the local copy of a remote folder, and any other value as it is."""
    if isinstance(value, str) and is_remote(value) and not value.endswith(FILE_SUFFIXES):
        try:
            return str(_fetch_copy(verb, Path(str(parse_folder(value)))))
        except ValueError:  # another URL, which the verb refuses by the name of its argument
            return value
    if isinstance(value, Path) and find_folder_url(value) is not None:
        return _fetch_copy(verb, value)
    return value


def _fetch_copy(verb: str, folder: Path) -> Path:
    from llmsys.dataset.remote_dataset import is_prepared
    from llmsys.train.remote_run import fetch_run, has_run

    url = find_folder_url(folder)
    if has_run(folder):
        fetch_run(folder, has_checkpoints=verb in CHECKPOINT_VERBS)
    elif not is_prepared(folder):
        raise ConfigError(
            f"{url} is not the folder of a run or of a dataset: it has neither config.yaml nor "
            "manifest.json. Name one of these, or copy a config or a model to this machine."
        )
    return folder

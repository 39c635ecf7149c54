"""Files of configs: find the one that a name refers to, and record the one of a run.

A config is found by path, by the folder of a model, a run or a dataset, or by name below a configs
folder: in the folder of the referring file (or the working directory), ./configs, the checkout, and
the copy installed with the package.

Reads the names of files; writes the text of config.yaml in a run folder.

Invariants:
- A config.yaml that a run wrote has the version of the format; a config that a person wrote may
  leave it out.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

import llmsys
from llmsys.config.loading.yaml_files import format_path
from llmsys.errors import ConfigError
from llmsys.log import redact_values
from llmsys.storage import stored_formats
from llmsys.storage.paths import require_local_path

PROFILES = "data/languages"
RUN_CONFIG = "config.yaml"
MANIFEST = "manifest.json"  # that of llmsys/dataset/manifest.py, which is slow to import
# Files next to the config.yaml of a run or a launch.
_RUN_FILES = ("environment.json", "events.jsonl", "checkpoints", "hostfile")
# Files next to the config.yaml of a run or of an imported model, which has a version.
_VERSIONED_FILES = ("environment.json", "checkpoints")


def find_config_file(name: str, folder: Path, asked_by: str = "") -> Path:
    """Return the config file that a path, a name or the folder of a model, a run or a dataset
    refers to.

    Args:
        name: as `find_config` takes it, or a folder.
        folder: folder of the referring file, searched first.
        asked_by: file or option that contains the name, for error messages.

    Returns:
        The resolved path of an existing file.

    Raises:
        ConfigError: no file matches, or several do.
    """
    if not (folder / name).is_dir() or (folder / f"{name}.yaml").is_file():
        return find_config(name, folder, asked_by)
    if (found := find_folder_config(folder / name)) is not None:
        return found.resolve()
    try:
        return find_config(name, folder, asked_by)
    except ConfigError:
        origin = f"{asked_by}: " if asked_by else ""
        raise ConfigError(f"{origin}{describe_other_folder(folder / name, name)}") from None


def list_config_roots() -> list[Path]:
    """List the folders searched for config names; the first match wins.

    Returns:
        Existing folders: ./configs, that of the checkout, that of the installed package.
    """
    package = Path(llmsys.__file__).resolve().parent
    wanted = [Path("configs").resolve(), package.parent / "configs", package / "configs"]
    return [root for i, root in enumerate(wanted) if root.is_dir() and root not in wanted[:i]]


def find_config(name: str, folder: Path, asked_by: str = "") -> Path:
    """Return the config file that `name` refers to.

    Args:
        name: a path, a folder with a config.json, or a config name such as `train/demo`.
        folder: folder of the referring file, searched first.
        asked_by: file or option that contains the name, for error messages.

    Returns:
        The resolved path of an existing file.

    Raises:
        ConfigError: no file matches (lists the closest names), or several do (lists all).
    """
    origin = f"{asked_by}: " if asked_by else ""
    roots = list_config_roots()
    require_local_path(name, asked_by or "CONFIG")
    for root in (folder, *roots):
        # The folder of a Hugging Face model stands for its config.json.
        for candidate in (root / name, root / f"{name}.yaml", root / name / "config.json"):
            if candidate.is_file():
                return candidate.resolve()
    for root in roots:
        matches = _list_config_files(root, f"{Path(name).name}.yaml") if "/" not in name else []
        if len(matches) == 1:
            return matches[0].resolve()
        if matches:
            names = ", ".join(_format_config_name(match, root) for match in matches)
            raise ConfigError(f"{origin}{name!r} is ambiguous: {names}. Use one of these.")
    raise ConfigError(
        f"{origin}config {name!r} was not found: neither a file nor a name under configs/. "
        f"{_format_name_hint(name)}"
    )


def list_config_names() -> list[str]:
    """Return every config name that can replace a path.

    Returns:
        Names such as `train/demo`, sorted.
    """
    return sorted(
        {
            _format_config_name(path, root)
            for root in list_config_roots()
            for path in _list_config_files(root, "*.yaml")
        }
    )


def _list_config_files(root: Path, pattern: str) -> list[Path]:
    """Return the matching config files of runs and models below a folder, sorted."""
    # Language profiles are found by language and are not configs.
    return sorted(path for path in root.rglob(pattern) if root / PROFILES not in path.parents)


def _format_config_name(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


# owner and model, such as Qwen/Qwen3-0.6B
_HUB_NAME = re.compile(r"[A-Za-z][\w-]*/[\w-]*\d[\w.-]*(?<!\.yaml)(?<!\.json)")


def _format_name_hint(name: str) -> str:
    known = list_config_names()
    stem = name.removesuffix(".yaml").removesuffix(".yml").removeprefix("configs/")
    by_stem = {known_name.rpartition("/")[2]: known_name for known_name in reversed(known)}
    if close := difflib.get_close_matches(stem, [*known, *by_stem], n=1, cutoff=0.7):
        return f"Did you mean {by_stem.get(close[0], close[0])}?"
    if _HUB_NAME.fullmatch(name):
        return (
            f"If it is a model of the Hugging Face hub: hf download {name} --local-dir FOLDER. "
            "Then run llmsys init FOLDER TEXTS, or llmsys convert FOLDER RUN."
        )
    return (
        "Give the path of a YAML file, or a name that llmsys list configs or llmsys list models "
        "prints."
    )


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


def format_recorded_config(values: dict[str, Any]) -> str:
    """Return the text of a config.yaml, with secrets redacted.

    Args:
        values: Sections of a run, as plain values.

    Returns:
        YAML, which begins with the version of the format.
    """
    versioned = {
        stored_formats.VERSION_KEY: stored_formats.RUN_CONFIG.version,
        **redact_values(values),
    }
    return yaml.safe_dump(versioned, sort_keys=False, allow_unicode=True)


def is_run_config(path: Path) -> bool:
    """Return whether a file is the config.yaml in the folder of a run or of an imported model.

    Args:
        path: an existing file. That of a launch is none: it is in another folder than its run.
    """
    return path.name == RUN_CONFIG and any(
        (path.parent / name).exists() for name in _VERSIONED_FILES
    )


def pop_format_version(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of a config file without the version of its format.

    Args:
        values: The mapping that the file has.
        path: The file.

    Returns:
        The other values.

    Raises:
        FormatError: The version is another one, or a run of an earlier release wrote the file.
    """
    if stored_formats.VERSION_KEY in values or is_run_config(path):
        stored_formats.require_version(stored_formats.RUN_CONFIG, values, format_path(path))
    return {key: value for key, value in values.items() if key != stored_formats.VERSION_KEY}

"""Find config files by path, by the folder of a model, run or dataset, or by name below a configs folder.

Search order: the folder of the referring file (or the working directory), ./configs, the checkout, and the copy
installed with the package.
"""

import difflib
from pathlib import Path

import llmsys
from llmsys.config.migration import is_recorded_config
from llmsys.errors import ConfigError
from llmsys.local_path import require_local_path

PROFILES = "data/languages"
RUN_CONFIG = "config.yaml"
MANIFEST = "manifest.json"  # that of llmsys/manifest.py, which is slow to import


def list_config_roots() -> list[Path]:
    """Return the folders searched for config names, without duplicates; the first match wins.

    Returns:
        Existing folders: ./configs, that of the checkout, that of the installed package.
    """
    package = Path(llmsys.__file__).resolve().parent
    wanted = [Path("configs").resolve(), package.parent / "configs", package / "configs"]
    return [root for i, root in enumerate(wanted) if root.is_dir() and root not in wanted[:i]]


def find_config(name: str, folder: Path, asked_by: str = "") -> Path:
    """Return the config file that `name` refers to.

    Args:
        name: a path, the folder of a Hugging Face model, a run or a dataset, or a config name such as `train/demo`.
        folder: folder of the referring file, searched first.
        asked_by: file or option that contains the name, for error messages.

    Returns:
        The resolved path of an existing file.

    Raises:
        ConfigError: no file matches (lists the closest names), or several do (lists all).
    """
    origin = f"{asked_by}: " if asked_by else ""
    require_local_path(name, asked_by or "CONFIG")
    for root in (folder, *list_config_roots()):
        for candidate in (root / name, root / f"{name}.yaml"):
            if candidate.is_file():
                return candidate.resolve()
        if (root / name).is_dir() and (file := find_folder_config(root / name)) is not None:
            return file.resolve()
    for root in list_config_roots():
        matches = _list_config_files(root, f"{Path(name).name}.yaml") if "/" not in name else []
        if len(matches) == 1:
            return matches[0].resolve()
        if matches:
            names = ", ".join(_format_config_name(match, root) for match in matches)
            raise ConfigError(f"{origin}{name!r} is ambiguous: {names}. Use one of these.")
    if (folder / name).is_dir():
        raise ConfigError(f"{origin}{_describe_other_folder(folder / name, name)}")
    raise ConfigError(
        f"{origin}config {name!r} was not found: neither a file nor a name under configs/. {_format_name_hint(name)}"
    )


def find_folder_config(folder: Path) -> Path | None:
    """Return the file that configures a folder: a model's config.json, a run's config.yaml or a dataset's manifest.

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


def _describe_other_folder(folder: Path, name: str) -> str:
    """Return why a folder is no config, and the next step."""
    if folder.parent.name == "checkpoints" and find_folder_config(folder.parent.parent):
        return f"{name} is a checkpoint, not a run. Give its run folder: {Path(name).parent.parent}"
    head = f"{name} is a folder without a config: it has no config.json (a model), {RUN_CONFIG} of a run or {MANIFEST}"
    if files := sorted(folder.glob("*.y*ml")):
        return f"{head}. Give the path of a file, such as {Path(name) / files[0].name}"
    return f"{head} (a dataset). To write a config for the files in it: llmsys init {name}"


def list_config_names() -> list[str]:
    """Return every config name that can replace a path.

    Returns:
        Names such as `train/demo`, sorted.
    """
    return list(list_config_files())


def list_config_files() -> dict[str, Path]:
    """Return the file of every config name.

    Returns:
        Paths by name, sorted by name.
    """
    # the first root wins, as in find_config
    files = {
        _format_config_name(path, root): path
        for root in reversed(list_config_roots())
        for path in _list_config_files(root, "*.yaml")
    }
    return dict(sorted(files.items()))


def _list_config_files(root: Path, pattern: str) -> list[Path]:
    """Return the matching config files of runs and models below a folder, sorted."""
    # Language profiles have names of their own and are not configs.
    return sorted(path for path in root.rglob(pattern) if root / PROFILES not in path.parents)


def format_path(path: Path) -> str:
    """Return a path for messages.

    Args:
        path: any path.

    Returns:
        The path relative to the working directory if it is below it, otherwise the path itself.
    """
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _format_config_name(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def _format_name_hint(name: str) -> str:
    known = list_config_names()
    stem = name.removesuffix(".yaml").removesuffix(".yml").removeprefix("configs/")
    by_stem = {known_name.rpartition("/")[2]: known_name for known_name in reversed(known)}
    close = difflib.get_close_matches(stem, known, n=1, cutoff=0.7)
    close = close or [by_stem[word] for word in difflib.get_close_matches(stem, by_stem, n=1, cutoff=0.7)]
    if close:
        return f"Did you mean {close[0]}?"
    return "Give the path of a YAML file, or a name that llmsys list configs or llmsys list models prints."

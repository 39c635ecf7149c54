"""Find config files by path, by the folder of a config.json, or by name below a configs folder.

Search order: the folder of the referring file (or the working directory), ./configs, the checkout, and the copy
installed with the package.
"""

import difflib
from pathlib import Path

import llmsys
from llmsys.errors import ConfigError
from llmsys.local_path import require_local_path

PROFILES = "data/languages"


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
        name: a path, a folder with a config.json, or a config name such as `train/demo`.
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
        # The folder of a Hugging Face model stands for its config.json.
        for candidate in (root / name, root / f"{name}.yaml", root / name / "config.json"):
            if candidate.is_file():
                return candidate.resolve()
    for root in list_config_roots():
        matches = _list_config_files(root, f"{Path(name).name}.yaml") if "/" not in name else []
        if len(matches) == 1:
            return matches[0].resolve()
        if matches:
            names = ", ".join(_format_config_name(match, root) for match in matches)
            raise ConfigError(f"{origin}{name!r} is ambiguous: {names}. Use one of these.")
    if (folder / name).is_dir():
        raise ConfigError(f"{origin}{name} is a folder without a config.json. Give the path of a file.")
    raise ConfigError(
        f"{origin}config {name!r} was not found: neither a file nor a name under configs/. {_format_name_hint(name)}"
    )


def list_config_names() -> list[str]:
    """Return every config name that can replace a path, such as `train/demo`, sorted."""
    return sorted(
        {_format_config_name(path, root) for root in list_config_roots() for path in _list_config_files(root, "*.yaml")}
    )


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
    stem = name.removesuffix(".yaml").removeprefix("configs/")
    by_stem = [
        known_name
        for known_name in known
        if difflib.SequenceMatcher(None, stem, known_name.rpartition("/")[2]).ratio() > 0.6
    ]
    close = difflib.get_close_matches(stem, known, n=1) or by_stem[:1]
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known names: {', '.join(known)}." if known else "Give the path of a YAML file."

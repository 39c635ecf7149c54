"""Where configs are found: a path, a folder with a config.json, or a name below one of the configs folders.

Looks beside the file that names them (or in the working directory), then in ./configs, in the checkout and in the copy
that is installed with the package.
"""

import difflib
from pathlib import Path

import llmsys
from llmsys.errors import ConfigError
from llmsys.local_path import require_local_path

PROFILES = "data/languages"


def list_config_roots() -> list[Path]:
    """The folders whose files can be named, first match wins; each once."""
    package = Path(llmsys.__file__).resolve().parent
    wanted = [Path("configs").resolve(), package.parent / "configs", package / "configs"]
    return [root for i, root in enumerate(wanted) if root.is_dir() and root not in wanted[:i]]


def find_config(name: str, folder: Path, asked_by: str = "") -> Path:
    """The file that `name` means when it stands in a file of `folder`.

    Raises ConfigError with the closest names when there is none, or with all of them when there are several.
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
            raise ConfigError(f"{origin}{name!r} could be any of {names}. Write one of these.")
    if (folder / name).is_dir():
        raise ConfigError(f"{origin}{name} is a folder without a config.json. Give the path of a file.")
    raise ConfigError(
        f"{origin}there is no config {name!r}: no such file, and no such name below configs/. {_format_name_hint(name)}"
    )


def list_config_names() -> list[str]:
    """Every name that can be used instead of a path, such as `train/demo`."""
    return sorted(
        {_format_config_name(path, root) for root in list_config_roots() for path in _list_config_files(root, "*.yaml")}
    )


def _list_config_files(root: Path, pattern: str) -> list[Path]:
    """The files below a folder that describe runs and models; language profiles are named by what needs them."""
    return sorted(path for path in root.rglob(pattern) if root / PROFILES not in path.parents)


def format_path(path: Path) -> str:
    """A path as messages show it: relative to the working directory where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _format_config_name(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").as_posix()


def _format_name_hint(name: str) -> str:
    known = list_config_names()
    stem = name.removesuffix(".yaml").removeprefix("configs/")
    by_stem = [one for one in known if difflib.SequenceMatcher(None, stem, one.rpartition("/")[2]).ratio() > 0.6]
    close = difflib.get_close_matches(stem, known, n=1) or by_stem[:1]
    if close:
        return f"Did you mean {close[0]}?"
    return f"Known names: {', '.join(known)}." if known else "Give the path of a YAML file."

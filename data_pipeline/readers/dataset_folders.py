"""Find the files of a split in a folder of Hugging Face's datasets, local or remote
(hf://datasets/OWNER/NAME).

Reads the names of the files, and dataset_dict.json and state.json of a folder that `save_to_disk`
wrote, or the `configs` in the head of README.md of a repository of the hub. Without them splits
follow from names, as in the library: train-00000-of-00003.parquet, or a folder or word such as
`validation`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from llmsys.errors import DataError

README = "README.md"
DICT = "dataset_dict.json"
STATE = "state.json"
ABOUT = (README, DICT, STATE, "dataset_info.json", "dataset_infos.json")
TRAIN = "train"
_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(?:^|/)([^/]+?)-\d{5}-of-\d{5}[^/]*$")


@dataclass(frozen=True)
class DatasetFolder:
    """The files of a folder.

    Attributes:
        title: its path or URL, for messages.
        names: paths of its files relative to it, with `/`.
        read_text: returns the text of one of them.
    """

    title: str
    names: Sequence[str]
    read_text: Callable[[str], str]

    def is_dataset(self) -> bool:
        """Return whether files of the library describe its contents."""
        return DICT in self.names or STATE in self.names or bool(self.read_subsets())

    def read_subsets(self) -> list[dict[str, Any]]:
        """Return the `configs` of the head of README.md; [] without them."""
        text = self.read_text(README) if README in self.names else ""
        head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        try:
            values = yaml.safe_load(head[1]) if head else {}
        except yaml.YAMLError:
            return []
        found = values.get("configs") if isinstance(values, dict) else None
        entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return [one for one in entries if one.get("data_files") or one.get("data_dir")]


def open_local_folder(path: str) -> DatasetFolder:
    """Return the files of a local folder, hidden ones excepted.

    Args:
        path: the folder.

    Returns:
        Names of its files and of those below it, and how to read them.
    """
    names = [
        os.path.relpath(os.path.join(parent, name), path) for parent, name in _iter_files(path)
    ]

    def read_text(name: str) -> str:
        with open(os.path.join(path, name), encoding="utf-8", errors="replace") as file:
            return file.read()

    return DatasetFolder(path, sorted(names), read_text)


def _iter_files(top: str) -> Iterator[tuple[str, str]]:
    for parent, below, names in os.walk(top):
        below[:] = [name for name in below if not name.startswith(".")]
        yield from ((parent, name) for name in names if not name.startswith("."))


def list_split_files(
    folder: DatasetFolder, split: str, subset: str, where: str, endings: Sequence[str]
) -> list[str]:
    """Return the files of one split.

    Args:
        folder: the files of a dataset.
        split: its name; "" for `train`, or for the only one.
        subset: name of a subset; "" for the default one.
        where: key of the input, for messages.
        endings: parts of names of files that can be read.

    Returns:
        Names relative to the folder, sorted.

    Raises:
        DataError: there is no such split or subset, or no file of it can be read.
    """
    splits = list_splits(folder, subset, where)
    chosen = split or (TRAIN if TRAIN in splits or len(splits) != 1 else next(iter(splits)))
    if chosen not in splits:
        known = ", ".join(sorted(splits)) or "none"
        raise DataError(
            f"{where}: {folder.title} has no split {chosen!r}; it has {known}. Give one: "
            f"{{path: {folder.title}, split: {min(splits, default=TRAIN)}}}."
        )
    names = sorted(splits[chosen])
    if readable := [
        name for name in names if any(end in os.path.basename(name) for end in endings)
    ]:
        return readable
    there = names[0] if names else "no files"
    raise DataError(
        f"{where}: split {chosen!r} of {folder.title} has no files to read: {there}. Write it as "
        "parquet or JSON lines, such as with to_parquet of the datasets library."
    )


def list_splits(folder: DatasetFolder, subset: str, where: str) -> dict[str, list[str]]:
    """Return the files of each split of a subset.

    Args:
        folder: the files of a dataset.
        subset: name of the subset; "" for the default one.
        where: key of the input, for messages.

    Returns:
        Names relative to the folder, by split.

    Raises:
        DataError: there is no such subset, or the folder is incomplete.
    """
    if DICT in folder.names or STATE in folder.names:
        if subset:
            raise DataError(
                f"{where}: {folder.title} was written by save_to_disk and has no subsets. Leave "
                "subset out."
            )
        return _list_saved_splits(folder, where)
    subsets = folder.read_subsets()
    if not subsets:
        if subset:
            raise DataError(
                f"{where}: {folder.title} names no subsets in its {README}. Give the files of "
                f"{subset!r} as a pattern."
            )
        return _split_by_name(folder.names)
    by_name = {str(one.get("config_name", "default")): one for one in subsets}
    default = next((name for name, one in by_name.items() if one.get("default")), None)
    name = (
        subset
        or default
        or ("default" if "default" in by_name or len(by_name) > 1 else next(iter(by_name)))
    )
    if name not in by_name:
        known = ", ".join(by_name)
        raise DataError(
            f"{where}: {folder.title} has no subset {name!r}; it has {known}. Give one: "
            f"{{path: {folder.title}, subset: {next(iter(by_name))}}}."
        )
    return _match_data_files(folder.names, by_name[name])


def _list_saved_splits(folder: DatasetFolder, where: str) -> dict[str, list[str]]:
    """Return the files of each split of a folder that `save_to_disk` wrote."""
    if DICT in folder.names:
        names = json.loads(folder.read_text(DICT))["splits"]
        return {name: _list_saved_files(folder, f"{name}/", where) for name in names}
    state = json.loads(folder.read_text(STATE))
    return {str(state.get("_split") or TRAIN): _list_saved_files(folder, "", where)}


def _list_saved_files(folder: DatasetFolder, prefix: str, where: str) -> list[str]:
    if prefix + STATE not in folder.names:
        raise DataError(
            f"{where}: {folder.title} lacks {prefix}{STATE}, so it is incomplete. Write it again."
        )
    state = json.loads(folder.read_text(prefix + STATE))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{where}: {folder.title} holds rows and a selection of them (indices). Save it after "
            "flatten_indices()."
        )
    return [prefix + str(file["filename"]) for file in state["_data_files"]]


def _match_data_files(names: Sequence[str], subset: dict[str, Any]) -> dict[str, list[str]]:
    """Return the files of each split of an entry of `configs`."""
    prefix = f"{str(subset['data_dir']).strip('/')}/" if subset.get("data_dir") else ""
    data_files = subset.get("data_files")
    if not data_files:
        return _split_by_name([name for name in names if name.startswith(prefix)])
    if isinstance(data_files, dict):
        pairs = list(data_files.items())
    else:
        listed = data_files if isinstance(data_files, list) else [data_files]
        pairs = [
            (one.get("split", TRAIN), one["path"]) if isinstance(one, dict) else (TRAIN, one)
            for one in listed
        ]
    splits: dict[str, list[str]] = {}
    for split, patterns in pairs:
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            match = _compile_pattern(prefix + str(pattern).removeprefix("./"))
            splits.setdefault(str(split), []).extend(
                name for name in names if match.fullmatch(name)
            )
    return splits


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a glob pattern as an expression: `**/` any folders, `*` and `?` within a name."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    return re.compile(
        "".join(
            tokens.get(part) or (part if part[:1] == "[" else re.escape(part)) for part in parts
        )
    )


def _split_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by words in their paths; all are `train` where no path has
    such a word.
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        if split := _find_split_word(name):
            splits.setdefault(split, []).append(name)
    return splits or {TRAIN: [name for name in names if name not in ABOUT]}


def _find_split_word(name: str) -> str | None:
    if found := _SHARD.search(name):
        return _WORDS.get(found[1].lower(), found[1])
    words = re.split(r"[^a-z0-9]+", os.path.splitext(name.lower())[0])
    return next((_WORDS[word] for word in words if word in _WORDS), None)

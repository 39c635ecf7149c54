"""The index of a dataset: what later datasets compare their documents with, and the reading of earlier ones.

Reads `index/`: the ids of the documents that stay, numbered through, and their sorted keys of URL, text and MinHash
buckets, one file per range; `index.json` names all files with their digests and the MinHash parameters. Promises: a
file that is not what the index says is refused before it is used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.keys import Columns, read_range, take_rows
from llmsys.config.deduplication import DeduplicationConfig, MinHashDedupConfig
from llmsys.errors import DataError

INDEX = "index"
INDEX_FILE = "index.json"
INDEX_KEY_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64()), ("row", pa.int64())])
_FORMAT = 2


@dataclass(frozen=True)
class EarlierDataset:
    """One dataset that was prepared before, as its index describes it; picklable.

    Attributes:
        name: the name of the dataset.
        documents: files of ids, whose documents are numbered through.
        rows: how many documents there are.
        keys: the key files of each relation ("url", "text", "near"); their rows are numbers of documents.
        digest: of its `index.json`: what the tasks that read it depend on.
    """

    name: str
    documents: tuple[Path, ...]
    rows: int
    keys: Mapping[str, tuple[Path, ...]]
    digest: str


def describe_index(
    name: str,
    rows: Mapping[str, int],
    keys: Mapping[str, Sequence[str]],
    digests: Mapping[str, str],
    config: DeduplicationConfig,
    by_characters: Mapping[str, bool],
) -> Any:
    """Return what `index.json` says: rows of the files of ids, key files by relation, digests of all, parameters."""
    documents = [{"name": file, "rows": count} for file, count in rows.items()]
    top = {
        "format": _FORMAT,
        "dataset": name,
        "minhash": get_minhash_parameters(config),
        "by_characters": by_characters,
    }
    return {**top, "documents": documents, "keys": keys, "files": digests}


def load_earlier_dataset(
    folder: Path, config: DeduplicationConfig, by_characters: Mapping[str, bool], digest_of_file: Callable[[Path], str]
) -> EarlierDataset:
    """Open the index of a dataset folder; DataError when there is none or it cannot be compared with."""
    path = folder / INDEX / INDEX_FILE
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError
        name, files, theirs = content["dataset"], content["files"], dict(content["by_characters"])
        documents = {folder / INDEX / part["name"]: int(part["rows"]) for part in content["documents"]}
        keys = {kind: tuple(folder / INDEX / name for name in names) for kind, names in content["keys"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{folder} has no index that data.deduplicate.earlier_datasets could read (format {_FORMAT}). "
            f"Prepare it with data.deduplicate.index.kind=kept, or take it out of the list."
        ) from None
    _require_relations(folder, content, config)
    _require_same_words(folder, theirs, by_characters)
    for file, digest in files.items():
        if digest_of_file(folder / INDEX / file) != digest:
            raise DataError(
                f"{folder / INDEX / file} is not what {path} says: it was damaged or changed. "
                f"Delete it and run llmsys prepare with the config of that dataset again."
            )
    return EarlierDataset(name, tuple(documents), sum(documents.values()), keys, digest_of_file(path))


def _require_relations(folder: Path, content: dict[str, Any], config: DeduplicationConfig) -> None:
    """Refuse an index without a relation that is asked for, or with other MinHash parameters."""
    wanted = {"url": config.url.kind, "text": config.exact.kind, "near": config.minhash.kind}
    missing = [relation for relation, kind in wanted.items() if kind != "none" and relation not in content["keys"]]
    if missing:
        raise DataError(
            f"the index of {folder} holds {', '.join(sorted(content['keys'])) or 'nothing'}, but no {missing[0]} keys. "
            f"Prepare that dataset with the same data.deduplicate, or turn this comparison off."
        )
    if isinstance(config.minhash, MinHashDedupConfig) and content["minhash"] != get_minhash_parameters(config):
        raise DataError(
            f"the index of {folder} was made with data.deduplicate.minhash {content['minhash']}, "
            f"this config says {get_minhash_parameters(config)}. Use the same values in both."
        )


def _require_same_words(folder: Path, theirs: Mapping[str, bool], ours: Mapping[str, bool]) -> None:
    """Refuse an index in which a language was compared by characters and here is by words, or the reverse."""
    other = [code for code in sorted(theirs.keys() & ours.keys()) if theirs[code] != ours[code]]
    if other:
        raise DataError(
            f"the index of {folder} was made with near duplicates in {', '.join(other)} found by "
            f"{'characters' if theirs[other[0]] else 'words'}, and this config's data.language.profiles ask for "
            f"{'characters' if ours[other[0]] else 'words'}. Use the same profiles in both."
        )


def get_minhash_parameters(config: DeduplicationConfig) -> dict[str, Any] | None:
    """What must be equal for MinHash keys to be comparable."""
    return config.minhash.model_dump(mode="json") if isinstance(config.minhash, MinHashDedupConfig) else None


def read_earlier_items(
    earlier: Sequence[EarlierDataset], relation: str, number: int, ranges: int, wanted: np.ndarray[Any, Any]
) -> Columns:
    """Return the items of one range of earlier datasets whose keys are among the wanted ones.

    Their source is the number of the dataset, their row the number of the document in it.
    """
    wanted = np.unique(wanted)
    parts: list[Columns] = []
    for place, dataset in enumerate(earlier):
        for path in dataset.keys[relation]:
            parts += [
                _to_items(take_rows(found, np.isin(found["high"], wanted)), place)
                for found in read_range(path, number, ranges)
            ]
    names = ("high", "low", "rank", "tie", "row", "place", "source", "age")
    return {name: np.concatenate([np.zeros(0, np.uint8), *(part[name] for part in parts)]) for name in names}


def _to_items(found: Columns, dataset: int) -> Columns:
    count = len(found["high"])
    zeros = np.zeros(count, np.uint64)
    return {
        **{"high": found["high"], "low": found["low"], "rank": zeros, "tie": zeros, "row": found["row"]},
        **{"place": zeros, "source": np.full(count, dataset), "age": np.zeros(count, np.uint8)},
    }

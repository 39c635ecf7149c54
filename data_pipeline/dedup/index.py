"""The index of a dataset: what later datasets compare their documents with, and the reading of earlier ones.

Writes and reads `index/`: per judged file the ids of the documents that stay and their sorted keys of URL, text and
MinHash buckets, and `index.json`, which names all files with their digests and the MinHash parameters. Promises: a
file that is not what the index says is refused before it is used.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dedup.keys import Columns, read_range, taken
from llmsys.config.deduplicate import DeduplicateConfig, MinhashDuplicates
from llmsys.errors import DataError

INDEX = "index"
INDEX_FILE = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class IndexPart:
    """The documents of one file and the relations they have keys for."""

    name: str
    rows: int
    relations: tuple[str, ...]


@dataclass(frozen=True)
class EarlierDataset:
    """One dataset that was prepared before, as its index describes it; picklable.

    Attributes:
        name: the name of the dataset.
        folder: its `index/`.
        parts: in order; documents are numbered through all of them.
        digest: of its `index.json`: what the tasks that read it depend on.
    """

    name: str
    folder: Path
    parts: tuple[IndexPart, ...]
    digest: str

    @property
    def rows(self) -> int:
        """Number of documents."""
        return sum(part.rows for part in self.parts)

    def documents(self) -> list[Path]:
        """The files of ids, one per part."""
        return [self._path(part, "documents") for part in self.parts]

    def keys(self, relation: str) -> list[tuple[Path, int]]:
        """The key files of a relation, each with the number of its first document."""
        starts = np.cumsum([0, *(part.rows for part in self.parts)]).tolist()
        return [
            (self._path(part, relation), start)
            for part, start in zip(self.parts, starts, strict=False)
            if relation in part.relations
        ]

    def _path(self, part: IndexPart, relation: str) -> Path:
        return self.folder / index_name(part.name, relation)


def index_name(part: str, relation: str) -> str:
    """Return the name of a file of an index."""
    return f"{part}.{relation}.arrow"


def index_content(name: str, parts: Sequence[IndexPart], files: dict[str, str], config: DeduplicateConfig) -> Any:
    """Return what `index.json` says: parts, digests of files, and what comparisons need to agree on."""
    described = [{"name": part.name, "rows": part.rows, "relations": list(part.relations)} for part in parts]
    relations = sorted({relation for part in parts for relation in part.relations})
    minhash = minhash_identity(config)
    top = {"format": FORMAT, "dataset": name, "relations": relations, "minhash": minhash}
    return {**top, "parts": described, "files": files}


def open_earlier(folder: Path, config: DeduplicateConfig, digest_of_file: Callable[[Path], str]) -> EarlierDataset:
    """Open the index of a dataset folder; DataError when there is none or it cannot be compared with."""
    path = folder / INDEX / INDEX_FILE
    try:
        content = json.loads(path.read_bytes())
        name, files = content["dataset"], content["files"]
        parts = tuple(IndexPart(part["name"], part["rows"], tuple(part["relations"])) for part in content["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder} has no index that data.deduplicate.against could read. "
            f"Prepare it with data.deduplicate.index.kind=kept, or take it out of the list."
        ) from None
    _require_relations(folder, content, config)
    for file, digest in files.items():
        if digest_of_file(folder / INDEX / file) != digest:
            raise DataError(
                f"{folder / INDEX / file} is not what {path} says: it was damaged or changed. "
                f"Delete it and run llmsys prepare with the config of that dataset again."
            )
    return EarlierDataset(name, folder / INDEX, parts, digest_of_file(path))


def _require_relations(folder: Path, content: dict[str, Any], config: DeduplicateConfig) -> None:
    """Refuse an index without a relation that is asked for, or with other MinHash parameters."""
    wanted = {"url": config.url.kind, "text": config.exact.kind, "near": config.minhash.kind}
    missing = [relation for relation, kind in wanted.items() if kind != "none" and relation not in content["relations"]]
    if missing:
        raise DataError(
            f"the index of {folder} holds {', '.join(content['relations']) or 'nothing'}, but no {missing[0]} keys. "
            f"Prepare that dataset with the same data.deduplicate, or turn this comparison off."
        )
    if isinstance(config.minhash, MinhashDuplicates) and content["minhash"] != minhash_identity(config):
        raise DataError(
            f"the index of {folder} was made with data.deduplicate.minhash {content['minhash']}, "
            f"this config says {minhash_identity(config)}. Use the same values in both."
        )


def minhash_identity(config: DeduplicateConfig) -> dict[str, Any] | None:
    """What must be equal for MinHash keys to be comparable."""
    return config.minhash.model_dump(mode="json") if isinstance(config.minhash, MinhashDuplicates) else None


def earlier_items(
    earlier: Sequence[EarlierDataset], relation: str, number: int, ranges: int, wanted: np.ndarray[Any, Any]
) -> Columns:
    """Return the items of one range of earlier datasets whose keys are among the wanted ones.

    Their source is the number of the dataset, their row the number of the document in it.
    """
    wanted = np.unique(wanted)
    parts: list[Columns] = []
    for place, dataset in enumerate(earlier):
        for path, start in dataset.keys(relation):
            parts += [
                _as_items(taken(found, np.isin(found["high"], wanted)), place, start)
                for found in read_range(path, number, ranges)
            ]
    names = ("high", "low", "rank", "tie", "row", "place", "source", "age")
    return {name: np.concatenate([np.zeros(0, np.uint8), *(part[name] for part in parts)]) for name in names}


def _as_items(found: Columns, dataset: int, start: int) -> Columns:
    count = len(found["high"])
    zeros = np.zeros(count, np.uint64)
    return {
        **{"high": found["high"], "low": found["low"], "rank": zeros, "tie": zeros, "row": found["row"] + start},
        **{"place": zeros, "source": np.full(count, dataset), "age": np.zeros(count, np.uint8)},
    }

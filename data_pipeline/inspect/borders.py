"""The documents nearest to each threshold, dropped and kept, from what a prepared dataset stores.

Reads the statistics in documents/ and the values in dropped/ batch by batch, and the texts of the few that are shown;
gives a `Border` per test. Promises: which documents are shown depends on the dataset alone, by distance to their
threshold and then by id; the memory it takes does not grow with the dataset.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from data_pipeline.funnel import EXAMPLE_CHARACTERS
from data_pipeline.inspect.nearest import Floats, Found, NearSide, Place
from data_pipeline.language.code import known_codes
from data_pipeline.rules.chain import limits_of
from data_pipeline.rules.verdict import Limit
from llmsys.config.language import LanguageConfig
from llmsys.config.language_profile import DEFAULT, LanguageProfile
from llmsys.config.profiles import language_profiles
from llmsys.config.text import RuleConfig
from llmsys.manifest import Manifest, load_manifest
from llmsys.shard_file import read_columns
from llmsys.threshold import Border, NearThreshold, Side

Key = tuple[str, str, str]  # rule, test, above or below

_RULE: TypeAdapter[Any] = TypeAdapter(RuleConfig)
_DROPPED = ("id", "rule", "test", "value", "threshold", "bytes")


def borders(folder: Path) -> tuple[Border, ...]:
    """Return every test of language and rules that has a threshold, in the order of the funnel.

    DataError when files of the dataset are missing or damaged; ConfigError when a profile that it was made with is.
    """
    manifest = load_manifest(folder)
    if not manifest.config.get("data", {}).get("language"):
        return ()  # pairs and labelled texts go through no rules
    limits = _Limits(manifest)
    kept: dict[Key, NearSide] = {key: NearSide() for key in limits.tests()}
    dropped: dict[Key, NearSide] = {}
    for entry in manifest.documents.files:
        _read_kept(folder / "documents" / entry.name, limits, kept)
    for entry in manifest.dropped.files:
        _read_dropped(folder / "dropped" / entry.name, dropped)
    stages = {stage.stage: number for number, stage in enumerate(manifest.funnel)}
    asked = {key: None for key in (*kept, *dropped) if key[0] in limits.rules}
    keys = sorted(asked, key=lambda key: stages.get(key[0], len(stages)))
    texts = _texts([one for key in keys for sides in (kept, dropped) for one in sides.get(key, NearSide()).nearest])
    made = [_border(key, dropped.get(key, NearSide()), kept.get(key, NearSide()), texts) for key in keys]
    return tuple(one for one in made if one.dropped.documents or one.kept.documents)


class _Limits:
    """The tests of each language that compare a stored statistic with a threshold."""

    def __init__(self, manifest: Manifest) -> None:
        data = manifest.config["data"]
        self._rules = [_RULE.validate_python(rule) for rule in data["rules"]]
        self._language = LanguageConfig.model_validate(data["language"])
        self._profiles: dict[str, LanguageProfile] = {}
        if self._rules:
            self._profiles = language_profiles(self._language, known_codes(self._language.kind))
        self._of: dict[str, list[tuple[Key, str, float]]] = {}
        self.rules = {"language", *(rule.kind for rule in self._rules)}

    def tests(self) -> Iterable[Key]:
        """Every test, in the order in which it is asked, whether or not a document came to it."""
        return [key for key, _, _ in self.of(self._language.keep[0] if self._language.keep else DEFAULT)]

    def of(self, code: str) -> list[tuple[Key, str, float]]:
        """Test, column and threshold for documents in one language."""
        if code not in self._of:
            self._of[code] = list(self._made(code))
        return self._of[code]

    def _made(self, code: str) -> Iterator[tuple[Key, str, float]]:
        yield ("language", "score", "below"), "language_score", self._language.minimum_score
        profile = self._profiles.get(code) or self._profiles.get(DEFAULT)
        for rule in self._rules:
            for limit in limits_of(profile.rule(rule) if profile else rule, code):
                if _can_drop(limit):
                    yield (rule.kind, limit.test, limit.drops), f"{rule.kind}.{limit.statistic}", limit.threshold


def _can_drop(limit: Limit) -> bool:
    """Whether there is a threshold at all: none is infinite, and nothing counted or shared lies below zero."""
    return bool(np.isfinite(limit.threshold)) and not (limit.drops == "below" and limit.threshold == 0)


def _read_kept(path: Path, limits: _Limits, sides: dict[Key, NearSide]) -> None:
    """Take in the documents that stayed, each beside the thresholds of its language."""
    for number, batch in enumerate(read_columns(path, lambda name: name in ("id", "language") or _measured(name))):
        place = Place(path, number, batch.column("id"))
        codes = batch.column("language").to_numpy(zero_copy_only=False)
        for code in sorted(set(codes.tolist())):
            rows = np.flatnonzero(codes == code)
            for key, column, threshold in limits.of(code):
                if column not in batch.schema.names:
                    continue
                values = _floats(batch, column)[rows]
                known = np.isfinite(values)
                side = sides.setdefault(key, NearSide())
                side.add(values[known], np.full(int(known.sum()), threshold), rows[known], place)


def _measured(name: str) -> bool:
    return "." in name or name == "language_score"


def _read_dropped(path: Path, sides: dict[Key, NearSide]) -> None:
    """Take in the documents that were dropped by a value, each beside the threshold it was compared with."""
    for number, batch in enumerate(read_columns(path, _DROPPED.__contains__)):
        place = Place(path, number, batch.column("id"))
        values, thresholds, sizes = (_floats(batch, name) for name in ("value", "threshold", "bytes"))
        names = pc.binary_join_element_wise(batch.column("rule"), batch.column("test"), "\0").to_numpy(
            zero_copy_only=False
        )
        known = np.isfinite(values) & np.isfinite(thresholds)
        for name in sorted(set(names[known].tolist())):
            for drops, beyond in (("above", values > thresholds), ("below", values <= thresholds)):
                rows = np.flatnonzero(known & beyond & (names == name))
                if len(rows):
                    rule, _, test = name.partition("\0")
                    side = sides.setdefault((rule, test, drops), NearSide())
                    side.add(values[rows], thresholds[rows], rows, place)
                    side.bytes += int(sizes[rows].sum())


def _floats(batch: pa.RecordBatch, name: str) -> Floats:
    """A column of numbers, NaN where it has none."""
    values = batch.column(name).to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float64)


def _texts(found: Sequence[Found]) -> dict[tuple[Path, int, int], tuple[str, str]]:
    """URL and excerpt of the documents that are shown, by their place."""
    wanted: dict[tuple[Path, int], set[int]] = {}
    for one in found:
        wanted.setdefault((one.path, one.batch), set()).add(one.row)
    texts = {}
    for (path, number), rows in wanted.items():
        batch = next(iter(read_columns(path, ("url", "text").__contains__, [number])))
        for row in rows:
            url, text = (batch.column(name)[row].as_py() or "" for name in ("url", "text"))
            texts[path, number, row] = (url, text[:EXAMPLE_CHARACTERS] + "…" * (len(text) > EXAMPLE_CHARACTERS))
    return texts


def _border(key: Key, dropped: NearSide, kept: NearSide, texts: dict[tuple[Path, int, int], tuple[str, str]]) -> Border:
    def side(one: NearSide) -> Side:
        nearest = tuple(
            NearThreshold(near.id, url, near.value, near.threshold, excerpt)
            for near in one.nearest
            for url, excerpt in [texts[near.path, near.batch, near.row]]
        )
        return Side(one.documents, one.bytes, one.close, nearest)

    drops = cast(Literal["above", "below"], key[2])
    thresholds = tuple(sorted(dropped.thresholds | kept.thresholds))
    return Border(key[0], key[1], drops, thresholds, side(dropped), side(kept))

"""Several datasets as one run of windows: which source sequence n comes from, exactly and without counting from 0.

Reads the whole parts of each stage (see `llmsys.config.mixture`), gives the source of every sequence and its number
within that source. Promises that after n sequences of a stage each source has had n · weight of them, rounded up or
down, and nothing but (fingerprints, seed, n) decides what sequence n is.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.data.packed_windows import PackedDocuments, WindowBatch
from llmsys.errors import ConfigError
from llmsys.manifest import combine_fingerprints

# N sequences, K sources, P places of a period

Stages = Sequence[tuple[int, tuple[int, ...]]]
"""(first sequence, whole parts of each source) of every stage, the first from 0."""


@lru_cache(maxsize=64)
def build_period_order(parts: tuple[int, ...]) -> NDArray[np.int64]:
    """The source at each place of a period in which source k stands parts[k] times, (P,).

    Before place n source k stands floor(n · w) or ceil(n · w) times, w being its share. Its m-th place is therefore one
    from which n · w > m - 1, and no later than n · w >= m; of those that may stand here the one whose time runs out
    first is taken, which is known to succeed for jobs of one slot on one machine (Tijdeman 1980, "The chairman
    assignment problem"; Baruah 1996).
    """
    period, counts = sum(parts), [0] * len(parts)
    order = np.empty(period, np.int64)
    for place in range(period):
        late = [
            (-(-(count + 1) * period // part), source)
            for source, (count, part) in enumerate(zip(counts, parts, strict=True))
            if count * period < (place + 1) * part
        ]
        order[place] = chosen = min(late)[1]
        counts[chosen] += 1
    return order


class MixtureOrder:
    """The source of every sequence of a run, over stages with weights of their own."""

    def __init__(self, stages: Stages) -> None:
        self.starts = np.array([first for first, _ in stages])
        self.parts = [np.array(parts) for _, parts in stages]
        self._orders = [build_period_order(tuple(parts)) for _, parts in stages]
        # Which of its source's places in the period each place is.
        self._ranks = [_rank_among_equals(order) for order in self._orders]
        self._bases = [np.zeros(len(self.parts[0]), np.int64)]
        for stage in range(len(stages) - 1):
            self._bases.append(
                self._bases[-1] + self._count_within_stage(stage, int(self.starts[stage + 1] - self.starts[stage]))
            )

    def locate_sequences(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, number of the sequence within it) of each sequence, (N,) both."""
        stages = np.searchsorted(self.starts, numbers, side="right") - 1
        sources, local = np.empty_like(numbers), np.empty_like(numbers)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            rounds, places = np.divmod(numbers[here] - self.starts[stage], len(self._orders[stage]))
            sources[here] = found = self._orders[stage][places]
            local[here] = self._bases[stage][found] + rounds * self.parts[stage][found] + self._ranks[stage][places]
        return sources, local

    def get_global_numbers(self, source: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences that are number `local` of a source: the inverse of `locate_sequences`, (N,)."""
        bases = np.array([base[source] for base in self._bases])
        stages = np.searchsorted(bases, local, side="right") - 1
        found = np.empty_like(local)
        for stage in np.unique(stages).tolist():
            here, places = stages == stage, np.flatnonzero(self._orders[stage] == source)
            rounds, ranks = np.divmod(local[here] - bases[stage], len(places))
            found[here] = self.starts[stage] + rounds * len(self._orders[stage]) + places[ranks]
        return found

    def count_by_source(self, count: int) -> NDArray[np.int64]:
        """How many of the first `count` sequences come from each source, (K,)."""
        stage = int(np.searchsorted(self.starts, count, side="right")) - 1
        return self._bases[stage] + self._count_within_stage(stage, count - int(self.starts[stage]))

    def _count_within_stage(self, stage: int, count: int) -> NDArray[np.int64]:
        rounds, places = divmod(count, len(self._orders[stage]))
        part: NDArray[np.int64] = np.bincount(self._orders[stage][:places], minlength=len(self.parts[stage]))
        return rounds * self.parts[stage] + part


def _rank_among_equals(values: NDArray[np.int64]) -> NDArray[np.int64]:
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    ranks = np.empty_like(values)
    ranks[by_value] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return ranks


class MixtureWindows:
    """Windows of several datasets in the order of a `MixtureOrder`; each source has epochs of its own."""

    def __init__(self, sources: Sequence[PackedDocuments], names: Sequence[str], stages: Stages) -> None:
        self.sources, self.names, self.order = list(sources), list(names), MixtureOrder(stages)
        self.length = sources[0].length
        prints = [source.fingerprint for source in sources]
        for number, (name, one) in enumerate(zip(names, prints, strict=True)):
            if one in prints[:number]:
                raise ConfigError(
                    f"{name} and {names[prints.index(one)]} hold the same tokens (fingerprint {one}), and both would "
                    f"be read in the same order. Keep one of them and add up the weights."
                )

    @property
    def fingerprint(self) -> str:
        """See Windows: of all sources in their order."""
        return combine_fingerprints([source.fingerprint for source in self.sources])

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """See Windows."""
        numbers = np.asarray(numbers, np.int64)
        found = WindowBatch(*(np.empty((len(numbers), self.length + 1), np.int64) for _ in range(2)))
        sources, local = self.order.locate_sequences(numbers)
        for source in np.unique(sources).tolist():
            here = sources == source
            found.tokens[here], found.documents[here] = self.sources[source].get_rows(local[here])
        return found

    def compute_attention_cost(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """See Windows."""
        sources, local = self.order.locate_sequences(np.asarray(numbers, np.int64))
        work = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            work[here] = self.sources[source].compute_attention_cost(local[here])
        return work

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """See Windows."""
        sources, local = self.order.locate_sequences(np.array([number]))
        source = int(sources[0])
        return [(source, document) for _, document in self.sources[source].list_documents(int(local[0]))]

    def get_packing_stats(self) -> dict[str, Any]:
        """See Windows: by source, since each has an epoch of its own."""
        return {"sources": {name: one.get_packing_stats() for name, one in zip(self.names, self.sources, strict=True)}}

    def get_progress(self, count: int) -> dict[str, Any]:
        """See Windows: the epochs of each source."""
        counts = self.order.count_by_source(count)
        named = zip(self.names, counts.tolist(), self.sources, strict=True)
        return {"epochs": {name: round(seen / source.windows_per_epoch, 4) for name, seen, source in named}}

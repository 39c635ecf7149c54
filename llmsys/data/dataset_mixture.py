"""Mixtures: the source of every sequence of a run that reads several datasets.

Reads the integer weights of each stage (see `llmsys.config.data`).

Invariants:
- After n sequences of a stage, each source has had n · weight of them, rounded up or down.
- The content of sequence n is a function of (fingerprints, seed, n) alone, computed without
  iterating from 0.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.data.packed_windows import SourceWindows, WindowBatch
from llmsys.data.target_documents import RowDocuments
from llmsys.dataset.manifest import combine_fingerprints
from llmsys.errors import ConfigError

# N sequences, K sources, P positions of a period

# (first sequence, integer weight of each source) of every stage; the first stage begins at 0.
Stages = Sequence[tuple[int, tuple[int, ...]]]


@lru_cache(maxsize=64)
def build_period_order(parts: tuple[int, ...]) -> NDArray[np.int64]:
    """Interleave sources so that each has its share after any number of sequences.

    Before position n source k has appeared floor(n · w) or ceil(n · w) times, with w its share.
    So its m-th position is one with n · w > m - 1, and no later than n · w >= m. Among the
    sources that may appear, take the one with the earliest deadline, which is optimal for unit
    jobs on one machine (Tijdeman 1980, "The chairman assignment problem"; Baruah 1996).

    Args:
        parts: How often each source appears in a period.

    Returns:
        The source at each position of the period, int64 (sum(parts),).
    """
    period = sum(parts)
    counts = [0] * len(parts)
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
    """The source of every sequence of a run, over stages with their own weights."""

    def __init__(self, stages: Stages) -> None:
        self.starts = np.array([first for first, _ in stages])
        self.parts = [np.array(parts) for _, parts in stages]
        self._orders = [build_period_order(tuple(parts)) for _, parts in stages]
        # The index of each position among its source's positions of the period.
        self._ranks = [_rank_among_equals(order) for order in self._orders]
        self._bases = [np.zeros(len(self.parts[0]), np.int64)]
        for stage in range(len(stages) - 1):
            self._bases.append(
                self._bases[-1]
                + self._count_within_stage(stage, int(self.starts[stage + 1] - self.starts[stage]))
            )

    def locate_sequences(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the sources of sequences.

        Args:
            numbers: Numbers of sequences of the run, (N,).

        Returns:
            The source of each, and its number within that source, both (N,).
        """
        stages = np.searchsorted(self.starts, numbers, side="right") - 1
        sources = np.empty_like(numbers)
        local = np.empty_like(numbers)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            rounds, places = np.divmod(numbers[here] - self.starts[stage], len(self._orders[stage]))
            sources[here] = source = self._orders[stage][places]
            local[here] = (
                self._bases[stage][source]
                + rounds * self.parts[stage][source]
                + self._ranks[stage][places]
            )
        return sources, local

    def get_global_numbers(self, source: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find sequences by their number within a source: the inverse of `locate_sequences`.

        Args:
            source: The source.
            local: Numbers within the source, (N,).

        Returns:
            Numbers of sequences of the run, (N,).
        """
        bases = np.array([base[source] for base in self._bases])
        stages = np.searchsorted(bases, local, side="right") - 1
        numbers = np.empty_like(local)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            places = np.flatnonzero(self._orders[stage] == source)
            rounds, ranks = np.divmod(local[here] - bases[stage], len(places))
            numbers[here] = self.starts[stage] + rounds * len(self._orders[stage]) + places[ranks]
        return numbers

    def count_by_source(self, count: int) -> NDArray[np.int64]:
        """Count the sequences of each source.

        Args:
            count: The first `count` sequences of the run.

        Returns:
            (K,); each source has had its share, rounded up or down.
        """
        stage = int(np.searchsorted(self.starts, count, side="right")) - 1
        return self._bases[stage] + self._count_within_stage(stage, count - int(self.starts[stage]))

    def _count_within_stage(self, stage: int, count: int) -> NDArray[np.int64]:
        rounds, places = divmod(count, len(self._orders[stage]))
        part: NDArray[np.int64] = np.bincount(
            self._orders[stage][:places], minlength=len(self.parts[stage])
        )
        return rounds * self.parts[stage] + part


def _rank_among_equals(values: NDArray[np.int64]) -> NDArray[np.int64]:
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    ranks = np.empty_like(values)
    ranks[by_value] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return ranks


class MixtureWindows:
    """Windows of several datasets in the order of a `MixtureOrder`; each source has its own epochs.

    Args:
        sources: The windows of each source, of one length.
        names: Names of the sources, for logs.
        stages: Weights of the sources over the run.

    Raises:
        ConfigError: Two sources hold the same tokens.
    """

    def __init__(
        self, sources: Sequence[SourceWindows], names: Sequence[str], stages: Stages
    ) -> None:
        self.sources = list(sources)
        self.names = list(names)
        self.order = MixtureOrder(stages)
        self.length = sources[0].length
        prints = [source.fingerprint for source in sources]
        for number, (name, fingerprint) in enumerate(zip(names, prints, strict=True)):
            if fingerprint in prints[:number]:
                raise ConfigError(
                    f"{name} and {names[prints.index(fingerprint)]} hold the same tokens "
                    f"(fingerprint {fingerprint}), and both would be read in the same order. Keep "
                    "one of them, with the sum of the weights."
                )

    @property
    def fingerprint(self) -> str:
        """Combined fingerprint of all sources, in their order."""
        return combine_fingerprints([source.fingerprint for source in self.sources])

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """Implement `WindowDataset.get_rows`."""
        numbers = np.asarray(numbers, np.int64)
        rows = WindowBatch(*(np.empty((len(numbers), self.length + 1), np.int64) for _ in range(2)))
        sources, local = self.order.locate_sequences(numbers)
        for source in np.unique(sources).tolist():
            here = sources == source
            rows.tokens[here], rows.documents[here] = self.sources[source].get_rows(local[here])
        return rows

    def compute_attention_cost(
        self, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Implement `WindowDataset.compute_attention_cost`."""
        sources, local = self.order.locate_sequences(np.asarray(numbers, np.int64))
        costs = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            costs[here] = self.sources[source].compute_attention_cost(local[here])
        return costs

    def identify_documents(
        self, numbers: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> RowDocuments:
        """Implement `WindowDataset.identify_documents`."""
        sources, local = self.order.locate_sequences(numbers)
        rows = RowDocuments(sources, np.empty_like(sources), np.empty_like(documents))
        for source in np.unique(sources).tolist():
            here = sources == source
            found = self.sources[source].identify_documents(local[here], documents[here])
            rows.epochs_B[here] = found.epochs_B
            rows.documents_BT[here] = found.documents_BT
        return rows

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """Implement `WindowDataset.list_documents`."""
        sources, local = self.order.locate_sequences(np.array([number]))
        source = int(sources[0])
        return [
            (source, document) for _, document in self.sources[source].list_documents(int(local[0]))
        ]

    def get_packing_stats(self) -> dict[str, Any]:
        """Return the packing statistics of each source, as each has its own epoch."""
        return {
            "sources": {
                name: one.get_packing_stats()
                for name, one in zip(self.names, self.sources, strict=True)
            }
        }

    def get_progress(self, count: int) -> dict[str, Any]:
        """Return the epochs of each source."""
        counts = self.order.count_by_source(count)
        named = zip(self.names, counts.tolist(), self.sources, strict=True)
        return {
            "epochs": {
                name: round(seen / source.windows_per_epoch, 4) for name, seen, source in named
            }
        }

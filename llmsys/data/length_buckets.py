"""Length buckets: sequences of similar length grouped, and still shuffled (Vaswani 2017, 5.1).

Invariants:
- The buckets of step n are a function of (lengths, fingerprint, seed, n) alone.
- An epoch has every sequence exactly once.
- All buckets have about equally many tokens.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.errors import ConfigError

# N sequences of an epoch

# Approximate number of buckets cut from one random pool. Larger pools pad less, smaller ones mix
# more.
POOL_GROUPS = 128


@dataclass(frozen=True)
class LengthBuckets:
    """The buckets of every step of a run.

    Attributes:
        lengths_N: Tokens of each sequence that a step is counted in: of the target, where there is
            one.
        other_N: Tokens of each sequence on the other side, the second sort key; zeros without one.
        tokens_per_step: Approximate; the steps of an epoch share its tokens evenly.
        buckets_per_step: Buckets of similar length in one step.
        key: Names the data and the seed.
    """

    lengths_N: NDArray[np.int64]
    other_N: NDArray[np.int64]
    tokens_per_step: int
    buckets_per_step: int
    key: tuple[str | int, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError for buckets that the longest sequence does not fit, with a value
        that would do.
        """
        longest = int(self.lengths_N.max())
        share = int(self.lengths_N.sum()) / self.buckets_per_epoch
        if longest > share:
            raise ConfigError(
                f"batch.tokens={self.tokens_per_step} in "
                f"batch.num_length_buckets={self.buckets_per_step} buckets leaves {share:.0f} "
                f"tokens per bucket, but the longest sequence has {longest}. Use "
                f"batch.tokens={-(-longest * self.buckets_per_step * 5 // 4)} or more, or fewer "
                "buckets."
            )
        # Two epochs, because the loader reads ahead; past the frozen dataclass.
        object.__setattr__(self, "_epoch", lru_cache(maxsize=2)(self._order_buckets))

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sequence once."""
        return max(1, round(int(self.lengths_N.sum()) / self.tokens_per_step))

    @property
    def buckets_per_epoch(self) -> int:
        """Buckets of one epoch."""
        return self.steps_per_epoch * self.buckets_per_step

    def get_step_buckets(self, step: int) -> list[NDArray[np.int64]]:
        """Return the buckets of a step.

        Args:
            step: The step, counted from 0 over all epochs.

        Returns:
            The pairs of each bucket.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        sequences, starts, shuffled = self._epoch(epoch)  # type: ignore[attr-defined]
        chosen = shuffled[
            place * self.buckets_per_step : (place + 1) * self.buckets_per_step
        ].tolist()
        return [sequences[starts[group] : starts[group + 1]] for group in chosen]

    def _order_buckets(
        self, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (sequences by bucket, start of each bucket, shuffled buckets) of one epoch.

        The shuffled sequences are cut into pools, each pool is sorted by length, and all is cut
        into buckets of equal tokens.
        """
        total = int(self.lengths_N.sum())
        order = build_permutation(
            len(self.lengths_N), derive_order_key("sequences", *self.key, epoch)
        )
        lengths_N = self.lengths_N[order]
        other_N = self.other_N[order]
        # Two pools at least: with one, the same sequences would share a bucket in every epoch.
        pools = min(self.buckets_per_epoch, max(2, round(self.buckets_per_epoch / POOL_GROUPS)))
        pool_N = (np.cumsum(lengths_N) - lengths_N) * pools // total
        # The direction of sorting alternates, so that neighbours across a border are of similar
        # length too.
        outer_N = np.where(pool_N % 2, -lengths_N, lengths_N)
        inner_N = np.where(lengths_N % 2, -other_N, other_N)
        order = order[np.lexsort((inner_N, outer_N, pool_N))]
        ends: NDArray[np.int64] = np.cumsum(self.lengths_N[order])
        group_N = (ends - self.lengths_N[order]) * self.buckets_per_epoch // total
        starts = np.searchsorted(group_N, np.arange(self.buckets_per_epoch + 1))
        return (
            order,
            starts,
            build_permutation(self.buckets_per_epoch, derive_order_key("groups", *self.key, epoch)),
        )


def compute_padding_stats(
    groups: list[NDArray[np.int64]], *sides: NDArray[np.int64]
) -> dict[str, Any]:
    """Count the tokens of each side in these buckets, the padding to each bucket's longest, and its
    share.

    Args:
        groups: Sequence numbers of each bucket.
        sides: Lengths of all sequences, one array per side (source, target).

    Returns:
        `tokens` per side, `padding` in positions, `padding_share`.
    """
    real = [sum(int(side[group].sum()) for group in groups) for side in sides]
    padded = sum(
        len(group) * int(side[group].max()) for side in sides for group in groups if len(group)
    )
    return {
        "tokens": real,
        "padding": padded - sum(real),
        "padding_share": 1 - sum(real) / max(padded, 1),
    }

"""The ranks of every process group of a layout, by arithmetic.

Invariants:
- Nothing is read from a device mesh: a group that a mesh has made otherwise is a difference.
"""

from dataclasses import dataclass
from typing import Literal

from llmsys.config.parallel_layout import ParallelLayout

Axis = Literal[
    "world",
    "pipeline",
    "replicate",
    "fsdp",
    "replica",
    "expert",
    "expert_fsdp",
    "tensor",
    "ulysses",
    "ring",
    "member",
    "sequence",
]
# Names of the axes of a rank's number, outermost first; ring · ulysses = context.
ROOT = ("pipeline", "replicate", "shard", "ring", "ulysses", "tensor")
# Axes of ROOT that vary within a group; the order of its ranks is that of their numbers.
VARYING: dict[str, tuple[str, ...]] = {
    "world": ROOT,
    "pipeline": ("pipeline",),
    "replicate": ("replicate",),
    "fsdp": ("shard", "ring", "ulysses"),
    "replica": ("shard", "ring", "ulysses", "tensor"),
    "tensor": ("tensor",),
    "ulysses": ("ulysses",),
    "ring": ("ring",),
    "member": ("ulysses", "tensor"),
    "sequence": ("ring", "ulysses", "tensor"),
}


@dataclass(frozen=True)
class RankGroups:
    """The groups that one rank belongs to.

    Attributes:
        layout: A resolved layout.
        rank: The rank.
    """

    layout: ParallelLayout
    rank: int

    def list_ranks(self, axis: Axis) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along an axis.

        Args:
            axis: The axis. `fsdp` shards matrices of blocks, `replica` what is outside of blocks,
                `expert_fsdp` each expert.

        Returns:
            Ranks, ascending; this one alone where the axis has one rank.
        """
        layout = self.layout
        if axis in ("expert", "expert_fsdp"):
            # The ranks of a replica are neighbours, and so are those of the expert axis.
            first = self.rank - self.rank % layout.ranks_per_replica
            inner = self.rank - first
            if axis == "expert":
                first += inner - inner % layout.expert
                return tuple(range(first, first + layout.expert))
            return tuple(
                range(
                    first + inner % layout.expert, first + layout.ranks_per_replica, layout.expert
                )
            )
        sizes = self._compute_sizes()
        ranks = [0]
        stride = layout.world_size
        for name in ROOT:
            stride //= sizes[name]
            own = self.rank // stride % sizes[name]
            places = range(sizes[name]) if name in VARYING[axis] else (own,)
            ranks = [rank + place * stride for rank in ranks for place in places]
        return tuple(ranks)

    def _compute_sizes(self) -> dict[str, int]:
        layout = self.layout
        return {
            "pipeline": layout.pipeline,
            "replicate": layout.replicate,
            "shard": layout.shard,
            "ring": layout.ring_size,
            "ulysses": layout.context // layout.ring_size,
            "tensor": layout.tensor,
        }

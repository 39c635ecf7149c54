"""Context parallelism of layers with a state: each rank has some of the heads of full sequences, or
of neighbouring positions.

A state belongs to a head and a convolution to a channel, so without a ring nothing but the exchange
of heads for positions is needed (Ulysses, Jacobs 2023, arXiv:2309.14509, 3.1): all projections of a
layer go out in one message, and its outputs come back in another.

In a ring a member has neighbouring positions of some heads. How they change a state is an affine
map: a matrix (of Mamba-2 one decay) and an offset of the state's size. All maps are gathered, and
each rank applies those of the members before it to a state of zeros: one message, whatever the
length. The convolution gets the last inputs of the member before. Documents are those of full
sequences.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.parallel.collectives import all_gather
from llmsys.parallel.sequence_sharding import SequenceSharding

# B rows, L positions of a rank, W channels, H heads


class HeadExchange:
    """The exchange of one layer's heads, see llmsys/model/state_exchange.py."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    @property
    def is_sharded(self) -> bool:
        """True while positions are divided."""
        return self.sharding.is_sharded

    def get_head_slice(self, heads: int) -> slice:
        """Implement `StateExchange.get_head_slice`."""
        ulysses = self.sharding.ulysses
        first = ulysses.rank * heads // ulysses.size
        return slice(first, first + max(1, heads // ulysses.size))

    def exchange_positions(self, parts: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """Implement `StateExchange.exchange_positions`."""
        ranks = self.sharding.ulysses.size
        if ranks == 1:
            return list(parts)
        shares = []
        for part_BLW, count in zip(parts, heads, strict=True):
            part_BLHW = part_BLW.unflatten(-1, (count, -1))
            if count < ranks:
                # Ranks that share a head get it each.
                part_BLHW = part_BLHW.repeat_interleave(ranks // count, dim=2)
            shares.append(part_BLHW.flatten(2).unflatten(-1, (ranks, -1)))
        joined_BLW = torch.cat(shares, dim=-1).flatten(2)
        arrived_BTW = self.sharding.all_to_all_heads(joined_BLW)
        return list(arrived_BTW.split([share.shape[-1] for share in shares], dim=-1))

    @property
    def is_in_ring(self) -> bool:
        """Implement `StateExchange.is_in_ring`."""
        return self.is_sharded and self.sharding.ring.size > 1

    def fetch_tail(self, x_BLW: Tensor, size: int) -> Tensor:
        """Implement `StateExchange.fetch_tail`."""
        own_BLW = x_BLW[:, -size:]
        length = own_BLW.shape[1]
        # Of all members: rows of a few positions would need more than one.
        tails_BLW = all_gather(own_BLW, self.sharding.ring.group, 1)
        earlier_BLW = tails_BLW[:, : self.sharding.ring.rank * length]
        return F.pad(earlier_BLW, (0, 0, size, 0))[:, -size:]

    def select_neighbourhood(self, x_BT: Tensor, before: int) -> Tensor:
        """Implement `StateExchange.select_neighbourhood`."""
        ring = self.sharding.ring
        length = (x_BT.shape[1] - before) // ring.size
        return x_BT.narrow(1, ring.rank * length, before + length)

    def find_state(self, matrix_BGSKM: Tensor, offset_BGSKV: Tensor) -> Tensor:
        """Implement `StateExchange.find_state`."""
        ring = self.sharding.ring
        size = matrix_BGSKM.shape[-1]
        # One message.
        maps = all_gather(torch.cat([matrix_BGSKM, offset_BGSKV], -1)[None], ring.group, 0)
        # A sum of nothing: the first member takes part in the backward pass of the gather too.
        state = maps[:0, ..., size:].sum(0)
        for one in maps[: ring.rank]:
            matrix, offset = one[..., :size], one[..., size:]
            state = (matrix @ state if size > 1 else matrix * state) + offset
        return state

    def return_positions(self, y_BTW: Tensor) -> Tensor:
        """Implement `StateExchange.return_positions`."""
        return self.sharding.all_to_all_positions(y_BTW)

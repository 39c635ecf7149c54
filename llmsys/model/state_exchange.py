"""Interface of what layers with a state ask for where ranks hold positions of the same rows.

Nothing here sends: llmsys/parallel/state_exchange.py does, which is given to layers from outside.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# B rows, T positions of rows, L of a rank, W channels, G and S heads, K by V a state


class StateExchange(Protocol):
    """Exchange of a layer's positions for those with which a state can be taken along."""

    @property
    def is_sharded(self) -> bool:
        """True while positions are divided: in training, over more than one rank."""

    def get_head_slice(self, heads: int) -> slice:
        """Return the heads that this rank has of a number of them; one may be of several ranks.

        Args:
            heads: Heads of the layer.
        """

    def exchange_positions(self, parts: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """Exchange heads for positions, in one message. Collective.

        Args:
            parts: Channels of this rank's positions, (B, L, W) each, ordered by head.
            heads: Heads of each part.

        Returns:
            The channels of this rank's heads, of the positions of all ranks that exchange heads.
        """

    @property
    def is_in_ring(self) -> bool:
        """True where rows are still divided after that: each member of a ring has neighbouring
        positions.
        """

    def fetch_tail(self, x_BLW: Tensor, size: int) -> Tensor:
        """Return the positions before this rank's, zeros before the first one. Collective.

        Args:
            x_BLW: This rank's positions.
            size: Positions to return.

        Returns:
            (B, size, W).
        """

    def select_neighbourhood(self, x_BT: Tensor, before: int) -> Tensor:
        """Return the entries of this rank's positions and of those before.

        Args:
            x_BT: Entries of all positions, with `before` more in front.
            before: Entries in front.

        Returns:
            (B, before + L).
        """

    def find_state(self, matrix_BGSKM: Tensor, offset_BGSKV: Tensor) -> Tensor:
        """Return the state before this rank's positions, from how those of all ranks change one.
        Collective.

        Args:
            matrix_BGSKM: What this rank's positions multiply a state with: K by K, or a column of
                one decay.
            offset_BGSKV: What they add.

        Returns:
            (B, G, S, K, V).
        """

    def return_positions(self, y_BTW: Tensor) -> Tensor:
        """Exchange positions for heads: all heads of this rank's own positions. Collective.

        Args:
            y_BTW: Channels of this rank's heads.

        Returns:
            (B, L, W of all heads).
        """

"""The largest attention logits of each head, for QK-clip: computed next to attention, whose kernels
do not return them.

The maximum is over all pairs of a row, also those that the mask hides: an upper bound of the
visible ones.
"""

import torch
from torch import Tensor

# B rows, T query positions, S key positions, H query heads, G key heads, R = H / G, K width of a
# head

# Queries at a time, so that their scores take little memory.
QUERIES = 512


class LogitRecorder:
    """The running maximum of the logits of one attention layer, by head of the whole layer."""

    def __init__(self, num_heads: int) -> None:
        """Begin without a forward pass.

        Args:
            num_heads: Query heads of the whole layer, H, also where this rank computes some of
                them.
        """
        self._num_heads = num_heads
        self._maxima_H: Tensor | None = None

    @torch.no_grad()
    def record(self, q_BTHK: Tensor, k_BSGK: Tensor, scale: float, heads: slice) -> None:
        """Include the logits of a forward pass.

        Args:
            q_BTHK: queries of the heads of this rank.
            k_BSGK: keys of them.
            scale: factor of the scores.
            heads: heads of this rank among all of the layer.
        """
        if self._maxima_H is None:
            self._maxima_H = torch.full((self._num_heads,), -torch.inf, device=q_BTHK.device)
        own = self._maxima_H[heads]
        torch.maximum(own, compute_max_logits(q_BTHK, k_BSGK, scale), out=own)

    def take_maxima(self, device: torch.device) -> Tensor:
        """Return the maxima since the last call, float32 (H,), and begin again.

        Args:
            device: Device of the result.

        Returns:
            The maxima; -inf where there was no forward pass, as on a rank without rows, and for
            heads of other ranks.
        """
        found_H = self._maxima_H
        self._maxima_H = None
        return (
            torch.full((self._num_heads,), -torch.inf, device=device)
            if found_H is None
            else found_H
        )


def compute_max_logits(q_BTHK: Tensor, k_BSGK: Tensor, scale: float) -> Tensor:
    """Compute the largest logit of each head over all rows and pairs.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys.
        scale: Factor on the scores.

    Returns:
        float32 (H,).
    """
    groups = k_BSGK.shape[2]
    found_H = torch.full(q_BTHK.shape[2:3], -torch.inf, device=q_BTHK.device)
    for q_THK, k_SGK in zip(q_BTHK, k_BSGK, strict=True):
        k_GKS = k_SGK.permute(1, 2, 0)
        for q_tHK in q_THK.split(QUERIES):
            q_GRtK = q_tHK.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)
            scores_GRtS = q_GRtK @ k_GKS[:, None]
            found_H = torch.maximum(found_H, scores_GRtS.amax((-2, -1)).flatten().float())
    return found_H * scale

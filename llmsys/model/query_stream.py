"""XLNet's second stream: states that know a position and not its token (Yang 2019,
arXiv:1906.08237, 2.3).

The rows of the query stream follow those of the content stream, so that every layer but attention
runs both at once.

Invariants:
- A predicted token sees all tokens that are not predicted, and those predicted before it; in the
  content stream, which keys and values come from, itself too.
"""

import torch
from torch import Tensor, nn

from llmsys.model.attention_mask import AttentionMask

# B rows, T positions, P predicted positions, D width


class MaskEmbedding(nn.Module):
    """The trained vector that every position of the query stream begins with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, 1, width).normal_(std=0.02))

    def forward(self, x_BTD: Tensor, predicted: int) -> Tensor:
        """Append the query stream to the content stream.

        Args:
            x_BTD: content stream, the embedded tokens.
            predicted: positions of the query stream.

        Returns:
            (B, T + predicted, D) in the dtype of x_BTD.
        """
        return torch.cat(
            [x_BTD, self.weight.to(x_BTD.dtype).expand(len(x_BTD), predicted, -1)], dim=1
        )


def build_stream_mask(mask: AttentionMask, predicted_BP: Tensor, length: int) -> AttentionMask:
    """Build the mask of both streams over the keys of the content stream.

    Args:
        mask: The mask of documents, T by T, without a bias.
        predicted_BP: Predicted positions in the order of prediction; negative: none.
        length: Positions of the content stream, T.

    Returns:
        The mask, (B, 1, T + P, T).
    """
    assert mask.bias_BHTS is None, "distances are scored by the layers"
    rows = len(predicted_BP)
    device = predicted_BP.device
    shown_BTT = torch.ones(1, length, length, dtype=torch.bool, device=device)
    if mask.visible_B1TS is not None:
        shown_BTT = mask.visible_B1TS[:, 0]
    is_real_BP = predicted_BP >= 0
    # From 1 on; 0: not predicted.
    order_BP = torch.arange(1, predicted_BP.shape[1] + 1, device=device) * is_real_BP
    is_place_BPT = predicted_BP[:, :, None] == torch.arange(length, device=device)
    order_BT = (is_place_BPT * order_BP[:, :, None]).amax(1)
    content_BTT = shown_BTT & (order_BT[:, None] <= order_BT[:, :, None])
    shown_BPT = shown_BTT.expand(rows, -1, -1).gather(1, _expand_places(predicted_BP, length))
    query_BPT = shown_BPT & (order_BT[:, None] < order_BP[:, :, None])
    visible_BQT = torch.cat([content_BTT, query_BPT], dim=1)
    # A row without any key would be 0/0: nothing reads what is no prediction.
    return AttentionMask(visible_B1TS=(visible_BQT | ~visible_BQT.any(-1, keepdim=True))[:, None])


def append_places(table_TX: Tensor, predicted_BP: Tensor) -> Tensor:
    """Extend a table by position to both streams of XLNet.

    Args:
        table_TX: One row for each position.
        predicted_BP: Positions to predict; the rows of the second stream follow those of the
            first.

    Returns:
        (B, T + P, X).
    """
    both_BTX = table_TX.expand(len(predicted_BP), -1, -1)
    return torch.cat(
        [both_BTX, both_BTX.gather(1, _expand_places(predicted_BP, table_TX.shape[-1]))], dim=1
    )


def _expand_places(predicted_BP: Tensor, width: int) -> Tensor:
    return predicted_BP.clamp(min=0)[:, :, None].expand(-1, -1, width)

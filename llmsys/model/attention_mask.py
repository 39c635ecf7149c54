"""Which position may see which: built once per forward pass and kind of layer, and shared by all of those layers.

A mask says as little as it can, so that attention can take the cheapest kernel: nothing at all, only "causal", a
boolean table of what is visible, or numbers that are added to the scores (minus infinity where a key is hidden).
"""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

# B rows, T query positions, S key positions, H heads


@dataclass(frozen=True)
class AttentionMask:
    """What queries see. With `bias_BHTS`, hidden keys are minus infinity there and `visible_B1TS` says the same.

    `causal` promises T = S and that no query sees a later key; with no table it is the whole mask.
    """

    causal: bool = False
    visible_B1TS: Tensor | None = None
    bias_BHTS: Tensor | None = None

    def add_bias(self, bias_HTS: Tensor) -> "AttentionMask":
        """This mask, and a number for each head, query and key (or row too) that is added to the score."""
        bias_BHTS = bias_HTS if bias_HTS.dim() == 4 else bias_HTS[None]
        visible = self.visible_B1TS
        if visible is None and self.causal:
            visible = torch.ones(bias_HTS.shape[-2:], dtype=torch.bool, device=bias_HTS.device).tril_()[None, None]
        if visible is not None:
            bias_BHTS = bias_BHTS.masked_fill(~visible, -torch.inf)
        return AttentionMask(self.causal, visible, bias_BHTS)


EVERYTHING = AttentionMask()


def build_self_attention_mask(
    length: int,
    *,
    causal: bool,
    start: int = 0,
    window: int | None = None,
    documents_BT: Tensor | None = None,
    padding_B: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> AttentionMask:
    """What `length` queries see of start + length keys, the last of which are their own.

    A query sees, itself included, the last `window` keys (without `causal`: fewer than `window` places to either side),
    keys of its own document, and none of the first `padding_B` keys of its row. A padded query sees itself alone: a
    row without any key would be 0/0, and its NaN would spread through the values.
    """
    end = start + length
    queries_T = torch.arange(start, end, device=device)[:, None]
    keys_S = torch.arange(end, device=device)
    rules = []
    if window is not None and window < end:
        rules.append((queries_T - keys_S).abs() < window)
    if documents_BT is not None:
        rules.append((documents_BT[:, :, None] == documents_BT[:, None, :])[:, None])
    if padding_B is not None:
        rules.append(((keys_S >= padding_B[:, None, None]) | (keys_S == queries_T))[:, None])
    if causal and length > 1 and (rules or start):
        rules.append(keys_S <= queries_T)
    whole = causal and not start
    if not rules:
        return AttentionMask(whole)
    visible: Tensor = reduce(torch.logical_and, rules)
    return AttentionMask(whole, visible.expand(*[1] * (4 - visible.dim()), *visible.shape))


def build_cross_attention_mask(
    documents_BT: Tensor | None, source_documents_BS: Tensor | None, targets: int, sources: int
) -> AttentionMask:
    """A target sees the source of equal document number; where one side has no numbers, all of it counts as 0.

    A target that would see nothing (padding) sees everything, which nobody looks at and which is a number.
    """
    if documents_BT is None and source_documents_BS is None:
        return EVERYTHING
    if documents_BT is None:
        assert source_documents_BS is not None
        documents_BT = source_documents_BS.new_zeros(len(source_documents_BS), targets)
    if source_documents_BS is None:
        source_documents_BS = documents_BT.new_zeros(len(documents_BT), sources)
    visible_BTS = documents_BT[:, :, None] == source_documents_BS[:, None, :]
    return AttentionMask(visible_B1TS=(visible_BTS | ~visible_BTS.any(-1, keepdim=True))[:, None])


def compute_document_positions(documents_BT: Tensor) -> Tensor:
    """Positions counted from the start of each run of equal document numbers, shape (B, T)."""
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    opens_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    opens_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_BT: Tensor = torch.where(opens_BT, places_T, 0).cummax(dim=1).values
    return places_T - starts_BT

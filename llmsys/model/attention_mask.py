"""Attention masks, built once per forward pass and layer type and shared by all layers of that
type.

A mask is the weakest form that is exact, so that attention can take the cheapest kernel: none,
"causal", a boolean table of visible keys, or a bias that is added to the scores (minus infinity
where a key is hidden). Kernels of accelerators take lengths (`VarlenMask`) or key ranges
(`FlexMask`) instead of a table.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from llmsys.model.flex_attention import FlexMask
from llmsys.model.varlen_attention import VarlenMask

# B rows, T query positions, S key positions, H heads


@dataclass(frozen=True)
class AttentionMask:
    """The keys that queries may attend to, in the weakest form that is exact.

    Attributes:
        causal: T = S and no query sees a later key. Without a table or bias this is the full mask.
        visible_B1TS: True where a key is visible.
        bias_BHTS: Added to the scores; minus infinity where `visible_B1TS` is False.
    """

    causal: bool = False
    visible_B1TS: Tensor | None = None
    bias_BHTS: Tensor | None = None

    def add_bias(self, bias_HTS: Tensor) -> "AttentionMask":
        """Return this mask with a bias, (H, T, S) or (B, H, T, S), that is added to the scores."""
        bias_BHTS = bias_HTS if bias_HTS.dim() == 4 else bias_HTS[None]
        visible = self.visible_B1TS
        # Kernels take a bias or the flag `is_causal`, not both.
        if visible is None and self.causal:
            visible = torch.ones(
                bias_HTS.shape[-2:], dtype=torch.bool, device=bias_HTS.device
            ).tril_()[None, None]
        if visible is not None:
            bias_BHTS = bias_BHTS.masked_fill(~visible, -torch.inf)
        return AttentionMask(self.causal, visible, bias_BHTS)


EVERYTHING = AttentionMask()


class DistributedMask(ABC):
    """A mask over keys that other ranks hold, and the attention that fetches them
    (llmsys/parallel).
    """

    @abstractmethod
    def compute_attention(
        self,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGV: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Return what `scaled_dot_product.compute_attention` does, from the shards of this rank.
        Collective.

        Args:
            q_BLHK: queries of the L positions of this rank.
            k_BLGK: keys of them.
            v_BLGV: values of them.
            scale: factor of the scores.
            softcap: cap of the scores; None: none.
            sinks_H: a logit of each head for no key; None: none.

        Returns:
            (B, L, H, V) in the dtype of the queries.
        """


# The mask of a layer, in the form that its kernel takes.
LayerMask = AttentionMask | VarlenMask | FlexMask | DistributedMask


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
    """Return the mask of `length` queries over `start + length` keys, the last of which are their
    own.

    A query sees itself and, among earlier keys (all keys without `causal`), those that every rule
    below admits.

    Args:
        length: Number of queries, T.
        causal: Whether later keys are hidden.
        start: Number of cached keys before the queries.
        window: Keys at a distance of `window` or more are hidden; None: no limit.
        documents_BT: Document number of each token; keys of other documents are hidden.
        padding_B: Number of leading keys of each row that are hidden.
        device: Where the tables are created.
    """
    end = start + length
    queries_T = torch.arange(start, end, device=device)[:, None]
    keys_S = torch.arange(end, device=device)
    rules = []
    # A window over everything hides nothing, and a table would rule out the fastest kernels.
    if window is not None and window < end:
        rules.append((queries_T - keys_S).abs() < window)
    if documents_BT is not None:
        rules.append((documents_BT[:, :, None] == documents_BT[:, None, :])[:, None])
    if padding_B is not None:
        # A padded query sees itself: a row without any key would be 0/0, and its NaN would spread
        # through the values.
        rules.append(((keys_S >= padding_B[:, None, None]) | (keys_S == queries_T))[:, None])
    # A single query is the last one and sees every key; without other rules the flag is enough.
    if causal and length > 1 and (rules or start):
        rules.append(keys_S <= queries_T)
    is_causal = causal and not start  # T = S only without cached keys
    if not rules:
        return AttentionMask(is_causal)
    visible: Tensor = reduce(torch.logical_and, rules)
    return AttentionMask(is_causal, visible.expand(*[1] * (4 - visible.dim()), *visible.shape))


def build_cross_attention_mask(
    documents_BT: Tensor | None, source_documents_BS: Tensor | None, targets: int, sources: int
) -> AttentionMask:
    """Return the mask of target queries over the source keys of equal document number.

    A side without document numbers counts as document 0. A target without any source (padding) sees
    every key, because a row without keys would be NaN; nothing reads its output.

    Args:
        documents_BT: Document number of each target, or None.
        source_documents_BS: Document number of each source token, or None.
        targets: Number of target positions, T.
        sources: Number of source positions, S.

    Returns:
        The mask.
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
    """Return the position of each token in its document.

    Args:
        documents_BT: Document ids, integer, (B, T). Tokens of one document are neighbours.

    Returns:
        Positions counted from 0 at the start of each run of equal ids, int64 (B, T).
    """
    places_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    opens_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    opens_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts_BT: Tensor = torch.where(opens_BT, places_T, 0).cummax(dim=1).values
    return places_T - starts_BT

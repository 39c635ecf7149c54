"""The keys of each query as a range, from the first to the last visible one.

Every mask that a config can express is a range per query, because the tokens of a document are next
to each other: causal, both directions, documents, windows, padded rows of a cache, and sources in
cross-attention. Ranges take O(T) memory and are computed on the device without a wait.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# B rows, T query positions, S key positions


@dataclass(frozen=True)
class KeyRanges:
    """First and last visible key of each query.

    Attributes:
        first_BT: Index of the first key, int32.
        last_BT: Index of the last key, int32, not before the first.
        num_keys: Number of keys, S.
    """

    first_BT: Tensor
    last_BT: Tensor
    num_keys: int


def build_self_ranges(
    rows: int,
    length: int,
    *,
    causal: bool,
    start: int = 0,
    window: int | None = None,
    documents_BT: Tensor | None = None,
    padding_B: Tensor | None = None,
    prefix_B: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> KeyRanges:
    """Return the ranges of `length` queries over `start + length` keys, the last of which are their
    own.

    The rules are those of `build_self_attention_mask`.

    Args:
        rows: Number of rows, B.
        length: Number of queries, T.
        causal: Whether later keys are hidden.
        start: Number of cached keys before the queries.
        window: Keys at a distance of `window` or more are hidden; None: no limit.
        documents_BT: Document number of each token, those of a document next to each other;
            requires start = 0.
        padding_B: Number of leading keys of each row that are hidden from other queries than
            themselves.
        prefix_B: Number of leading keys of each row that every query sees (prefix language model).
        device: Where the tensors are created.

    Returns:
        The ranges.
    """
    end = start + length
    places_T = torch.arange(start, end, dtype=torch.int32, device=device)
    first, last = (
        torch.zeros_like(places_T),
        places_T if causal else torch.full_like(places_T, end - 1),
    )
    if window is not None:
        first = (places_T - (window - 1)).clamp_min_(0)
        last = last if causal else (places_T + (window - 1)).clamp_max_(end - 1)
    first_BT, last_BT = (x.expand(rows, length) for x in (first, last))
    if padding_B is not None:
        # A padded query sees itself, as in the table.
        first_BT = torch.maximum(
            first_BT, torch.minimum(padding_B[:, None].to(torch.int32), places_T)
        )
    if prefix_B is not None:
        first_BT = torch.zeros_like(first_BT)
        last_BT = torch.maximum(last_BT, prefix_B[:, None].to(torch.int32) - 1)
    if documents_BT is not None:
        opens_BT, closes_BT = find_document_ends(documents_BT, places_T)
        first_BT, last_BT = torch.maximum(first_BT, opens_BT), torch.minimum(last_BT, closes_BT)
    return KeyRanges(first_BT.contiguous(), last_BT.contiguous(), end)


def build_cross_ranges(
    documents_BT: Tensor | None,
    source_documents_BS: Tensor | None,
    rows: int,
    targets: int,
    sources: int,
) -> KeyRanges:
    """Return the ranges of target queries over the source keys of equal document number.

    The rules are those of `build_cross_attention_mask`: a side without numbers counts as document
    0, and a target without a source sees every key.

    Args:
        documents_BT: Document number of each target, or None.
        source_documents_BS: Document number of each source token, those of a document next to each
            other, or None.
        rows: Number of rows, B.
        targets: Number of target positions, T.
        sources: Number of source positions, S.

    Returns:
        The ranges.
    """
    given = documents_BT if source_documents_BS is None else source_documents_BS
    assert given is not None, "without document numbers no key is hidden"
    if documents_BT is None:
        documents_BT = given.new_zeros(rows, targets)
    if source_documents_BS is None:
        source_documents_BS = given.new_zeros(rows, sources)
    # Stable, so that the keys of one document keep their order: its first and last one are at the
    # ends of its run.
    numbers_BS, order_BS = source_documents_BS.sort(dim=1, stable=True)
    begin_BT = torch.searchsorted(numbers_BS, documents_BT.contiguous())
    end_BT = torch.searchsorted(numbers_BS, documents_BT.contiguous(), right=True)
    is_found_BT = end_BT > begin_BT
    # Without a match the index may be one outside; `where` replaces it below.
    first_BT = order_BS.gather(1, begin_BT.clamp_max(sources - 1))
    last_BT = order_BS.gather(1, (end_BT - 1).clamp_min(0))
    return KeyRanges(
        torch.where(is_found_BT, first_BT, 0).to(torch.int32),
        torch.where(is_found_BT, last_BT, sources - 1).to(torch.int32),
        sources,
    )


def find_document_ends(documents_BT: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last position of each token's document, int32 (B, T).

    Args:
        documents_BT: Document number of each token, those of a document next to each other.
        places_T: 0 to T - 1, int32.

    Returns:
        First and last positions.
    """
    differs_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    opens_BT = torch.nn.functional.pad(differs_BT, (1, 0), value=True)
    closes_BT = torch.nn.functional.pad(differs_BT, (0, 1), value=True)
    # The last start so far.
    first_BT = torch.where(opens_BT, places_T, 0).cummax(dim=1).values
    # The next end: a running minimum from the right.
    last_BT = (
        torch.where(closes_BT, places_T, documents_BT.shape[1] - 1)
        .flip(1)
        .cummin(dim=1)
        .values.flip(1)
    )
    return first_BT.to(torch.int32), last_BT.to(torch.int32)

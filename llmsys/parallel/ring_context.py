"""The order of tokens over a ring of ranks, and the masks and rotations that follow it.

Each document is cut into 2 · N chunks, and rank r of N has chunks r and 2N − 1 − r (zigzag), so all
ranks have the same share of a causal triangle. A document's first tokens, which see the fewest keys
and are fewer than 2 · N, are dealt one by one in the same way, over all documents of a row: every
rank has exactly T / N tokens of a row. A row without document numbers is one document.

Of a model with linear attention rank r has the r-th N-th of a row instead, since a state goes from
one position to the next (state_exchange.py). The last rank then has the most work in the other
layers, up to 2 - 1 / N times the mean.

Invariants:
- Tokens of a rank are in ascending order, so the keys that a query sees are a range of another
  rank's keys too.
- The order follows from document numbers, which all ranks of a sequence have: nothing is exchanged.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llmsys.config.layer_types import LayerType
from llmsys.kernels.attention_kernel import choose_ring_kernel
from llmsys.kernels.attention_layers import describe_self_attention
from llmsys.model import attention_device
from llmsys.model.attention_mask import LayerMask
from llmsys.model.embedding import compute_alibi_slopes
from llmsys.model.key_ranges import build_self_ranges, find_document_ends
from llmsys.model.kv_cache import EncoderOutput, KeyValueCache
from llmsys.model.layer_stack import LayerStack
from llmsys.model.mask_builder import MaskBuilder, MaskInputs
from llmsys.model.rotary_embedding import RotaryBuilder, RotaryCosSin
from llmsys.model.transformer import Transformer
from llmsys.parallel.ring_attention import RingMask
from llmsys.parallel.sequence_sharding import SequenceSharding

# B rows, T positions, N ranks of the ring, L = T / N positions of one, P rows of positions: B, or 1
# where all are equal


def compute_ring_order(
    documents_BT: Tensor | None,
    length: int,
    ranks: int,
    device: torch.device,
    *,
    is_dealt: bool = True,
) -> Tensor:
    """Return the positions of all ranks one after another, int64 (P, T).

    Args:
        documents_BT: Document number of each token, or None for rows of one document.
        length: Positions of a row, a multiple of 2 · `ranks`.
        ranks: Ranks of the ring.
        device: Where the tensor is created.
        is_dealt: Deal documents in chunks; False: ranks have neighbouring positions.

    Returns:
        The order: entry i is the position of the i-th token; rank r has the r-th N-th of them.
    """
    places_T = torch.arange(length, dtype=torch.int32, device=device)
    if documents_BT is None:
        documents_BT = torch.zeros_like(places_T)[None]
    if not is_dealt:
        return places_T.long().expand(len(documents_BT), -1)
    opens_BT, closes_BT = find_document_ends(documents_BT, places_T)
    length_BT = closes_BT - opens_BT + 1
    chunk_BT = length_BT // (2 * ranks)
    offset_BT = places_T - opens_BT - length_BT % (2 * ranks)
    is_rest_BT = offset_BT < 0
    rest_BT = (is_rest_BT.cumsum(1) - 1) % (2 * ranks)
    # A document shorter than 2 · N tokens has no chunks, only a rest.
    number_BT = torch.where(is_rest_BT, rest_BT, offset_BT // chunk_BT.clamp_min(1))
    # Zigzag: rank r has the chunks r and 2N - 1 - r.
    rank_BT = torch.minimum(number_BT, 2 * ranks - 1 - number_BT)
    # Stable: the tokens of a rank stay in ascending order.
    return rank_BT.argsort(dim=1, stable=True)


@cache
def list_ring_distances(
    ranks: int, length: int, window: int | None, causal: bool, is_dealt: bool = True
) -> tuple[int, ...]:
    """List the steps in which some rank sees a key, for rows of one document.

    Args:
        ranks: Ranks of the ring.
        length: Positions of a row.
        window: Keys at a distance of `window` or more are hidden; None: no limit.
        causal: Whether later keys are hidden.
        is_dealt: Documents are dealt in chunks; False: ranks have neighbouring positions.

    Returns:
        Distances between a rank and the owner of the keys, 0 first.
    """
    if window is None:
        return tuple(range(ranks))
    if not is_dealt:
        reach = min(ranks - 1, -(-(window - 1) // (length // ranks)))
        later = () if causal else ((-distance) % ranks for distance in range(1, reach + 1))
        return tuple(sorted({*range(reach + 1), *later}))
    chunk = length // (2 * ranks)
    reach = -(-(window - 1) // chunk)  # chunks whose nearest key is inside of the window
    seen = {0}
    for number in range(2 * ranks):
        for other in range(
            max(0, number - reach), number + 1 if causal else min(2 * ranks, number + reach + 1)
        ):
            own = min(number, 2 * ranks - 1 - number)
            source = min(other, 2 * ranks - 1 - other)
            seen.add((own - source) % ranks)
    return tuple(sorted(seen))


class RingMaskBuilder:
    """A MaskBuilder whose self-attention goes round a ring in training."""

    def __init__(self, builder: MaskBuilder, sharding: SequenceSharding) -> None:
        self.builder = builder
        self.sharding = sharding

    def build_self_masks(self, inputs: MaskInputs) -> Mapping[LayerType, LayerMask]:
        """Return the masks of self-attention by layer type."""
        if not self.sharding.is_sharded:
            return self.builder.build_self_masks(inputs)
        return {
            kind: self._build_mask(inputs, kind, window)
            for kind, window in self.builder.windows.items()
        }

    def build_cross_mask(self, inputs: MaskInputs, memory: EncoderOutput | None) -> LayerMask:
        """Return the mask of the cross-attention."""
        return self.builder.build_cross_mask(inputs, memory)

    def _build_mask(self, inputs: MaskInputs, kind: LayerType, window: int | None) -> RingMask:
        config = self.builder.config
        device = inputs.like.device
        length = inputs.length
        traits = describe_self_attention(
            config,
            kind,
            dtype=attention_device.get_attention_dtype(inputs.like),
            length=length,
            has_documents=inputs.documents_BT is not None,
            is_training=inputs.training,
        )
        window = window if traits.has_window else None
        positions_PNL = self.sharding.get_ring_positions()
        ranges = build_self_ranges(
            len(positions_PNL),
            length,
            causal=self.builder.causal,
            window=window,
            documents_BT=inputs.documents_BT,
            device=device,
        )
        ring = self.sharding.ring
        own_PL = positions_PNL[:, ring.rank]
        slopes_H = None
        if config.position.kind == "alibi":
            slopes_H = (
                config.position.factor
                * compute_alibi_slopes(config.num_attention_heads)[inputs.heads]
            ).to(device, non_blocking=True)
        # `list_ring_distances` holds for rows of one document.
        skipping = None if inputs.documents_BT is not None else window
        return RingMask(
            ring.group.group_name,
            positions_PNL,
            ranges.first_BT.long().gather(1, own_PL),
            ranges.last_BT.long().gather(1, own_PL),
            list_ring_distances(
                ring.size, length, skipping, self.builder.causal, not config.has_linear_layers
            ),
            choose_ring_kernel(attention_device.describe_device(device), traits).kernel == "sdpa",
            not config.has_linear_layers,
            slopes_H,
        )


class RingRotations:
    """A RotaryBuilder for the positions of this rank's member of the ring."""

    def __init__(self, builder: RotaryBuilder, sharding: SequenceSharding) -> None:
        self.builder = builder
        self.sharding = sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def __call__(
        self, length: int, cache: KeyValueCache | None, device: torch.device
    ) -> dict[LayerType, RotaryCosSin]:
        """Return the rotations by layer type."""
        if not self.sharding.is_sharded:
            return self.builder(length, cache, device)
        return self.builder.build_rows(
            self.sharding.get_ring_positions()[:, self.sharding.ring.rank], length
        )


def apply_ring(model: Transformer, sharding: SequenceSharding) -> None:
    """Put positions in the order of the ring, and make masks and rotations follow it.

    Args:
        model: Changed in place.
        sharding: With a ring of more than one rank.
    """

    def order_positions(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens_BT: Tensor = args[0] if args else kwargs["tokens_BT"]
        documents_BT = kwargs.get("documents_BT")
        if sharding.is_sharded:
            order_PT = compute_ring_order(
                documents_BT,
                tokens_BT.shape[1],
                sharding.ring.size,
                tokens_BT.device,
                is_dealt=not model.config.has_linear_layers,
            )
            sharding.set_ring_order(order_PT)

    model.register_forward_pre_hook(order_positions, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, LayerStack):
            shared = module.shared
            shared.masks = RingMaskBuilder(shared.masks, sharding)  # type: ignore[assignment]
            if shared.rotations is not None:
                shared.rotations = RingRotations(shared.rotations, sharding)  # type: ignore[assignment]

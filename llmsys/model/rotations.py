"""The rotations of one forward pass, by kind of layer, and what a cache means where waves depend on the length.

Dynamic NTK and LongRoPE turn with other waves when a sequence grows past its old context. What a cache holds of the
earlier tokens was computed with the old waves, in every layer, so generation goes on exactly only from scratch.
"""

import torch

from llmsys.config.model import LayerType, ModelConfig
from llmsys.config.position import RopeConfig
from llmsys.model.cache import KeyValueCache
from llmsys.model.rotary import RotaryEmbedding, RotaryCosSin
from llmsys.model.wave import RopeFrequencies, compute_rope_frequencies

# B rows, T positions


class RotaryBuilder:
    """Makes the rotations of one stack."""

    def __init__(self, config: ModelConfig, position: RopeConfig) -> None:
        self.config, self.position = config, position
        self.table = RotaryEmbedding(config, position)
        self.kinds = sorted({config.get_layer_type(layer) for layer in range(config.num_hidden_layers)})
        self.by_length = position.scaling.kind in ("ntk", "longrope")

    def __call__(self, length: int, cache: KeyValueCache | None, device: torch.device) -> dict[LayerType, RotaryCosSin]:
        """The rotations of `length` new tokens, behind those in the cache."""
        return {kind: self._build_cos_sin(length, cache, device, kind == "sliding_attention") for kind in self.kinds}

    def must_recompute(self, cache: KeyValueCache, new: int) -> bool:
        """Whether `new` more tokens change the waves that the cache was filled with, in any row."""
        if not self.by_length or not cache.length:
            return False
        lengths = [cache.length - padding for padding in cache.padding_B.tolist()]
        return any(self._compute_frequencies(length) != self._compute_frequencies(length + new) for length in lengths)

    def _build_cos_sin(self, length: int, cache: KeyValueCache | None, device: torch.device, sliding: bool) -> RotaryCosSin:
        if cache is None:
            return self.table(None, length, device=device, sliding=sliding)
        end = cache.length + length
        positions_BT = cache.get_positions(cache.length, end)
        if not self.by_length or not cache.is_padded:
            return self.table(positions_BT, end - int(cache.padding_B.min()), device=device, sliding=sliding)
        # Rows of unequal length have waves of their own, so that no row depends on the one beside it.
        rows = [
            self.table(positions_T[None], end - padding, device=device, sliding=sliding)
            for positions_T, padding in zip(positions_BT, cache.padding_B.tolist(), strict=True)
        ]
        cos, sin = torch.cat([row.cos for row in rows]), torch.cat([row.sin for row in rows])
        return RotaryCosSin(cos, sin, rows[0].pairing)

    def _compute_frequencies(self, length: int) -> RopeFrequencies:
        return compute_rope_frequencies(self.position, self.table.width, self.config.max_position_embeddings, max(length, 1))

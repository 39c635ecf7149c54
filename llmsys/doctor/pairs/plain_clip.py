"""QK-clip as its paper writes it, head by head (Kimi K2, arXiv:2507.20534, algorithm 1).

The largest logits are those that the model records; which rows they scale shares no code with
llmsys/engine.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmsys.model.attention_logits import LogitRecorder
from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.multi_head_attention import MultiHeadAttention

Attention = MultiHeadAttention | MultiHeadLatentAttention


class PlainQueryClip:
    """Scales rows of queries and keys whose logits were above a threshold.

    Args:
        model: the model, whose attention begins to record its largest logits.
        threshold: the largest logit.
    """

    def __init__(self, model: nn.Module, threshold: float) -> None:
        self._threshold = threshold
        self._layers = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, Attention)
        }
        for layer in self._layers.values():
            layer.logit_recorder = LogitRecorder(layer.heads)

    def clip(self, weights: dict[str, Tensor], prefix: str, *, is_applied: bool) -> None:
        """Scale weights in place by the logits since the last call, which are forgotten.

        Args:
            weights: weights by name.
            prefix: text before the name of a parameter.
            is_applied: whether the step changes weights.
        """
        for name, layer in self._layers.items():
            assert layer.logit_recorder is not None
            maxima_H = layer.logit_recorder.take_maxima(torch.device("cpu")).tolist()
            shares = [min(1.0, self._threshold / max(one, 1e-30)) for one in maxima_H]
            if not is_applied:
                continue
            for projection, begin, rows, factor in _iter_scaled_rows(layer, shares):
                for kind in ("weight", "bias"):
                    found = weights.get(f"{prefix}{name}.{projection}.{kind}")
                    if found is not None:
                        found[begin : begin + rows] *= factor


def _iter_scaled_rows(
    layer: Attention, shares: list[float]
) -> Iterator[tuple[str, int, int, float]]:
    """Yield (projection, first row, rows, factor)."""
    if isinstance(layer, MultiHeadLatentAttention):
        queries = "q_b_proj" if layer.has_query_latent else "q_proj"
        for head, share in enumerate(shares):
            # The rotated key is that of all heads, so the query takes its part of the scale.
            begin = head * (layer.nope + layer.rope)
            yield queries, begin, layer.nope, share**0.5
            yield queries, begin + layer.nope, layer.rope, share
            yield "kv_b_proj", head * (layer.nope + layer.value), layer.nope, share**0.5
        return
    width = layer.head_dim
    shared = len(shares) // (layer.k_proj.out_features // width)
    for head, share in enumerate(shares):
        group = head // shared
        # Heads that share a key: it shrinks for the one that needs most, each query for the rest.
        least = min(shares[group * shared : (group + 1) * shared])
        yield "q_proj", head * width, width, share / least**0.5
        if head % shared == 0:
            yield "k_proj", group * width, width, least**0.5

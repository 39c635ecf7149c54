"""Which products a backward pass computes again, under the policies of `train.recompute`.

The policies themselves, and what they keep, are in llmsys/parallel/recompute.py; what they keep in memory is in `kept`.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from llmsys.config.model import ModelConfig
from llmsys.estimate.rows import ParameterTensor

Recompute = Literal["none", "selective", "block"]
Attention = Literal["none", "distances", "self", "all"]


def iter_recomputed_matrices(model: ModelConfig, rows: Iterable[ParameterTensor], recompute: Recompute) -> Iterator[ParameterTensor]:
    """The matrices whose products are computed again: under `block` those of every block but its last product.

    torch stops computing again as soon as it has all that backward asks for, and behind the last product there is a
    sum alone, which asks for nothing, unless a norm, dropout or the weights of experts follow.
    """
    if recompute != "block":
        return
    for row in rows:
        inside = row.layers and "block" in row.name
        if inside and row.input is not None and not _is_last_in_block(model, row.name):
            yield row


def get_recomputed_attention(model: ModelConfig, recompute: Recompute) -> Attention:
    """Which of the products between activations are computed again.

    Under `selective` those that no fused kernel computes: all where scores are capped, of self-attention where there
    are sinks, of queries and distances in Transformer-XL. Dropout inside attention is taken to be fused, as on GPUs.
    """
    if recompute == "block":
        return "all"
    attention = model.attention
    if recompute == "none" or attention.kind == "latent":
        return "none"
    if attention.logit_softcap is not None:
        return "all"
    if attention.sinks:
        return "self"
    return "distances" if model.position.kind == "transformer_xl" else "none"


def _is_last_in_block(model: ModelConfig, name: str) -> bool:
    """Whether a matrix makes the last product of its block, which is added to the residual stream as it is."""
    if model.residual.kind not in ("pre", "parallel") or model.dropout.residual:
        return False
    crossed = model.family == "encoder_decoder" and not name.startswith("encoder.")
    if crossed and model.residual.kind == "parallel":
        return name.endswith(".cross_attention.o_proj.weight")
    shared = model.moe is not None and not model.moe.shared_gate and name.endswith(".shared.down_proj.weight")
    return shared or name.endswith(".feed_forward.down_proj.weight")

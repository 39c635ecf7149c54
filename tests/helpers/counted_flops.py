"""Count the operations of a forward pass with PyTorch's own counter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.model import ModelConfig
from llmsys.model import latent_attention, long_attention, multi_head_attention, segment_memory
from llmsys.model.experts import GroupedExperts
from llmsys.model.scaled_dot_product import compute_eager_attention
from llmsys.model.transformer import Transformer

SEQUENCES, SOURCE, TARGET = 2, 9, 7


def _attend_eagerly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    *,
    scale: Any = None,
    softcap: Any = None,
    **rest: Any,
) -> torch.Tensor:
    return compute_eager_attention(q, k, v, mask, scale, softcap, rest.get("sinks_H"))


@contextmanager
def use_eager_attention() -> Iterator[None]:
    """Attend by plain matrix products: the counter does not know every fused kernel."""
    with ExitStack() as stack:
        for module in (multi_head_attention, latent_attention, long_attention, segment_memory):
            stack.enter_context(patch.object(module, "compute_attention", _attend_eagerly))
        yield


def count_forward_flops(config: ModelConfig) -> int:
    """Return the FLOPs of SEQUENCES sequences of SOURCE positions, and of TARGET where the model
    has a decoder too.
    """
    model = Transformer(config)
    for layer in model.list_moe_layers():
        layer.eval()  # the statistics that training observes cost their own product
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.grouped = False  # the counter does not know grouped products
    pairs = config.family == "encoder_decoder"
    tokens_BT = torch.ones(SEQUENCES, TARGET if pairs else SOURCE, dtype=torch.long)
    source_BS = torch.ones(SEQUENCES, SOURCE, dtype=torch.long)
    with use_eager_attention(), FlopCounterMode(display=False) as counter:
        model(tokens_BT, **({"source_BS": source_BS} if pairs else {}))
        if config.head.kind == "features" and config.head.pooler:
            model.pool_first_position(torch.zeros(SEQUENCES, SOURCE, config.hidden_size))
        if config.head.kind == "mlm" and config.head.next_sentence:
            model.compute_next_sentence_logits(torch.zeros(SEQUENCES, SOURCE, config.hidden_size))
    return int(counter.get_total_flops())

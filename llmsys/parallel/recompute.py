"""Activation recomputation, applied from outside to every block: of decoder, encoder and prediction modules alike.

A block is a function of what enters it, so its backward may compute again what its forward did not keep (Chen 2016,
arXiv:1604.06174). Same bits: random numbers are drawn again from the same state, routing and all-to-alls repeat, and
whatever a trainer counts is counted in the first pass only (see `llmsys.model.balance.is_recomputation`).

What stays in memory from forward to backward, the policy that the estimate of memory follows:

* `none`: what autograd saves.
* `block`: what enters the block, and what all blocks share (masks, rotation tables, the encoder's output). In the
  backward of a block everything in it lives once, as with `none`.
* `selective`: that, and the outputs of `KEPT`: products with weights (of experts too; with fp8 weights too),
  attention in one kernel with its logsumexp (on the CPU in bfloat16: with its probabilities), and what collectives
  bring from other ranks (tokens of all-to-alls, partial sums of reduce-scatters). Computed again are norms,
  rotations, activations and their products, dropout, casts, sums with the residual stream, the sorting of tokens by
  expert, and attention whose scores are explicit because no kernel knows them (caps, sinks, distances, dropout on
  CPUs): its tensors of T × T are what Korthikanti 2022 (arXiv:2205.05198, 5) gives up too.

The last product of a block is not computed again where nothing behind it needs its result: torch stops as soon as
every saved tensor is there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmsys.model import cpu_attention, cpu_experts
from llmsys.model.block import TransformerBlock
from llmsys.model.transformer import Transformer
from llmsys.parallel.keep import build_compiled_contexts, build_eager_contexts

Recompute = Literal["none", "selective", "block"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    cpu_attention.OPERATION,
    cpu_experts.OPERATION,
    collectives.all_to_all_single.default,
    collectives.reduce_scatter_tensor.default,
}
"""The operations whose outputs `selective` keeps."""


def apply_activation_checkpoint(model: Transformer, what: Recompute, *, compiled: bool = False) -> None:
    """Wrap the forward of every block. The wrapper is a function, so names of parameters and modules stay.

    With `compiled`, before `compile_blocks`: torch.compile then sees what is to be computed again, and decides with it.
    (Around a compiled block `selective` would see one opaque operation.)
    """
    if what == "none":
        return
    contexts = build_compiled_contexts if compiled else build_eager_contexts
    options: dict[str, Any] = {"context_fn": contexts(KEPT)} if what == "selective" else {}
    for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
        again = partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = _recompute_if_grad_enabled(again, block.forward)  # type: ignore[method-assign]


def _recompute_if_grad_enabled(again: Callable[..., Tensor], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without a backward there is nothing to keep, and a cache of keys must see its tokens once."""

    def call_block(*inputs: Any) -> Tensor:
        return again(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return call_block

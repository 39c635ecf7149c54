"""torch.compile of blocks, one at a time: equal blocks share the compiled code.

A block is one graph. The exchanges of the tensor and context axes are operations of that graph.

Blocks with experts of their own ranks or shards (`must_compile_pieces`) are the exception: only a
host that knows the number of rows can receive them, and FSDP gathers such experts in a hook, which
no graph can hold. There the pieces of a block are compiled: attention with its norms and residual
sum, the router, and the activations of experts. Between them the sort, exchange and products of
tokens run as without compilation.

Invariants:
- Only passes with gradients are compiled. Evaluation and generation have other shapes, and would be
  compiled again for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmsys.config.norm import ParallelBlockConfig
from llmsys.model.feed_forward import FeedForward
from llmsys.model.moe_layer import MoELayer
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.process_group import get_local_device

# An object and the name of its method.
Piece = tuple[Any, str]


def list_blocks(model: Transformer) -> list[TransformerBlock]:
    """List the blocks of all stacks and prediction modules.

    Args:
        model: A model.

    Returns:
        Its blocks, in the order of `model.modules()`.
    """
    return [module for module in model.modules() if isinstance(module, TransformerBlock)]


def must_compile_pieces(block: TransformerBlock, *, separates_experts: bool) -> bool:
    """Return whether a block is compiled in pieces: where FSDP has hooks in it, or the host reads
    counts of tokens.

    Args:
        block: A block.
        separates_experts: Whether experts are on several ranks, or sharded apart from their block.

    Returns:
        True with such experts, with experts that take some assignments only, and with widths
        without grouped matmuls.
    """
    layer = block.feed_forward
    if not isinstance(layer, MoELayer):
        return False
    return (
        separates_experts
        or layer.config.routing.kind != "token_choice"
        or not layer.experts.grouped
    )


def has_equal_bias_gradients(block: TransformerBlock) -> bool:
    """Return whether the last biases of two branches get the same gradient, the sum of the block's
    over all positions.

    Args:
        block: A block.

    Returns:
        True for parallel branches that both end in a bias.
    """
    last = (block.attention, "o_proj"), (block.feed_forward, "down_proj")
    return isinstance(block.residual, ParallelBlockConfig) and all(
        getattr(getattr(branch, name, None), "bias", None) is not None for branch, name in last
    )


def list_branches(block: TransformerBlock) -> tuple[Piece, Piece]:
    """Return the methods that compute attention, and the feed-forward or experts. Of a branch that
    a block lacks the method returns the stream.

    Args:
        block: A block.

    Returns:
        Two methods that together compute the block, or in a parallel block its two sublayers.
    """
    if isinstance(block.residual, ParallelBlockConfig):
        return (block.attention, "forward"), (block.feed_forward, "forward")
    return (block, "run_attention_branches"), (block, "run_feed_forward_branch")


def compile_blocks(
    model: Transformer, *, separates_experts: bool = False, backend: str = "inductor"
) -> None:
    """Compile every block with torch.compile, before anything is sharded: hooks of FSDP and
    DeepSpeed stay outside.

    Args:
        model: Changed in place; after `apply_activation_checkpoint`.
        separates_experts: See `must_compile_pieces`.
        backend: A backend of torch.compile.
    """
    # Experts count tokens and set their balance losses in the first pass; a repeated pass must not
    # do it again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Inside a forward of DDP torch would cut each graph where a bucket of DDP ends, so that
    # gradients are sent while a model of one graph is in its backward. Blocks are graphs of their
    # own. A pass outside of that forward, such as a recomputation, is not cut: it would run other
    # code, and have other bits.
    torch._dynamo.config.optimize_ddp = False
    for block in list_blocks(model):
        if must_compile_pieces(block, separates_experts=separates_experts):
            _compile_pieces(block, backend)
        elif get_local_device().type == "cpu" and has_equal_bias_gradients(block):
            # In 16 bits torch 2.13's C++ for one sum that is stored twice declares a variable
            # twice, and no compiler takes it.
            for branch in list_branches(block):
                _compile_method(branch, backend)
        else:
            _compile_method((block, "forward"), backend)


def _compile_pieces(block: TransformerBlock, backend: str) -> None:
    layer = block.feed_forward
    assert isinstance(layer, MoELayer)
    pieces = [
        list_branches(block)[0],
        (layer.router, "compute_scores"),
        (layer.router, "select_experts"),
    ]
    for piece in pieces:
        _compile_method(piece, backend)
    # The number of rows of an expert's rank differs in every step.
    _compile_method((layer.experts, "apply_activation"), backend, dynamic=True)
    if isinstance(layer.shared, FeedForward):
        _compile_method((layer.shared, "apply_activation"), backend)


def _compile_method(piece: Piece, backend: str, *, dynamic: bool | None = None) -> None:
    owner, name = piece
    eager: Callable[..., Any] = getattr(owner, name)
    compiled = torch.compile(eager, backend=backend, dynamic=dynamic)

    def call_compiled(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or (dynamic and _has_few_rows(inputs)):
            return eager(*inputs, **named)
        return compiled(*inputs, **named)

    setattr(owner, name, call_compiled)


def _has_few_rows(inputs: tuple[Any, ...]) -> bool:
    """Return whether an input has fewer than two rows: sizes 0 and 1 are never dynamic, and
    compiled apart.
    """
    return any(isinstance(value, Tensor) and len(value) < 2 for value in inputs)

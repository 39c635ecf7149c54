"""Recompute and compile the blocks of a model, in the order that the two need."""

from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import (
    ActivationCheckpointMode,
    apply_activation_checkpoint,
)
from llmsys.parallel.block_compilation import compile_blocks


def wrap_blocks(
    model: Transformer,
    mode: ActivationCheckpointMode,
    *,
    compiles: bool,
    tensor_ranks: int = 1,
    separates_experts: bool = False,
    backend: str = "inductor",
) -> None:
    """Wrap the forward of every block for recomputation, and compile it.

    Args:
        model: A model before FSDP.
        mode: What is recomputed, see `apply_activation_checkpoint`.
        compiles: Whether blocks are compiled.
        tensor_ranks: Ranks of the tensor axis.
        separates_experts: See `must_compile_pieces`.
        backend: A backend of torch.compile.
    """
    if compiles and mode == "full" and tensor_ranks > 1:
        # A graph with a recomputed block of DTensors saves their mesh, which autograd of torch 2.13
        # refuses to keep. So compiled blocks are recomputed, and experts, which would count tokens
        # twice in a graph, are left out of it.
        compile_blocks(model, separates_experts=True, backend=backend)
        apply_activation_checkpoint(model, mode)
        return
    # Otherwise compilation sees the recomputation, and chooses what it saves.
    apply_activation_checkpoint(model, mode, compiled=compiles, separates_experts=separates_experts)
    if compiles:
        compile_blocks(model, separates_experts=separates_experts, backend=backend)

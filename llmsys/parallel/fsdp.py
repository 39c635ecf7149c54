"""FSDP2 as one way to train on many ranks: parameters, gradients and moments in shards, experts and axes with it.

What all ways have in common is `DataParallelModel`; the other one is `DdpModel` in copies.py.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmsys.model.layer_stack import LayerStack
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.parallelize import (
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_context_parallel,
    materialize_parameters,
)
from llmsys.parallel.sequence_sharding import SequenceSharding
from llmsys.parallel.tensor_parallel import PartialGradientReducer

Offload = Literal["none", "state"]
Gradients = Literal["sharded", "whole"]
Initial = Callable[[str, torch.Size], Tensor]


class DataParallelModel(Protocol):
    """How the ranks of a run hold one model, and when their gradients meet."""

    sharding: SequenceSharding

    @property
    def forward(self) -> Callable[..., Tensor]:
        """The model, to be called."""
        ...

    def enter_micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients need to be whole after the `last` one only."""
        ...

    def finish_gradients(self) -> None:
        """After the last micro-batch: now the gradients are those of the step. Collective."""
        ...

    def reshard_parameters(self) -> None:
        """Before masters are read: after a forward without backward weights may still be whole."""
        ...


class FsdpModel:
    """FSDP2. `model` comes from the meta device and gets its starting values from `initial`."""

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        offload: Offload,
        gradients: Gradients,
        initial: Initial,
    ) -> None:
        self.forward: Callable[..., Tensor] = model
        apply_expert_parallel(model, meshes)
        self.sharding = apply_tensor_context_parallel(model, meshes)
        self._partial = PartialGradientReducer(model, meshes.tensor)
        apply_fsdp(model, meshes, compute_dtype, offload)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._replicated, self._whole = meshes.layout.replicate > 1, gradients == "whole"
        if meshes.expert is not None:
            configure_prefetch(model)
        materialize_parameters(model, device, initial, on_host=offload == "state")

    def enter_micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See DataParallel. All in fp32: sums over shards after every backward, between replicas once per step.

        Whole gradients add up where they are instead, four bytes for each parameter of this rank's experts and of all
        else, and are summed over ranks once per step.
        """
        for unit in self._units:
            if self._whole:
                unit.set_requires_gradient_sync(last, recurse=False)
            elif self._replicated:
                unit.set_requires_all_reduce(last, recurse=False)
        return contextlib.nullcontext()

    def finish_gradients(self) -> None:
        """See DataParallel."""
        self._partial.all_reduce()

    def reshard_parameters(self) -> None:
        """See DataParallel."""
        for unit in self._units:
            unit.reshard()


def configure_prefetch(model: Transformer) -> None:
    """Gather the weights of the next block while this one computes, those of its experts too; backward likewise.

    FSDP's own prefetch rests on the host running ahead of the device, and a layer that exchanges tokens makes the host
    wait for their numbers.
    """
    for block, following in pairwise(map(_list_fsdp_units, list_blocks_in_order(model))):
        block[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(block)


def list_blocks_in_order(model: Transformer) -> list[TransformerBlock]:
    """As a forward pass runs them: encoder, decoder, prediction modules."""
    stacks: list[LayerStack] = [model] if model.encoder is None else [model.encoder, model]
    predicted = [
        block for module in model.prediction for block in module.modules() if isinstance(block, TransformerBlock)
    ]
    return [block for stack in stacks for block in stack.blocks if isinstance(block, TransformerBlock)] + predicted


def _list_fsdp_units(block: TransformerBlock) -> list[FSDPModule]:
    """What FSDP gathers for a block: first the block, then its experts where they are a unit of their own."""
    return [module for module in block.modules() if isinstance(module, FSDPModule)]

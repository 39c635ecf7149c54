"""FSDP2 data parallelism, and the protocol that it shares with DDP (ddp.py) and plain data
parallelism (plain.py).
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from llmsys.model.initialization import Initializer
from llmsys.model.layer_stack import LayerStack
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.gradient_clipping import list_absent_gradients
from llmsys.parallel.parallelize import (
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_context_parallel,
    materialize_parameters,
)
from llmsys.parallel.sequence_sharding import SequenceSharding
from llmsys.parallel.tensor_parallel import PartialGradientReducer

DataParallel = Literal["fsdp", "ddp", "plain"]
Offload = Literal["none", "state"]
Gradients = Literal["sharded", "whole"]
Reshard = Literal["after_forward", "never", "after_step"]


class DataParallelModel(Protocol):
    """A model over the ranks of a run, and the synchronization of its gradients."""

    sharding: SequenceSharding
    masters: dict[str, nn.Parameter]
    """float32 parameters of this rank by name, or its shards of them: the optimizer's. In the model
    other tensors may stand in their places.
    """

    @property
    def forward(self) -> Callable[..., Tensor]:
        """The callable that runs the model."""
        ...

    def prepare_weights(self) -> None:
        """Make the weights ready for the first micro-batch of a step. Collective."""
        ...

    def enter_micro_batch(
        self, *, last: bool, stage: int | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of forward and backward of a micro-batch.

        Args:
            last: It is the last one of the step: afterwards `finish_gradients` can complete the
                gradients.
            stage: In a pipeline, the stage whose backward pass the context is for; `last` is then
                said of that stage alone. Default: None, there is no pipeline.
        """
        ...

    def finish_gradients(self) -> None:
        """Complete the gradients of the step, after the last micro-batch. Collective."""
        ...

    def reshard_parameters(self) -> None:
        """Reshard parameters before masters are read or written: after a forward without backward
        they may still be gathered. The next forward reads what the masters then are.
        """
        ...

    def list_absent_gradients(self) -> tuple[str, ...]:
        """List the parameters that had no gradient on this rank, after `finish_gradients`."""
        ...

    def get_master(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the master of a parameter of the model, while no parameter is gathered."""
        ...


class FsdpModel:
    """FSDP2 around a model from the meta device, with initial values from `initial`.

    `find_stage` returns the stage of a pipeline that a module belongs to, by name; None without a
    pipeline. `reshard` and `reduce_dtype` are those of `TorchEngineConfig`.
    """

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        offload: Offload,
        gradients: Gradients,
        initial: Initializer,
        find_stage: Callable[[str], int | None] | None = None,
        reshard: Reshard = "after_forward",
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Shard the model, then allocate and fill this rank's shards.

        Args:
            model: A model on the meta device; changed in place.
            meshes: Sub-meshes of the run's layout.
            compute_dtype: Dtype of the forward; masters are float32.
            device: Device of this rank.
            offload: "state" keeps the shards of masters and gradients in host memory, where the
                optimizer then runs. "none" keeps them on `device`.
            gradients: "sharded" reduces after every backward. "whole" accumulates unsharded float32
                gradients over the micro-batches, and reduces them once per step.
            initial: Computes initial values, see `build_initializer`.
            find_stage: Returns the stage of a pipeline that a module belongs to, by name. Default:
                None, there is no pipeline.
            reshard: When gathered weights are freed. "after_forward": after the forward of a block,
                so its backward gathers them again. "never": after its backward. "after_step": in
                the last backward of a step.
            reduce_dtype: Dtype in which gradients are summed over ranks. Micro-batches are added in
                float32.
        """
        self.forward: Callable[..., Tensor] = model
        apply_expert_parallel(model, meshes)
        self.sharding = apply_tensor_context_parallel(model, meshes)
        # Before FSDP makes every parameter a DTensor: until then the unsplit ones are those that
        # are not.
        self._partial = PartialGradientReducer(model, meshes.tensor)
        apply_fsdp(model, meshes, compute_dtype, offload, reduce_dtype)
        self._model = model
        self._units_by_stage: dict[int | None, list[FSDPModule]] = defaultdict(list)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                self._units_by_stage[None if find_stage is None else find_stage(name)].append(
                    module
                )
                if reshard != "after_forward":
                    module.set_reshard_after_forward(False, recurse=False)
        self._keeps_weights = reshard == "after_step"
        # A reversible block runs twice, once for each of its branches, and reduces the gradients of
        # each branch by themselves. FSDP2 adds what waits for the replicas by its place in a flat
        # tensor: those of the attention would be added to those of the feed-forward.
        self._reduces_over_replicas_once = (
            meshes.layout.replicate > 1 and not model.config.residual.is_reversible
        )
        self._whole = gradients == "whole"
        if meshes.expert is not None:
            configure_prefetch(model, find_stage)
        if find_stage is not None:
            limit_prefetch_to_stages(model, find_stage)
        # Last, when each rank needs storage for its own shards only.
        materialize_parameters(model, device, initial, on_host=offload == "state")
        # FSDP2 puts other tensors in their places while it has gathered them.
        self.masters = dict(model.named_parameters())

    def prepare_weights(self) -> None:
        """Do nothing: a forward gathers its weights."""

    def enter_micro_batch(
        self, *, last: bool, stage: int | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a micro-batch. All sums are in float32, but for those over ranks in
        another `reduce_dtype`.

        Sharded gradients are reduced over shards after every backward, and between replicas once
        per step; those of reversible blocks after every backward, too. Whole gradients accumulate
        unsharded, four bytes per parameter of this rank's experts and of all else, and are reduced
        once per step. A unit reduces in a backward that gives it gradients and in no other, so only
        the last one of its own stage will do.

        Args:
            last: It is the last micro-batch of the step, or of the stage.
            stage: The stage of a pipeline whose units are meant. Default: None, there is no
                pipeline.
        """
        for unit in self._units_by_stage[stage]:
            if self._keeps_weights:
                unit.set_reshard_after_backward(last, recurse=False)
            if self._whole:
                unit.set_requires_gradient_sync(last, recurse=False)
            elif self._reduces_over_replicas_once:
                unit.set_requires_all_reduce(last, recurse=False)
        return contextlib.nullcontext()

    def finish_gradients(self) -> None:
        """Sum the gradients of unsharded parameters over the tensor axis. Collective."""
        self._partial.all_reduce()

    def reshard_parameters(self) -> None:
        """Reshard every FSDP unit."""
        reshard_parameters(self._model)

    def list_absent_gradients(self) -> tuple[str, ...]:
        """Implement `DataParallelModel.list_absent_gradients`."""
        return list_absent_gradients(self.masters.items())

    def get_master(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the parameter itself: FSDP2 puts its shard into the model."""
        return weight


def reshard_parameters(model: nn.Module) -> None:
    """Reshard every FSDP unit of a model, so that its parameters are the masters.

    After a forward without backward (evaluation, generation) the root is still gathered:
    `model.parameters()` lists other tensors then, whose gradients FSDP2 takes away as it reduces
    them.

    Args:
        model: The model; nothing happens to one without FSDP2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def configure_prefetch(
    model: Transformer, find_stage: Callable[[str], int | None] | None = None
) -> None:
    """Prefetch the weights of the next block, its experts included, in forward and backward.

    FSDP's own prefetch relies on the host running ahead of the device; an all-to-all of tokens
    makes the host wait for their counts.

    Args:
        model: The model, after `apply_fsdp`.
        find_stage: Returns the stage of a pipeline that a module belongs to, by name: weights of
            another stage would wait for it. Default: None, there is no pipeline.
    """
    predicted = set(_list_prediction_blocks(model))
    names = {module: name for name, module in model.named_modules()}
    for block, following in pairwise(list_blocks_in_order(model)):
        if find_stage is not None and find_stage(names[block]) != find_stage(names[following]):
            continue
        units, next_units = _list_fsdp_units(block), _list_fsdp_units(following)
        # An evaluation does not run the prediction modules: what it prefetched of them would wait
        # for the next step, with weights, or an average of them, that have changed since.
        if block in predicted or following not in predicted:
            units[0].set_modules_to_forward_prefetch(next_units)
        next_units[0].set_modules_to_backward_prefetch(units)


def limit_prefetch_to_stages(model: Transformer, find_stage: Callable[[str], int | None]) -> None:
    """Prefetch in a backward the block before in the same stage of a pipeline, and no other.

    FSDP's own prefetch takes the unit that ran before in a forward. Before the first block of a
    stage that is one of another micro-batch or stage: its weights would be gathered, and freed
    unused at the end of this backward.

    Args:
        model: The model, after `apply_fsdp`.
        find_stage: Returns the stage that a module belongs to, by name.
    """
    names = {module: name for name, module in model.named_modules()}
    before: dict[int | None, list[FSDPModule]] = {}
    for block in list_blocks_in_order(model):
        units = _list_fsdp_units(block)
        for unit in units:
            # Itself, which is gathered already: without a list FSDP would choose.
            unit.set_modules_to_backward_prefetch([unit])
        stage = find_stage(names[block])
        if stage in before:
            units[0].set_modules_to_backward_prefetch(before[stage])
        before[stage] = units
    if len(before) > 1:
        assert isinstance(model, FSDPModule)
        # What is outside of blocks takes part in the backward of every stage of the rank, and would
        # prefetch the block that ran last, which may be another stage's.
        model.set_modules_to_backward_prefetch([model])


def list_blocks_in_order(model: Transformer) -> list[TransformerBlock]:
    """List the blocks in the order of a forward pass.

    Args:
        model: The model.

    Returns:
        Those of the encoder, of the decoder and of the prediction modules.
    """
    stacks: list[LayerStack] = [model] if model.encoder is None else [model.encoder, model]
    trunk = [
        block for stack in stacks for block in stack.blocks if isinstance(block, TransformerBlock)
    ]
    return trunk + _list_prediction_blocks(model)


def _list_prediction_blocks(model: Transformer) -> list[TransformerBlock]:
    return [
        block
        for module in model.prediction
        for block in module.modules()
        if isinstance(block, TransformerBlock)
    ]


def _list_fsdp_units(block: TransformerBlock) -> list[FSDPModule]:
    """List the FSDP units of a block: itself, then its experts where they are a separate unit."""
    return [module for module in block.modules() if isinstance(module, FSDPModule)]

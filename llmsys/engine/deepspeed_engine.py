"""The DeepSpeed engine: ZeRO at every stage around torch's AdamW, experts dealt by our own dispatcher.

What DeepSpeed does differently from the protocol, and how it is undone here: it divides gradients by the world size
(the loss is multiplied by it), rounds the starting weights to the compute dtype before it makes masters (masters are
set again from fp32), casts buffers (put back), and owns its shards (`state` gathers one parameter at a time and keeps
a slice). In stage 0 it would add gradients of micro-batches up in bf16; there it gets fp32 parameters that the forward
reads as bf16. Its files:
deepspeed_setup says what it is given, deepspeed_place, _state and _partitions where it keeps things, deepspeed_gate how
a step is refused.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.deepspeed_setup import adamw, materialize_partitioned, materialize_whole, settings_of, wrap
from llmsys.engine.deepspeed_state import place_of
from llmsys.engine.engine import (
    Accept,
    LogicalState,
    Loss,
    StepResult,
    always,
    counts_of,
    saved_buffers,
    sums_of,
)
from llmsys.engine.loss_scale import LossScale
from llmsys.engine.objective import shares_of
from llmsys.model.init import initial_value
from llmsys.model.transformer import Transformer
from llmsys.optim.build import MOMENTS
from llmsys.optim.groups import role_of
from llmsys.optim.rate import set_rates
from llmsys.parallel.cast import compute_in
from llmsys.parallel.group import world_size
from llmsys.parallel.mesh import Meshes
from llmsys.parallel.slices import as_shard


class DeepSpeedEngine:
    """ZeRO around torch's AdamW. `model` is built on the meta device; see TorchEngine for the arguments."""

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: Meshes,
        zero_stage: int,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute_dtype: torch.dtype,
        seed: int,
        device: torch.device,
        offload: Literal["none", "optimizer"] = "none",
    ) -> None:
        self.device = device
        self.module = model
        self._meshes = meshes
        self._loss = loss
        self._scale = LossScale() if compute_dtype == torch.float16 else None
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        clip = optimizer.gradient_clip
        offloads = offload == "optimizer"
        settings = settings_of(model, zero_stage=zero_stage, offload=offloads, clip=clip, compute_dtype=compute_dtype)
        if zero_stage == 3:
            materialize_partitioned(model, settings, device, compute_dtype, seed)
        else:
            materialize_whole(model, meshes, device, seed)
        made = adamw(dict(model.named_parameters()), self._shapes, meshes, optimizer)
        self._engine = wrap(model, made, settings)
        if zero_stage == 0:
            compute_in(model, compute_dtype)
        self._place = place_of(self._engine, zero_stage, clip, meshes)
        self._set_masters(seed)

    def _set_masters(self, seed: int) -> None:
        """Masters in fp32 as they start in every engine, not as the compute dtype rounds them."""
        for name, parameter in self.module.named_parameters():
            value = initial_value(self.module.config, name, self._shapes[name], seed)
            if self._is_split(name):
                place = self._meshes.expert.get_local_rank()  # type: ignore[union-attr]
                value = value.chunk(self._meshes.expert.size())[place]  # type: ignore[union-attr]
            self._place.set(parameter, value.to(self.device), None)
        self._place.publish()

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = always, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine."""
        self._engine.train()
        counts = counts_of(batches, self.device)
        set_rates(self._engine.optimizer.param_groups, learning_rate)
        # DeepSpeed divides by the world size, for experts too; the product undoes it exactly for powers of two.
        factor = world_size() * (1.0 if self._scale is None else self._place.scale_by(self._scale.value))
        total = torch.zeros((), device=self.device)
        for place, batch in enumerate(batches, start=1):
            self._engine.set_gradient_accumulation_boundary(place == len(batches))
            total += self._backward(batch.to(self.device), counts, factor)
        loss, sums = sums_of(total, counts[0], extras)
        norm, applied = self._place.step(loss, self._judged(accept))
        return StepResult(loss, norm, int(counts[0]), applied, sums)

    def _backward(self, batch: Batch, counts: Tensor, factor: float) -> Tensor:
        share, nats = shares_of(self.module, self._engine, batch, self._loss, counts)
        self._engine.backward(share * factor, scale_wrt_gas=False)
        return nats

    def _judged(self, accept: Accept) -> Accept:
        """`accept`, asked only about steps that fit fp16 where that is the precision."""
        scale = self._scale
        return accept if scale is None else lambda loss, norm: scale.fits(loss, norm) and accept(loss, norm)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """See Engine."""
        self._engine.eval()
        logits_BTV: Tensor = self._engine(**batch.to(self.device).inputs())
        return logits_BTV

    def state(self) -> LogicalState:
        """See Engine. One parameter is whole at a time; each rank keeps its share of the first dimension."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = self._share(name, self._place.get(parameter, None))
            for ours, theirs in MOMENTS.items():
                tensors[f"{ours}/{name}"] = self._share(name, self._place.get(parameter, theirs))
        tensors |= {f"buffer/{name}": buffer for name, buffer in saved_buffers(self.module)}
        tensors |= {} if self._scale is None else self._scale.state()
        return LogicalState(tensors, int(self._place.counters()[0]))

    def load(self, state: LogicalState) -> None:
        """See Engine."""
        for name, parameter in self.module.named_parameters():
            self._place.set(parameter, self._whole(name, state.tensors[f"parameter/{name}"]), None)
            for ours, theirs in MOMENTS.items():
                self._place.set(parameter, self._whole(name, state.tensors[f"{ours}/{name}"]), theirs)
        for name, buffer in saved_buffers(self.module):
            buffer.copy_(state.tensors[f"buffer/{name}"])
        for name, tensor in {} if self._scale is None else self._scale.state().items():
            tensor.copy_(state.tensors.get(name, tensor))
        for steps in self._place.counters():
            steps.fill_(state.steps)
        self._place.publish()

    def _is_split(self, name: str) -> bool:
        return self._meshes.expert is not None and role_of(name) == "experts"

    def _share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share: split experts are shared over the expert axis, everything else over all ranks."""
        if self._is_split(name):
            return DTensor.from_local(whole.clone(), self._meshes.expert, [Shard(0)], run_check=False)
        return as_shard(whole, self._meshes.world)

    def _whole(self, name: str, share: Tensor) -> Tensor:
        if not isinstance(share, DTensor):
            return share
        return share.to_local() if self._is_split(name) else share.full_tensor()

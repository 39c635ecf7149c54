"""The torch engine: FSDP2, DDP or plain data parallelism over one or many ranks, with every axis
of a layout.

float32 masters are in shards or replicas; the forward computes in the given dtype; gradients are
summed in float32.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, assert_never

import torch
from torch import Tensor

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import (
    Accept,
    EngineState,
    GradientProbe,
    Loss,
    ObserveGradients,
    StepResult,
    accept_all,
    drop_counts,
    enter_training,
    iter_persistent_buffers,
    reduce_step_numbers,
    reduce_token_counts,
)
from llmsys.engine.grad_scaler import GradScaler
from llmsys.engine.logit_clip import LogitClip
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.engine.pipelined_model import PipelinedModel
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.model.initialization import build_initializer
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import MOMENTS, build_optimizer
from llmsys.optim.lr_schedule import set_rates
from llmsys.parallel.ddp import DdpModel
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.distributed_muon import map_full_matrices
from llmsys.parallel.dtensor_slices import group_by_mesh
from llmsys.parallel.fsdp import (
    DataParallel,
    DataParallelModel,
    FsdpModel,
    Gradients,
    Offload,
    Reshard,
)
from llmsys.parallel.full_tensors import build_sharded_zeros, update_full_tensors
from llmsys.parallel.gradient_clipping import clip_gradients, collect_gradients
from llmsys.parallel.plain import PlainModel
from llmsys.parallel.shard_sums import build_sharded_sums, sum_over_shards


class TorchEngine:
    """AdamW or Muon around FSDP2, DDP or plain data parallelism.

    Args:
        model: A model on the meta device; it gets its initial values here.
        meshes: Sub-meshes of the run's layout.
        optimizer: The `optimizer:` section.
        loss: The loss at the head.
        compute_dtype: Dtype of the forward; in float16 the loss is scaled.
        seed: Seed of the initial values.
        device: Device of this rank.
        initialize: Draw the initial values. False: a checkpoint will replace them.
        data_parallel: FSDP2, DDP, or whole weights without a wrapper.
        offload: "state" keeps shards in host memory. FSDP2 only.
        gradients: "whole" accumulates unsharded gradients over micro-batches. FSDP2 only.
        reshard: When gathered weights are freed. FSDP2 only.
        reduce_dtype: Dtype of gradients that are summed over ranks. FSDP2 only.
        cut: The layers of every stage of a pipeline; None: cut by cost. FSDP2 only.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: DeviceMeshes,
        optimizer: OptimizerConfig,
        loss: Loss,
        compute_dtype: torch.dtype,
        seed: int,
        device: torch.device,
        initialize: bool = True,
        data_parallel: DataParallel = "fsdp",
        offload: Offload = "none",
        gradients: Gradients = "sharded",
        reshard: Reshard = "after_forward",
        reduce_dtype: torch.dtype = torch.float32,
        cut: PipelineCut | None = None,
    ) -> None:
        self.device = device
        self.module = model
        self._loss = loss
        self._clip = optimizer.max_grad_norm
        self._scale = GradScaler() if compute_dtype == torch.float16 else None
        self.observe_gradients: ObserveGradients | None = None
        self.gradient_probe: GradientProbe | None = None
        """Looks at the gradients of a part of each step."""

        self.pipeline = (
            None
            if meshes.pipeline is None
            else PipelinedModel(model, meshes, cut, compute_dtype, device)
        )
        self._data_parallel: DataParallelModel
        initial = build_initializer(model.config, seed, draws=initialize)
        common: dict[str, Any] = {
            "compute_dtype": compute_dtype,
            "device": device,
            "initial": initial,
        }
        match data_parallel:
            case "fsdp":
                find_stage = None if self.pipeline is None else self.pipeline.find_stage
                common |= {"offload": offload, "gradients": gradients, "find_stage": find_stage}
                common |= {"reshard": reshard, "reduce_dtype": reduce_dtype}
                self._data_parallel = FsdpModel(model, meshes, **common)
            case "ddp":
                self._data_parallel = DdpModel(model, meshes, **common)
            case "plain":
                self._data_parallel = PlainModel(model, meshes, **common)
            case unreachable:
                assert_never(unreachable)
        first = self.pipeline is None or self.pipeline.is_first_rank
        self._has_own_rows = first and self._data_parallel.sharding.is_first_rank
        self._ranks = meshes.layout.ranks_per_stage
        limit = optimizer.max_attention_logit
        self._logit_clip = (
            None if limit is None else LogitClip(model, limit, self._data_parallel.get_master)
        )
        self._masters = self._data_parallel.masters
        self._optimizer = build_optimizer(
            self._masters,
            optimizer,
            compute_dtype=compute_dtype,
            model=model.config,
            apply=map_full_matrices,
            alike=group_by_mesh,
            update=update_full_tensors,
            build_zeros=build_sharded_zeros,
            sum_shards=sum_over_shards,
            build_sums=build_sharded_sums,
        )

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`. The loss is divided by the targets of all ranks before
        backward.
        """
        enter_training(self.module)
        # Ranks that share rows must count them once.
        counts = reduce_token_counts(batches if self._has_own_rows else (), self.device)
        scale = 1.0 if self._scale is None else self._scale.scale
        total = self._add_gradients(batches, counts, scale)
        self._data_parallel.finish_gradients()
        absent = self._data_parallel.list_absent_gradients()
        doubled = () if self.pipeline is None else self.pipeline.finish_gradients()
        if self.observe_gradients is not None:
            self.observe_gradients(collect_gradients(self._masters.items()), scale)
        clipped = clip_gradients(
            self._masters.values(), self._clip, scale, ranks=self._ranks, doubled=doubled
        )
        loss, norm, targets, sums = reduce_step_numbers(total, counts, extras, clipped)
        fits = self._scale is None or self._scale.update_scale(loss, norm)
        # An overflow is cured by a smaller scale: the step guard is not asked.
        applied = fits and accept(loss, norm)
        if applied:
            self._step_optimizer(learning_rate)
        if self._logit_clip is not None:
            self._logit_clip.finish_step(applied=applied)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, targets, applied, sums, absent)

    def repeat_gradients(self, batches: Sequence[Batch], data_rank: int) -> None:
        """Implement `RepeatingEngine.repeat_gradients`. The caller has seeded dropout."""
        enter_training(self.module)
        self.gradient_probe = None
        counts = reduce_token_counts(batches if self._has_own_rows else (), self.device)
        self._add_gradients(batches, counts, 1.0 if self._scale is None else self._scale.scale)
        self._data_parallel.finish_gradients()
        self._optimizer.zero_grad(set_to_none=True)
        drop_counts(self.module)

    def _add_gradients(self, batches: Sequence[Batch], counts: Tensor, scale: float) -> Tensor:
        """Run forward and backward over all micro-batches, and return the sum of this rank's
        losses in nats.
        """
        if (probe := self.gradient_probe) is None:
            return self._add_part(batches, counts, scale)
        total = self._add_part(batches[: probe.count], counts, scale)
        probe.look()
        return total + self._add_part(batches[probe.count :], counts, scale)

    def _add_part(self, batches: Sequence[Batch], counts: Tensor, scale: float) -> Tensor:
        """Add the gradients of some micro-batches of a step; after the last of them those of the
        step so far are reduced.
        """
        if self.pipeline is not None:
            return self.pipeline.add_gradients(
                [batch.to(self.device) for batch in batches],
                self._data_parallel.forward,
                self._loss,
                counts,
                scale,
                enter_backward=lambda stage, last: self._data_parallel.enter_micro_batch(
                    last=last, stage=stage
                ),
                sharding=self._data_parallel.sharding,
            )
        self._data_parallel.prepare_weights()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            with self._data_parallel.enter_micro_batch(last=number == len(batches) - 1):
                total += self._train_micro_batch(batch.to(self.device), counts, scale)
        return total

    def _train_micro_batch(self, batch: Batch, counts: Tensor, scale: float) -> Tensor:
        share, nats = compute_loss_share(
            self.module,
            self._data_parallel.forward,
            batch,
            self._loss,
            counts,
            self._data_parallel.sharding,
        )
        (share * scale).backward()
        return nats

    def compute_partial_norm(self) -> float:
        """Return the norm of the gradients of the step's micro-batches so far, over all ranks.
        Collective.
        """
        with contextlib.ExitStack() as stack:
            doubled: tuple[Tensor, ...] = ()
            if self.pipeline is not None:
                doubled = stack.enter_context(self.pipeline.enter_finished_gradients())
            # A limit of 0 clips nothing.
            norm = clip_gradients(self._masters.values(), 0.0, ranks=self._ranks, doubled=doubled)
        return float(norm)

    def _step_optimizer(self, learning_rate: float) -> None:
        set_rates(self._optimizer.param_groups, learning_rate)
        self._optimizer.step()

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Implement `Engine.compute_logits`."""
        self.module.eval()
        batch = batch.to(self.device)
        if self.pipeline is not None:
            return self.pipeline.compute_logits(batch)
        logits_BTV: Tensor = self.module(**batch.to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The tensors are not copies: loading into them loads into
        the engine.
        """
        self._data_parallel.reshard_parameters()
        tensors: dict[str, Tensor] = {}
        steps = 0
        optimizer_state = self._optimizer.state
        for name, parameter in self._masters.items():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = optimizer_state[parameter]
            tensors |= {
                f"{ours}/{name}": moments[theirs]
                for ours, theirs in MOMENTS.items()
                if theirs in moments
            }
            steps = int(moments["step"])
        tensors |= {
            f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)
        }
        tensors |= self._optimizer.get_shared_state()
        return EngineState(
            tensors | ({} if self._scale is None else self._scale.state_dict()), steps
        )

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`."""
        own = self.get_state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for moments in self._optimizer.state.values():
            moments["step"].fill_(state.steps)

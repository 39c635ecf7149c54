"""The torch engine: FSDP2 or DDP over one or many ranks, with all that a layout can split.

fp32 masters live in shards or copies; the forward computes in the given dtype; gradients are summed in fp32.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import (
    Accept,
    EngineState,
    Loss,
    StepResult,
    accept_all,
    iter_persistent_buffers,
    reduce_sums,
    reduce_token_counts,
)
from llmsys.engine.grad_scaler import GradScaler
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.initialization import compute_initial_value
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import MOMENTS, build_optimizer
from llmsys.optim.lr_schedule import set_rates
from llmsys.parallel.ddp import DdpModel
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.distributed_muon import map_full_matrices
from llmsys.parallel.dtensor_slices import group_by_mesh
from llmsys.parallel.fsdp import DataParallelModel, FsdpModel, Gradients, Offload
from llmsys.parallel.gradient_clipping import clip_gradients


class TorchEngine:
    """AdamW or Muon around FSDP2 or DDP.

    `model` is built on the meta device and gets its starting values here, by `seed`. In fp16 the loss is scaled.
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
        data_parallel: Literal["fsdp", "ddp"] = "fsdp",
        offload: Offload = "none",
        gradients: Gradients = "sharded",
    ) -> None:
        self.device = device
        self.module = model
        self._loss = loss
        self._clip = optimizer.max_grad_norm
        self._scale = GradScaler() if compute_dtype == torch.float16 else None
        self.after_micro_batch: Callable[[int], None] | None = None
        """Called with the number of each micro-batch, when its gradients have been added to those of the step."""

        def build_initial_value(name: str, shape: torch.Size) -> Tensor:
            return compute_initial_value(model.config, name, shape, seed)

        self._ranks: DataParallelModel
        if data_parallel == "ddp":
            self._ranks = DdpModel(
                model, meshes, compute_dtype=compute_dtype, device=device, initial=build_initial_value
            )
        else:
            where: dict[str, Any] = {"device": device, "offload": offload, "gradients": gradients}
            self._ranks = FsdpModel(model, meshes, compute_dtype=compute_dtype, initial=build_initial_value, **where)
        self._optimizer = build_optimizer(
            dict(model.named_parameters()),
            optimizer,
            compute_dtype=compute_dtype,
            apply=map_full_matrices,
            alike=group_by_mesh,
        )

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = accept_all, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine. The loss is divided by the targets of all ranks before backward, so gradients need no factor."""
        self.module.train()
        counts = reduce_token_counts(batches if self._ranks.parts.is_first_rank else (), self.device)
        scale = 1.0 if self._scale is None else self._scale.scale
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            whole = number == len(batches) - 1 or self.after_micro_batch is not None
            with self._ranks.enter_micro_batch(last=whole):
                total += self._train_micro_batch(batch.to(self.device), counts, scale)
            if self.after_micro_batch is not None:
                self.after_micro_batch(number)
        self._ranks.finish_gradients()
        norm = float(clip_gradients(self.module.parameters(), self._clip, scale))
        loss, sums = reduce_sums(total, counts[0], extras)
        fits = self._scale is None or self._scale.update_scale(loss, norm)
        applied = fits and accept(loss, norm)
        if applied:
            self._step_optimizer(learning_rate)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, int(counts[0]), applied, sums)

    def _train_micro_batch(self, batch: Batch, counts: Tensor, scale: float) -> Tensor:
        share, nats = compute_loss_share(self.module, self._ranks.forward, batch, self._loss, counts, self._ranks.parts)
        (share * scale).backward()
        return nats

    def _step_optimizer(self, learning_rate: float) -> None:
        set_rates(self._optimizer.param_groups, learning_rate)
        self._optimizer.step()

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor:
        """See Engine."""
        self.module.eval()
        logits_BTV: Tensor = self.module(**batch.to(self.device).to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """See Engine. The tensors are the living ones: loading into them in place is loading into the engine."""
        self._ranks.reshard_parameters()
        tensors: dict[str, Tensor] = {}
        steps, optimizer_state = 0, self._optimizer.state
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = optimizer_state[parameter]
            tensors |= {f"{ours}/{name}": moments[theirs] for ours, theirs in MOMENTS.items() if theirs in moments}
            steps = int(moments["step"])
        tensors |= {f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)}
        return EngineState(tensors | ({} if self._scale is None else self._scale.state_dict()), steps)

    def load_state(self, state: EngineState) -> None:
        """See Engine."""
        own = self.get_state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for moments in self._optimizer.state.values():
            moments["step"].fill_(state.steps)

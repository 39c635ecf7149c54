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
from llmsys.optim.build import MOMENTS, make_optimizer
from llmsys.optim.rate import set_rates
from llmsys.parallel.clip import clip_gradients
from llmsys.parallel.copies import Copies
from llmsys.parallel.mesh import Meshes
from llmsys.parallel.shards import DataParallel, Gradients, Offload, Shards
from llmsys.parallel.slices import by_mesh
from llmsys.parallel.whole_matrices import on_whole_matrices


class TorchEngine:
    """AdamW or Muon around FSDP2 or DDP.

    `model` is built on the meta device and gets its starting values here, by `seed`. In fp16 the loss is scaled.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        meshes: Meshes,
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
        self._clip = optimizer.gradient_clip
        self._scale = LossScale() if compute_dtype == torch.float16 else None
        self.after_micro_batch: Callable[[int], None] | None = None
        """Called with the number of each micro-batch, when its gradients have been added to those of the step."""

        def initial(name: str, shape: torch.Size) -> Tensor:
            return initial_value(model.config, name, shape, seed)

        self._ranks: DataParallel
        if data_parallel == "ddp":
            self._ranks = Copies(model, meshes, compute_dtype=compute_dtype, device=device, initial=initial)
        else:
            where: dict[str, Any] = {"device": device, "offload": offload, "gradients": gradients}
            self._ranks = Shards(model, meshes, compute_dtype=compute_dtype, initial=initial, **where)
        self._optimizer = make_optimizer(
            dict(model.named_parameters()),
            optimizer,
            compute_dtype=compute_dtype,
            apply=on_whole_matrices,
            alike=by_mesh,
        )

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = always, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine. The loss is divided by the targets of all ranks before backward, so gradients need no factor."""
        self.module.train()
        counts = counts_of(batches if self._ranks.parts.first else (), self.device)
        scale = 1.0 if self._scale is None else self._scale.value
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            whole = number == len(batches) - 1 or self.after_micro_batch is not None
            with self._ranks.micro_batch(last=whole):
                total += self._backward(batch.to(self.device), counts, scale)
            if self.after_micro_batch is not None:
                self.after_micro_batch(number)
        self._ranks.finish()
        norm = float(clip_gradients(self.module.parameters(), self._clip, scale))
        loss, sums = sums_of(total, counts[0], extras)
        fits = self._scale is None or self._scale.fits(loss, norm)
        applied = fits and accept(loss, norm)
        if applied:
            self._update(learning_rate)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, int(counts[0]), applied, sums)

    def _backward(self, batch: Batch, counts: Tensor, scale: float) -> Tensor:
        share, nats = shares_of(self.module, self._ranks.forward, batch, self._loss, counts, self._ranks.parts)
        (share * scale).backward()
        return nats

    def _update(self, learning_rate: float) -> None:
        set_rates(self._optimizer.param_groups, learning_rate)
        self._optimizer.step()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """See Engine."""
        self.module.eval()
        logits_BTV: Tensor = self.module(**batch.to(self.device).inputs())
        return logits_BTV

    def state(self) -> LogicalState:
        """See Engine. The tensors are the living ones: loading into them in place is loading into the engine."""
        self._ranks.settle()
        tensors: dict[str, Tensor] = {}
        steps, optimizer_state = 0, self._optimizer.state
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = optimizer_state[parameter]
            tensors |= {f"{ours}/{name}": moments[theirs] for ours, theirs in MOMENTS.items() if theirs in moments}
            steps = int(moments["step"])
        tensors |= {f"buffer/{name}": buffer for name, buffer in saved_buffers(self.module)}
        return LogicalState(tensors | ({} if self._scale is None else self._scale.state()), steps)

    def load(self, state: LogicalState) -> None:
        """See Engine."""
        own = self.state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for moments in self._optimizer.state.values():
            moments["step"].fill_(state.steps)

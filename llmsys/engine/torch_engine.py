"""The torch engine: FSDP2 over one or many ranks, experts split where the layout says so.

fp32 masters live in shards; the forward computes in the given dtype; gradients are summed in fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

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
from llmsys.engine.objective import shares_of
from llmsys.model.init import initial_value
from llmsys.model.transformer import Transformer
from llmsys.optim.build import MOMENTS, make_optimizer
from llmsys.parallel.apply import divide_sequences, materialize, shard_parameters, split_experts
from llmsys.parallel.clip import clip_gradients
from llmsys.parallel.mesh import Meshes
from llmsys.parallel.slices import by_mesh
from llmsys.parallel.tensor import PartialGradients
from llmsys.parallel.whole_matrices import on_whole_matrices


class TorchEngine:
    """FSDP2 around AdamW or Muon. `model` is built on the meta device and gets its starting values here, by `seed`."""

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
    ) -> None:
        self.device = device
        self.module = model
        self._meshes = meshes
        self._loss = loss
        self._clip = optimizer.gradient_clip
        split_experts(model, meshes)
        self._parts = divide_sequences(model, meshes)
        self._partial = PartialGradients(model, meshes.tensor)
        shard_parameters(model, meshes, compute_dtype)
        materialize(model, device, lambda name, shape: initial_value(model.config, name, shape, seed))
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
        counts = counts_of(batches if self._parts.first else (), self.device)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            total += self._backward(batch.to(self.device), counts)
        self._partial.sum()
        norm = clip_gradients(self.module.parameters(), self._clip)
        loss, sums = sums_of(total, counts[0], extras)
        applied = accept(loss, float(norm))
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * group["rate_scale"]
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, float(norm), int(counts[0]), applied, sums)

    def _backward(self, batch: Batch, counts: Tensor) -> Tensor:
        share, nats = shares_of(self.module, self.module, batch, self._loss, counts, self._parts)
        share.backward()
        return nats

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """See Engine."""
        self.module.eval()
        logits_BTV: Tensor = self.module(**batch.to(self.device).inputs())
        return logits_BTV

    def state(self) -> LogicalState:
        """See Engine. The tensors are the living ones: loading into them in place is loading into the engine."""
        # After a forward without backward, such as an evaluation or a generation, the root's weights are still whole.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors: dict[str, Tensor] = {}
        steps, optimizer_state = 0, self._optimizer.state
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            moments = optimizer_state[parameter]
            tensors |= {f"{ours}/{name}": moments[theirs] for ours, theirs in MOMENTS.items() if theirs in moments}
            steps = int(moments["step"])
        tensors |= {f"buffer/{name}": buffer for name, buffer in saved_buffers(self.module)}
        return LogicalState(tensors, steps)

    def load(self, state: LogicalState) -> None:
        """See Engine."""
        own = self.state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        for moments in self._optimizer.state.values():
            moments["step"].fill_(state.steps)

"""The torch engine in bitwise mode: the same weights and moments, bit for bit, on any number of processes.

FSDP2 as in fast mode, with every sum in a fixed order:

- A step is a fixed list of micro-batches. Rank r of W computes the micro-batches r, W + r, 2W + r, …, each with the
  same shapes, kernels and dropout on any rank (experts too, see reproducible_sharding.py).
- Gradients are summed over micro-batches by one binary tree (reproducible_sum.py), across ranks and in time.
- The norm is summed over the rows of all parameters, AdamW consists of operations that round once (bitwise_adamw.py),
  and metrics are gathered by micro-batch and summed in float64.

Requires W to be a power of two that divides the micro-batches of a step. Compared machines must have the same kind of
device, the same libraries and, on CPUs, the same number of threads.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.data.shuffle import derive_order_key
from llmsys.engine.engine import (
    Accept,
    EngineState,
    Loss,
    StepResult,
    accept_all,
    iter_persistent_buffers,
    reduce_token_counts,
)
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.initialization import build_initializer
from llmsys.model.transformer import Transformer
from llmsys.optim.bitwise_adamw import BitwiseAdamW
from llmsys.optim.build_optimizer import require_adamw
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.gradient_clipping import list_local_gradients
from llmsys.parallel.parallelize import materialize_parameters
from llmsys.parallel.process_group import all_gather_tensor, get_rank, get_world_size
from llmsys.parallel.reproducible_sharding import apply_reproducible_fsdp
from llmsys.parallel.reproducible_sum import StreamingTreeSum, compute_gradient_norm, sum_rows_pairwise

# J numbers of one micro-batch, M micro-batches of a step


class BitwiseEngine:
    """FSDP2 with sums in a fixed order; arguments as for `TorchEngine`. `train_step` gets every W-th micro-batch."""

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
    ) -> None:
        self.device = device
        self.module = model
        self._loss = loss
        self._seed = seed
        self._clip = optimizer.max_grad_norm
        # Replicas hold the same rows, of which the norm counts one copy.
        self._first_copy = get_rank() < meshes.layout.ranks_per_replica
        use_deterministic_kernels(device)
        apply_reproducible_fsdp(model, meshes, compute_dtype)
        materialize_parameters(model, device, build_initializer(model.config, seed, draws=initialize))
        self._optimizer = BitwiseAdamW(dict(model.named_parameters()), require_adamw(optimizer))

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = accept_all, extras: Sequence[float] = ()
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        self.module.train()
        counts = reduce_token_counts(batches, self.device)
        sums, numbers = StreamingTreeSum(), []
        for index, batch in enumerate(batches):
            self._seed_dropout(index * get_world_size() + get_rank())
            numbers.append(self._train_micro_batch(batch.to(self.device), counts))
            sums.add_leaf(self._take_gradients())
        gradients = sums.compute_total()
        norm = compute_gradient_norm(list(self.module.parameters()), gradients, counts=self._first_copy)
        nats, extra_sums = self._sum_step_numbers(numbers, extras)
        loss = nats / float(counts[0])
        applied = accept(loss, norm)
        if applied:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
            self._optimizer.step(gradients, learning_rate, scale)
        return StepResult(loss, norm, int(counts[0]), applied, extra_sums)

    def _seed_dropout(self, micro_batch: int) -> None:
        """Seed dropout by (seed, step, micro-batch of the step)."""
        # torch takes seeds of 63 bits.
        torch.manual_seed(derive_order_key("dropout", self._seed, self._optimizer.steps, micro_batch) >> 1)

    def _train_micro_batch(self, batch: Batch, counts: Tensor) -> Tensor:
        """Compute the gradients of one micro-batch per rank, summed over ranks; return the J metrics of this rank's."""
        share, nats = compute_loss_share(self.module, self.module, batch, self._loss, counts)
        share.backward()
        counted = [sums for layer in self.module.list_auxiliary_layers() for sums in layer.get_step_counters()]
        numbers_J = torch.cat([part.double().flatten() for part in (nats, *counted)])
        for layer in self.module.list_auxiliary_layers():
            layer.reset_counts()
        return numbers_J

    def _take_gradients(self) -> list[Tensor]:
        parameters = list(self.module.parameters())
        for parameter in parameters:
            if parameter.grad is None:  # unused by this micro-batch on every rank
                parameter.grad = torch.zeros_like(parameter)
        gradients = list_local_gradients(parameters)
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def _sum_step_numbers(self, numbers: list[Tensor], extras: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """Return the loss sum of the step in nats and the sums of `extras`.

        Sets the layers' counters to those of the step on rank 0, and to zero elsewhere.
        """
        own = torch.cat([*numbers, torch.tensor(extras, dtype=torch.float64, device=self.device)])
        gathered = all_gather_tensor(own)
        by_rank, extra_sums = gathered.split([own.numel() - len(extras), len(extras)], dim=1)
        # Micro-batch i of rank r is number i · W + r of the step.
        numbers_JM = by_rank.unflatten(1, (len(numbers), -1)).transpose(0, 1).flatten(0, 1).T
        totals_J = sum_rows_pairwise(numbers_JM.clone())
        if get_rank() == 0:
            counted = [sums for layer in self.module.list_auxiliary_layers() for sums in layer.get_step_counters()]
            for sums, total in zip(counted, totals_J[1:].split([sums.numel() for sums in counted]), strict=True):
                sums.copy_(total.view_as(sums))
        return float(totals_J[0]), tuple(extra_sums.sum(0).tolist())

    @torch.no_grad()
    def compute_logits(self, batch: Batch) -> Tensor:
        """Implement `Engine.compute_logits`."""
        self.module.eval()
        logits_BTV: Tensor = self.module(**batch.to(self.device).to_model_inputs())
        return logits_BTV

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The tensors are not copies: loading into them loads into the engine."""
        # After a forward without backward (evaluation, generation) the root's weights are still gathered.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            tensors[f"parameter/{name}"] = parameter.detach()
            tensors[f"first_moment/{name}"] = self._optimizer.first[name]
            tensors[f"second_moment/{name}"] = self._optimizer.second[name]
        tensors |= {f"buffer/{name}": buffer for name, buffer in iter_persistent_buffers(self.module)}
        return EngineState(tensors, self._optimizer.steps)

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`."""
        own = self.get_state().tensors
        for name, tensor in state.tensors.items():
            if own[name] is not tensor:
                own[name].copy_(tensor)
        self._optimizer.steps = state.steps


def use_deterministic_kernels(device: torch.device) -> None:
    """Select kernels without atomic additions and one cuBLAS workspace, on accelerators. CPU kernels have neither."""
    if device.type != "cpu":
        # One of the two settings with which cuBLAS is deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

"""The DeepSpeed engine: ZeRO stages 1 and 2, experts split over ranks by our own dispatcher. Nothing else imports
deepspeed but the launcher.

What DeepSpeed does differently from the protocol, and how it is undone here: it divides gradients by the world size
(the loss is multiplied by it), rounds the starting weights to the compute dtype before it makes masters (masters are
set again from fp32), casts buffers (put back), and owns its shards (`state` gathers one parameter at a time and keeps
a slice).
"""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from llmsys.config.optimizer import OptimizerConfig
from llmsys.data.batch import Batch
from llmsys.engine.deepspeed_gate import StepGate
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
from llmsys.optim.groups import parameter_groups, role_of
from llmsys.parallel.expert import AllToAllDispatcher
from llmsys.parallel.group import world_size
from llmsys.parallel.mesh import Meshes
from llmsys.parallel.slices import as_shard

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.utils import (
    groups,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

# Its use of torch's older names is not our users' concern.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)

# DeepSpeed would compile a shared-memory all-reduce for CPUs at start-up: minutes on a slow machine, an error without a
# compiler, and other sums than gloo's.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}


class ExpertAxis(MoE):  # type: ignore[misc]
    """Tells DeepSpeed that the model has an expert axis. No parameters and no forward: our own layers do the work.

    DeepSpeed looks for an instance of its MoE among the modules and lets it create the process groups.
    """

    def __init__(self, num_experts: int, size: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts
        self.ep_size = size
        self.num_local_experts = num_experts // size
        self.expert_group_name = f"ep_size_{size}"

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed while it builds its engine."""
        if self.expert_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
            )


class DeepSpeedEngine:
    """ZeRO-1 or ZeRO-2 around torch's AdamW. `model` is built on the meta device; see TorchEngine for the arguments."""

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
        micro_batches: int,
    ) -> None:
        self.device = device
        self.module = model
        self._meshes = meshes
        self._loss = loss
        self._micro_batches = micro_batches
        _materialize(model, meshes, device, seed)
        masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # for its own accounting only: micro-batches may differ in size
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": optimizer.gradient_clip,
            "zero_optimization": {"stage": zero_stage},
            "bf16": {"enabled": compute_dtype == torch.bfloat16},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model, meshes, optimizer), config=settings, dist_init_required=False
        )
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name]
        self._zero: Any = self._engine.optimizer
        self._gate = StepGate(self._zero)
        self._create_moments()
        for name, parameter in model.named_parameters():
            safe_set_full_fp32_param(parameter, masters[name])
        self._zero.update_lp_params()

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = always, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine."""
        self._engine.train()
        counts = counts_of(batches, self.device)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["rate_scale"]
        total = torch.zeros((), device=self.device)
        for batch in batches[:-1]:
            total += self._backward(batch.to(self.device), counts)
            self._engine.step()
        total += self._backward(batches[-1].to(self.device), counts)
        loss, sums = sums_of(total, counts[0], extras)
        self._gate.ask(loss, accept)
        self._engine.step()
        return StepResult(loss, self._gate.gradient_norm, int(counts[0]), self._gate.applied, sums)

    def _backward(self, batch: Batch, counts: Tensor) -> Tensor:
        share, nats = shares_of(self.module, self._engine, batch, self._loss, counts)
        # DeepSpeed divides by the world size, for experts too; the product undoes it exactly for powers of two.
        self._engine.backward(share * world_size(), scale_wrt_gas=False)
        return nats

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
            tensors[f"parameter/{name}"] = self._share(name, safe_get_full_fp32_param(parameter))
            for ours, theirs in MOMENTS.items():
                tensors[f"{ours}/{name}"] = self._share(name, safe_get_full_optimizer_state(parameter, theirs))
        tensors |= {f"buffer/{name}": buffer for name, buffer in saved_buffers(self.module)}
        return LogicalState(tensors, int(self._moments()[0]["step"]))

    def load(self, state: LogicalState) -> None:
        """See Engine."""
        for name, parameter in self.module.named_parameters():
            safe_set_full_fp32_param(parameter, self._whole(name, state.tensors[f"parameter/{name}"]))
            for ours, theirs in MOMENTS.items():
                safe_set_full_optimizer_state(parameter, self._whole(name, state.tensors[f"{ours}/{name}"]), theirs)
        for name, buffer in saved_buffers(self.module):
            buffer.copy_(state.tensors[f"buffer/{name}"])
        for moments in self._moments():
            moments["step"].fill_(state.steps)
        self._zero.update_lp_params()

    def _share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share: split experts are shared over the expert axis, everything else over all ranks."""
        if self._meshes.expert is not None and role_of(name) == "experts":
            return DTensor.from_local(whole, self._meshes.expert, [Shard(0)], run_check=False)
        return as_shard(whole, self._meshes.world)

    def _whole(self, name: str, share: Tensor) -> Tensor:
        if not isinstance(share, DTensor):
            return share
        if self._meshes.expert is not None and role_of(name) == "experts":
            return share.to_local()
        return share.full_tensor()

    def _moments(self) -> list[dict[str, Tensor]]:
        return [self._zero.optimizer.state[shard] for shard in self._zero.single_partition_of_fp32_groups]

    def _create_moments(self) -> None:
        """Adam's moments exist before the first step, so that a checkpoint can be loaded into them."""
        for shard in self._zero.single_partition_of_fp32_groups:
            self._zero.optimizer.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(shard, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
            }
        self._zero._lazy_init_hp_params_optimizer_state()


def _materialize(model: Transformer, meshes: Meshes, device: torch.device, seed: int) -> None:
    """Starting values on every rank; of split experts only this rank's, marked the way DeepSpeed wants them marked."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.to_empty(device=device)
    model.reset_buffers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.config, name, shapes[name], seed))
    if meshes.expert is None:
        return
    size, place = meshes.expert.size(), meshes.expert.get_local_rank()
    for layer in model.moe_layers():
        layer.dispatcher = AllToAllDispatcher(meshes.expert.get_group(), layer.config.num_experts)
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            local = nn.Parameter(parameter.data.chunk(size, dim=0)[place].clone())
            local.allreduce = False  # type: ignore[attr-defined]
            local.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]
            layer.experts.register_parameter(name, local)
    model.expert_axis = ExpertAxis(model.moe_layers()[0].config.num_experts, size)


def _adamw(model: Transformer, meshes: Meshes, config: OptimizerConfig) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    split = meshes.expert is not None
    made: list[dict[str, Any]] = []
    for group in parameter_groups(named.items(), config):
        entry: dict[str, Any] = {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "rate_scale": group.rate_scale,
            "name": group.name,
        }
        if split and group.role == "experts":
            entry |= {"moe": True, "name": f"ep_size_{meshes.expert.size()}"}  # type: ignore[union-attr]
        made.append(entry)
    return torch.optim.AdamW(made, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)

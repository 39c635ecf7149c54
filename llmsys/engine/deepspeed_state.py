"""Masters and moments under ZeRO-0, whole on every rank, and under ZeRO-1 and 2, in flat vectors that all ranks split.

A parameter's master or moment is given and taken whole, one at a time.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from llmsys.engine.deepspeed_gate import GuardedOptimizer
from llmsys.engine.deepspeed_partitions import Zero3State
from llmsys.engine.deepspeed_place import DeepSpeedState, build_empty_moments, is_split, compute_full_norm
from llmsys.engine.engine import Accept
from llmsys.parallel.mesh import DeviceMeshes


def build_deepspeed_state(engine: Any, zero_stage: int, clip: float, meshes: DeviceMeshes) -> DeepSpeedState:
    """Where the engine that `deepspeed.initialize` made keeps its state, with moments that exist from the start."""
    if zero_stage == 0:
        return Zero0State(engine, clip, meshes)
    if zero_stage == 3:
        return Zero3State(engine)
    return Zero1Bf16State(engine, meshes) if hasattr(engine.optimizer, "bf16_groups") else Zero12State(engine)


class Zero0State:
    """Stage 0: every rank has every master, moment and, after the reduction, gradient."""

    def __init__(self, engine: Any, clip: float, meshes: DeviceMeshes) -> None:
        self._engine, self._clip, self._meshes, self._scale = engine, clip, meshes, 1.0
        self._optimizer: torch.optim.Optimizer = engine.optimizer
        self._parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            self._optimizer.state[parameter] = build_empty_moments(parameter)

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        found: Tensor = parameter.detach() if key is None else self._optimizer.state[parameter][key]
        return found

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        self.get_tensor(parameter, key).copy_(value)

    def sync_weights(self) -> None:
        """Masters are the weights."""

    def get_step_counters(self) -> list[Tensor]:
        """See Place."""
        return [self._optimizer.state[parameter]["step"] for parameter in self._parameters]

    def set_loss_scale(self, scale: float) -> float:
        """See Place."""
        self._scale = scale
        return scale

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        named = [(parameter.grad, is_split(parameter)) for parameter in self._parameters]
        gradients = [(gradient, split) for gradient, split in named if gradient is not None]
        norm = compute_full_norm(gradients, self._meshes) / self._scale
        if not (applied := accept(loss, float(norm)) and bool(norm.isfinite())):
            self._engine.zero_grad()
            return float(norm), applied
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip > 0 else torch.ones_like(norm)
        torch._foreach_mul_([gradient for gradient, _ in gradients], factor / self._scale)
        for parameter in self._parameters:
            if parameter.grad is None:  # it decays, as it does in the flat vectors of the other stages
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self._engine.step()
        return float(norm), applied


class Zero12State:
    """Stages 1 and 2: each group of parameters is one flat vector of masters, split evenly over the ranks."""

    shards = "single_partition_of_fp32_groups"

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._shards: list[Tensor] = getattr(self._zero, self.shards)
        for shard in self._shards:
            self._zero.optimizer.state[shard] = build_empty_moments(shard)
        self._zero._lazy_init_hp_params_optimizer_state()
        self._gate = GuardedOptimizer(self._zero) if type(self) is Zero12State else None

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        whole: Tensor = cast(Any, parameter).get_full_hp_param(key)  # DeepSpeed gives parameters methods
        return whole

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        cast(Any, parameter).set_full_hp_param(value, key)

    def sync_weights(self) -> None:
        """See Place."""
        self._zero.update_lp_params()

    def get_step_counters(self) -> list[Tensor]:
        """See Place."""
        return [self._zero.optimizer.state[shard]["step"] for shard in self._shards]

    def set_loss_scale(self, scale: float) -> float:
        """See Place."""
        self._zero.custom_loss_scaler, self._zero.external_loss_scale = True, scale
        return 1.0

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        assert self._gate is not None
        return self._gate.step(self._engine, loss, accept)


class Zero1Bf16State(Zero12State):
    """Stage 1 in bf16: DeepSpeed has an optimizer of its own there, in which gradients are whole on every rank."""

    shards = "fp32_groups_flat_partition"

    def __init__(self, engine: Any, meshes: DeviceMeshes) -> None:
        super().__init__(engine)
        self._meshes = meshes

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        flat = zip(self._zero.fp32_groups_gradients_flat, self._zero.bf16_groups, strict=True)
        norm = compute_full_norm([(gradient, is_split(group[0])) for gradient, group in flat], self._meshes)
        if applied := accept(loss, float(norm)) and bool(norm.isfinite()):
            self._engine.step()
        else:
            self._zero.zero_grad()
        return float(norm), applied

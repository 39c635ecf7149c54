"""Where DeepSpeed keeps masters and moments: what all places can be asked, and what they are made with.

The places themselves are in deepspeed_state.py (ZeRO-0, 1 and 2) and deepspeed_partitions.py (ZeRO-3).

Between DeepSpeed's gradient norm and its optimizer step: the place where a step can still be refused.

DeepSpeed asks its loss scaler there, and drops the step when gradients have overflowed. The gate stands in the place of
that question: it remembers the norm that was just taken, and answers "overflowed" for a step that is not accepted, so
that DeepSpeed clears gradients and buffers in its own way. The scale itself is the engine's, as under torch.

Masters and moments under ZeRO-3, where the weights of a block come before it is used and go after it.

Masters and moments under ZeRO-0, whole on every rank, and under ZeRO-1 and 2, in flat vectors that all ranks split.

A parameter's master or moment is given and taken whole, one at a time.
"""

from collections.abc import Iterable
from typing import Any, Literal, Protocol, assert_never, cast

import torch
from torch import Tensor, nn

from llmsys.engine.engine import Accept, accept_all
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.process_group import all_reduce_sum, get_rank

ZeroStage = Literal[0, 1, 2, 3]


class DeepSpeedState(Protocol):
    """Masters and moments of one engine. The key None is the fp32 parameter itself, others are those of `MOMENTS`."""

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The whole tensor, on every rank. Collective."""
        ...

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Keep this rank's part of a whole tensor."""
        ...

    def sync_weights(self) -> None:
        """Weights from masters, after those were set. Collective."""
        ...

    def get_step_counters(self) -> list[Tensor]:
        """Adam's counts of steps."""
        ...

    def set_loss_scale(self, scale: float) -> float:
        """The loss of the next step is to be multiplied by `scale`, its gradients divided. Gives what DeepSpeed leaves
        to the caller to multiply by.
        """
        ...

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Clip and step unless `accept` refuses; (gradient norm before clipping, whether it was applied).

        A step whose gradient is not finite is never applied.
        """
        ...


def build_empty_moments(shard: Tensor) -> dict[str, Tensor]:
    """Adam's state before the first step; there from the start, so that a checkpoint can be loaded into it."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=shard.device),
        "exp_avg": torch.zeros_like(shard, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
    }


def is_split(parameter: Tensor) -> bool:
    """Whether each rank of the expert axis has other rows of it."""
    return not getattr(parameter, "allreduce", True)


def compute_full_norm(gradients: Iterable[tuple[Tensor, bool]], meshes: DeviceMeshes) -> Tensor:
    """The norm over gradients that every rank has whole, but for those of split experts (True). Collective."""
    squares: dict[bool, list[Tensor]] = {False: [], True: []}
    for gradient, split in gradients:
        squares[split].append(gradient.norm().square())
    total = torch.stack(squares[False]).sum()
    if squares[True] and meshes.expert is not None:
        experts = torch.stack(squares[True]).sum()
        total += all_reduce_sum(experts) * meshes.expert.size() / meshes.world.size()
    return total.sqrt()


NORMS = {"scaled_global_norm": "ZeRO-1 and ZeRO-2", "_get_norm_groups": "ZeRO-3"}


class GuardedOptimizer:
    """Wraps the optimizer that `deepspeed.initialize` made for ZeRO."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._loss = 0.0
        self._accept: Accept = accept_all
        self._applied = True
        self._norm = float("nan")
        name = next(name for name in NORMS if hasattr(zero, name))
        self._measure = getattr(zero, name)
        setattr(zero, name, self._record_norm)
        zero._update_scale = self._update_overflow

    def step(self, engine: Any, loss: float, accept: Accept) -> tuple[float, bool]:
        """Let DeepSpeed step unless `accept` refuses; (gradient norm before clipping, whether it was applied)."""
        self._loss, self._accept = loss, accept
        self._norm = float("inf")  # stays so where DeepSpeed finds an overflow and takes no norm
        engine.step()
        return self._norm, self._applied

    def _record_norm(self, *arguments: Any, **named: Any) -> Any:
        found = self._measure(*arguments, **named)
        parts = found if isinstance(found, list | tuple) else [found]
        squares = torch.stack([torch.as_tensor(part, dtype=torch.float64).cpu() for part in parts]).square()
        # An overflow inside a group is written as a norm of -1.
        overflowed = any(float(part) < 0 for part in parts)
        self._norm = float("inf") if overflowed else float(squares.sum().sqrt()) / float(self._zero.loss_scale)
        return found

    def _update_overflow(self, has_overflow: bool = False) -> None:
        self._applied = self._accept(self._loss, self._norm) and not has_overflow
        self._zero.overflow = not self._applied


class Zero3State:
    """Stage 3: every rank has an equal slice of each parameter, and of its master and moments; the last is padded."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        for shard in self._zero.fp32_partitioned_groups_flat:
            self._zero.optimizer.state[shard] = build_empty_moments(shard)
        self._gate = GuardedOptimizer(self._zero)

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        whole: Tensor = self._zero.get_full_hp_param(parameter, key)
        return whole

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        # DeepSpeed's own way of setting it takes no value whose size the ranks do not divide.
        mine, _ = self._zero._get_fp32_opt_state_partition(parameter, True, key)
        part = value.flatten()[get_rank() * len(mine) : (get_rank() + 1) * len(mine)]
        mine.data.zero_()[: len(part)].copy_(part)

    def sync_weights(self) -> None:
        """See Place."""
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small ones are whole on every rank, also between steps
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def get_step_counters(self) -> list[Tensor]:
        """See Place."""
        return [self._zero.optimizer.state[shard]["step"] for shard in self._zero.fp32_partitioned_groups_flat]

    def set_loss_scale(self, scale: float) -> float:
        """See Place."""
        self._zero.custom_loss_scaler, self._zero.external_loss_scale = True, scale
        return 1.0

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        done = self._gate.step(self._engine, loss, accept)
        # ZeRO-3 would take this step's gradients again for a parameter that the next step gives none.
        self._zero.grad_partitions_flat_buffer.zero_()
        for shard in self._zero.fp32_partitioned_groups_flat:
            if shard.grad is not None:  # with offload
                shard.grad.zero_()
        return done


def build_deepspeed_state(engine: Any, zero_stage: ZeroStage, clip: float, meshes: DeviceMeshes) -> DeepSpeedState:
    """Where the engine that `deepspeed.initialize` made keeps its state, with moments that exist from the start."""
    match zero_stage:
        case 0:
            return Zero0State(engine, clip, meshes)
        case 1 | 2:
            return Zero1Bf16State(engine, meshes) if hasattr(engine.optimizer, "bf16_groups") else Zero12State(engine)
        case 3:
            return Zero3State(engine)
        case unreachable:
            assert_never(unreachable)


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

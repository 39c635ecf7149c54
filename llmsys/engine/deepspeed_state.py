"""Masters and moments inside DeepSpeed, and the point where a step can be skipped.

ZeRO-0 holds them unsharded on every rank, ZeRO-1 and 2 in flat vectors that all ranks split, ZeRO-3
in a slice of each parameter. A master or moment is read and written as a full tensor, one at a
time.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, assert_never, cast

import torch
from torch import Tensor, nn

from llmsys.engine.engine import Accept, accept_all
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.process_group import all_reduce_sum, get_rank

ZeroStage = Literal[0, 1, 2, 3]
# Keys of each parameter's moments; empty where the optimizer has its state already.
MomentKeys = Mapping[Tensor, Sequence[str]]
# DeepSpeed's methods that compute the gradient norm.
NORMS = {"scaled_global_norm": "ZeRO-1 and ZeRO-2", "_get_norm_groups": "ZeRO-3"}


class DeepSpeedState(Protocol):
    """Masters and moments of one engine. Key None is the float32 parameter; other keys are
    values of `STATE_KEYS`.
    """

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """Read a master or a moment. Collective.

        Args:
            parameter: The parameter.
            key: A key of its moments; None: the float32 master.

        Returns:
            The full tensor, on every rank.
        """
        ...

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Store this rank's shard of a full tensor.

        Args:
            parameter: The parameter.
            value: The full tensor.
            key: A key of its moments; None: the float32 master.
        """
        ...

    def list_moments(self, parameter: nn.Parameter) -> Sequence[str]:
        """Return the keys of a parameter's moments."""
        ...

    def sync_weights(self) -> None:
        """Copy masters to weights, after masters were set. Collective."""
        ...

    def get_step_counters(self) -> list[Tensor]:
        """Return the optimizer's step counters."""
        ...

    def set_loss_scale(self, scale: float) -> float:
        """Set the loss scale of the next step; its gradients are divided by it.

        Returns:
            The factor that the caller must multiply the loss by; DeepSpeed applies the rest.
        """
        ...

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Clip and step unless `accept` refuses; a step whose gradient is not finite is never
        applied.

        Args:
            loss: Loss of the step, for `accept`.
            accept: Decides whether the step may be applied.

        Returns:
            The gradient norm before clipping, and whether the step was applied.
        """
        ...


def build_empty_moments(shard: Tensor, moments: Sequence[str]) -> dict[str, Tensor]:
    """Build the state of a shard before the first step. It exists from the start so that a
    checkpoint can be loaded.

    Args:
        shard: The shard of the master weights.
        moments: Keys of the moments.

    Returns:
        `step` at 0 and moments of zeros, by key.
    """
    step = torch.zeros((), dtype=torch.float32, device=shard.device)
    return {"step": step} | {key: torch.zeros_like(shard, requires_grad=False) for key in moments}


def is_split(parameter: Tensor) -> bool:
    """Return whether each rank of the expert axis holds other rows of a parameter.

    Args:
        parameter: A parameter of DeepSpeed's engine.

    Returns:
        True for split experts, whose gradients DeepSpeed does not reduce over all ranks.
    """
    return not getattr(parameter, "allreduce", True)


def compute_full_norm(gradients: Iterable[tuple[Tensor, bool]], meshes: DeviceMeshes) -> Tensor:
    """Compute the norm over full gradients. Collective.

    Args:
        gradients: (gradient, whether it is of split experts). All others are equal on every
            rank.
        meshes: The sub-meshes.

    Returns:
        The norm, the same on every rank; a scalar.
    """
    squares: dict[bool, list[Tensor]] = {False: [], True: []}
    for gradient, split in gradients:
        squares[split].append(gradient.norm().square())
    total = torch.stack(squares[False]).sum()
    if squares[True] and meshes.expert is not None:
        experts = torch.stack(squares[True]).sum()
        # The ranks that hold the same experts are all in the sum.
        total += all_reduce_sum(experts) * meshes.expert.size() / meshes.world.size()
    return total.sqrt()


class Zero3State:
    """Stage 3: every rank has an equal slice of each parameter, its master and moments; the last
    one is padded.
    """

    def __init__(self, engine: Any, moments: MomentKeys) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._moments = moments
        for shard, group in zip(
            self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True
        ):
            self._zero.optimizer.state[shard] = build_empty_moments(shard, moments[group[0]])
        self._guard = GuardedOptimizer(self._zero)

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """Implement `DeepSpeedState.get_tensor`."""
        whole: Tensor = self._zero.get_full_hp_param(parameter, key)
        return whole

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Implement `DeepSpeedState.set_tensor`."""
        # DeepSpeed's own setter takes only values whose size the ranks divide.
        mine, _ = self._zero._get_fp32_opt_state_partition(parameter, True, key)
        local = value.flatten()[get_rank() * len(mine) : (get_rank() + 1) * len(mine)]
        mine.data.zero_()[: len(local)].copy_(local)

    def list_moments(self, parameter: nn.Parameter) -> Sequence[str]:
        """Implement `DeepSpeedState.list_moments`."""
        return self._moments[parameter]

    def sync_weights(self) -> None:
        """Implement `DeepSpeedState.sync_weights`."""
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small ones are unsharded, also between steps
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def get_step_counters(self) -> list[Tensor]:
        """Implement `DeepSpeedState.get_step_counters`."""
        return [
            self._zero.optimizer.state[shard]["step"]
            for shard in self._zero.fp32_partitioned_groups_flat
        ]

    def set_loss_scale(self, scale: float) -> float:
        """Implement `DeepSpeedState.set_loss_scale`."""
        self._zero.custom_loss_scaler = True
        self._zero.external_loss_scale = scale
        return 1.0

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Implement `DeepSpeedState.step_optimizer`."""
        result = self._guard.step(self._engine, loss, accept)
        # ZeRO-3 would reuse this step's gradients for a parameter that gets none in the next step.
        self._zero.grad_partitions_flat_buffer.zero_()
        for shard in self._zero.fp32_partitioned_groups_flat:
            if shard.grad is not None:  # with offload
                shard.grad.zero_()
        return result


def build_deepspeed_state(
    engine: Any, zero_stage: ZeroStage, clip: float, meshes: DeviceMeshes, *, moments: MomentKeys
) -> DeepSpeedState:
    """Build the accessor of masters and moments in DeepSpeed's engine.

    Args:
        engine: DeepSpeed's engine.
        zero_stage: Its ZeRO stage.
        clip: Maximum gradient norm, for stage 0, where DeepSpeed does not clip.
        meshes: The sub-meshes.
        moments: Keys of the moments of each parameter. They exist from the start.

    Returns:
        The accessor of that stage.
    """
    match zero_stage:
        case 0:
            return Zero0State(engine, clip, meshes, moments)
        case 1 | 2:
            if hasattr(engine.optimizer, "bf16_groups"):
                return Zero1Bf16State(engine, meshes, moments)
            return Zero12State(engine, moments)
        case 3:
            return Zero3State(engine, moments)
        case unreachable:
            assert_never(unreachable)


class Zero0State:
    """Stage 0: every rank has every master, moment and, after the reduction, gradient."""

    def __init__(self, engine: Any, clip: float, meshes: DeviceMeshes, moments: MomentKeys) -> None:
        self._engine = engine
        self._clip = clip
        self._meshes = meshes
        self._scale = 1.0
        self._optimizer: torch.optim.Optimizer = engine.optimizer
        self._parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        # Optimizers of full matrices have their state already.
        for parameter in self._parameters if moments else ():
            self._optimizer.state[parameter] = build_empty_moments(parameter, moments[parameter])

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """Implement `DeepSpeedState.get_tensor`."""
        tensor: Tensor = (
            parameter.detach() if key is None else self._optimizer.state[parameter][key]
        )
        return tensor

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Implement `DeepSpeedState.set_tensor`."""
        self.get_tensor(parameter, key).copy_(value)

    def list_moments(self, parameter: nn.Parameter) -> Sequence[str]:
        """Implement `DeepSpeedState.list_moments`."""
        return [key for key in self._optimizer.state[parameter] if key != "step"]

    def sync_weights(self) -> None:
        """Do nothing: masters are the weights."""

    def get_step_counters(self) -> list[Tensor]:
        """Implement `DeepSpeedState.get_step_counters`."""
        return [self._optimizer.state[parameter]["step"] for parameter in self._parameters]

    def set_loss_scale(self, scale: float) -> float:
        """Implement `DeepSpeedState.set_loss_scale`."""
        self._scale = scale
        return scale

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Implement `DeepSpeedState.step_optimizer`."""
        named = [(parameter.grad, is_split(parameter)) for parameter in self._parameters]
        gradients = [(gradient, split) for gradient, split in named if gradient is not None]
        norm = compute_full_norm(gradients, self._meshes) / self._scale
        if not (applied := accept(loss, float(norm)) and bool(norm.isfinite())):
            self._engine.zero_grad()
            return float(norm), applied
        factor = (
            (self._clip / (norm + 1e-6)).clamp(max=1.0) if self._clip > 0 else torch.ones_like(norm)
        )
        torch._foreach_mul_([gradient for gradient, _ in gradients], factor / self._scale)
        for parameter in self._parameters:
            # it decays, as it does in the flat vectors of the other stages
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self._engine.step()
        return float(norm), applied


class Zero12State:
    """Stages 1 and 2: each group of parameters is one flat vector of masters, split evenly over
    the ranks.
    """

    shards = "single_partition_of_fp32_groups"
    groups = "bit16_groups"

    def __init__(self, engine: Any, moments: MomentKeys) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._moments = moments
        self._shards: list[Tensor] = getattr(self._zero, self.shards)
        for shard, group in zip(self._shards, getattr(self._zero, self.groups), strict=True):
            self._zero.optimizer.state[shard] = build_empty_moments(shard, moments[group[0]])
        # DeepSpeed links parameters to moments in the first step, and a checkpoint is loaded before
        # it.
        self._zero._lazy_init_hp_params_optimizer_state()
        self._guard = GuardedOptimizer(self._zero) if type(self) is Zero12State else None

    def get_tensor(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """Implement `DeepSpeedState.get_tensor`."""
        # DeepSpeed gives parameters methods
        whole: Tensor = cast(Any, parameter).get_full_hp_param(key)
        return whole

    def set_tensor(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Implement `DeepSpeedState.set_tensor`."""
        cast(Any, parameter).set_full_hp_param(value, key)

    def list_moments(self, parameter: nn.Parameter) -> Sequence[str]:
        """Implement `DeepSpeedState.list_moments`."""
        return self._moments[parameter]

    def sync_weights(self) -> None:
        """Implement `DeepSpeedState.sync_weights`."""
        self._zero.update_lp_params()

    def get_step_counters(self) -> list[Tensor]:
        """Implement `DeepSpeedState.get_step_counters`."""
        return [self._zero.optimizer.state[shard]["step"] for shard in self._shards]

    def set_loss_scale(self, scale: float) -> float:
        """Implement `DeepSpeedState.set_loss_scale`."""
        self._zero.custom_loss_scaler = True
        self._zero.external_loss_scale = scale
        return 1.0

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Implement `DeepSpeedState.step_optimizer`."""
        assert self._guard is not None
        norm, applied = self._guard.step(self._engine, loss, accept)
        if self._zero.cpu_offload:
            self._clear_offloaded_gradients(applied)
        return norm, applied

    def _clear_offloaded_gradients(self, applied: bool) -> None:
        """Forget the gradients of a step, as DeepSpeed does without offload."""
        if not applied:
            # DeepSpeed 0.19.8 keeps the sums in bfloat16 runs: the next step would add to them.
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = None
        for shard in self._shards:
            # A parameter that gets no gradient in the next step would take this one again.
            if shard.grad is not None:
                shard.grad.zero_()


class Zero1Bf16State(Zero12State):
    """Stage 1 in bfloat16: DeepSpeed uses another optimizer there, whose gradients are unsharded
    on every rank.
    """

    shards = "fp32_groups_flat_partition"
    groups = "bf16_groups"

    def __init__(self, engine: Any, meshes: DeviceMeshes, moments: MomentKeys) -> None:
        super().__init__(engine, moments)
        self._meshes = meshes

    def step_optimizer(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Implement `DeepSpeedState.step_optimizer`."""
        flat = zip(self._zero.fp32_groups_gradients_flat, self._zero.bf16_groups, strict=True)
        norm = compute_full_norm(
            [(gradient, is_split(group[0])) for gradient, group in flat], self._meshes
        )
        if applied := accept(loss, float(norm)) and bool(norm.isfinite()):
            self._engine.step()
        else:
            self._zero.zero_grad()
        return float(norm), applied


# --- The point where a step can be skipped ---


class GuardedOptimizer:
    """The optimizer that `deepspeed.initialize` made for ZeRO, with a check between gradient norm
    and step.

    DeepSpeed asks its loss scaler there, and skips the step when gradients overflowed. Here the
    answer is "overflowed" for a step that `accept` refuses, so that DeepSpeed clears gradients and
    buffers in its own way.
    """

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
        """Let DeepSpeed step unless `accept` refuses.

        Returns:
            The gradient norm before clipping, and whether the step was applied.
        """
        self._loss = loss
        self._accept = accept
        # unchanged where DeepSpeed finds an overflow and computes no norm
        self._norm = float("inf")
        engine.step()
        return self._norm, self._applied

    def _record_norm(self, *arguments: Any, **named: Any) -> Any:
        result = self._measure(*arguments, **named)
        norms = result if isinstance(result, list | tuple) else [result]
        squares = torch.stack(
            [torch.as_tensor(norm, dtype=torch.float64).cpu() for norm in norms]
        ).square()
        # DeepSpeed writes an overflow inside a group as a norm of -1.
        overflowed = any(float(norm) < 0 for norm in norms)
        self._norm = (
            float("inf")
            if overflowed
            else float(squares.sum().sqrt()) / float(self._zero.loss_scale)
        )
        return result

    def _update_overflow(self, has_overflow: bool = False) -> None:
        self._applied = self._accept(self._loss, self._norm) and not has_overflow
        self._zero.overflow = not self._applied

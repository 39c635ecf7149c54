"""Where DeepSpeed keeps masters and moments at each ZeRO stage, and how a step is taken there.

One class per place: whole tensors (stage 0), flat groups that all ranks split (stages 1 and 2), a slice of every
parameter (stage 3). A parameter's master or moment is given and taken whole, one at a time.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from llmsys.engine.deepspeed_gate import StepGate
from llmsys.engine.engine import Accept
from llmsys.parallel.group import rank, sum_over_ranks
from llmsys.parallel.mesh import Meshes

MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}


class Place(Protocol):
    """Masters and moments of one engine. The key None is the fp32 parameter itself, others are those of `MOMENTS`."""

    def get(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The whole tensor, on every rank. Collective."""
        ...

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Keep this rank's part of a whole tensor."""
        ...

    def publish(self) -> None:
        """Weights from masters, after those were set. Collective."""
        ...

    def counters(self) -> list[Tensor]:
        """Adam's counts of steps."""
        ...

    def step(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """Clip and step unless `accept` refuses; (gradient norm before clipping, whether it was applied)."""
        ...


def place_of(engine: Any, zero_stage: int, clip: float, meshes: Meshes) -> Place:
    """Where the engine that `deepspeed.initialize` made keeps its state, with moments that exist from the start."""
    if zero_stage == 0:
        return WholeState(engine, clip, meshes)
    if zero_stage == 3:
        return PartitionedState(engine)
    return Bf16FlatState(engine, meshes) if hasattr(engine.optimizer, "bf16_groups") else FlatState(engine)


class WholeState:
    """Stage 0: every rank has every master, moment and, after the reduction, gradient."""

    def __init__(self, engine: Any, clip: float, meshes: Meshes) -> None:
        self._engine, self._clip, self._meshes = engine, clip, meshes
        self._optimizer: torch.optim.Optimizer = engine.optimizer
        self._parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            self._optimizer.state[parameter] = empty_moments(parameter)

    def get(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        found: Tensor = parameter.detach() if key is None else self._optimizer.state[parameter][key]
        return found

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        self.get(parameter, key).copy_(value)

    def publish(self) -> None:
        """Masters are the weights."""

    def counters(self) -> list[Tensor]:
        """See Place."""
        return [self._optimizer.state[parameter]["step"] for parameter in self._parameters]

    def step(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        named = [(parameter.grad, is_split(parameter)) for parameter in self._parameters]
        gradients = [(gradient, split) for gradient, split in named if gradient is not None]
        norm = norm_of_whole(gradients, self._meshes)
        if not (applied := bool(norm.isfinite()) and accept(loss, float(norm))):
            self._engine.zero_grad()
            return float(norm), applied
        if self._clip > 0:
            torch._foreach_mul_([gradient for gradient, _ in gradients], (self._clip / (norm + 1e-6)).clamp(max=1.0))
        self._engine.step()
        return float(norm), applied


class FlatState:
    """Stages 1 and 2: each group of parameters is one flat vector of masters, split evenly over the ranks."""

    shards = "single_partition_of_fp32_groups"

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._shards: list[Tensor] = getattr(self._zero, self.shards)
        for shard in self._shards:
            self._zero.optimizer.state[shard] = empty_moments(shard)
        self._zero._lazy_init_hp_params_optimizer_state()
        self._gate = StepGate(self._zero) if type(self) is FlatState else None

    def get(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        whole: Tensor = parameter.get_full_hp_param(key)  # type: ignore[operator]
        return whole

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        parameter.set_full_hp_param(value, key)  # type: ignore[operator]

    def publish(self) -> None:
        """See Place."""
        self._zero.update_lp_params()

    def counters(self) -> list[Tensor]:
        """See Place."""
        return [self._zero.optimizer.state[shard]["step"] for shard in self._shards]

    def step(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        assert self._gate is not None
        return self._gate.step(self._engine, loss, accept)


class Bf16FlatState(FlatState):
    """Stage 1 in bf16: DeepSpeed has an optimizer of its own there, in which gradients are whole on every rank."""

    shards = "fp32_groups_flat_partition"

    def __init__(self, engine: Any, meshes: Meshes) -> None:
        super().__init__(engine)
        self._meshes = meshes

    def step(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        flat = zip(self._zero.fp32_groups_gradients_flat, self._zero.bf16_groups, strict=True)
        norm = norm_of_whole([(gradient, is_split(group[0])) for gradient, group in flat], self._meshes)
        if applied := bool(norm.isfinite()) and accept(loss, float(norm)):
            self._engine.step()
        else:
            self._zero.zero_grad()
        return float(norm), applied


class PartitionedState:
    """Stage 3: every rank has an equal slice of each parameter, and of its master and moments; the last is padded."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        for shard in self._zero.fp32_partitioned_groups_flat:
            self._zero.optimizer.state[shard] = empty_moments(shard)
        self._gate = StepGate(self._zero)
        _gather_unseen(self._zero.parameter_offload)

    def get(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """See Place."""
        whole: Tensor = self._zero.get_full_hp_param(parameter, key)
        return whole

    def set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """See Place."""
        # DeepSpeed's own way of setting it takes no value whose size the ranks do not divide.
        mine, _ = self._zero._get_fp32_opt_state_partition(parameter, True, key)
        part = value.flatten()[rank() * len(mine) : (rank() + 1) * len(mine)]
        mine.data.zero_()[: len(part)].copy_(part)

    def publish(self) -> None:
        """See Place."""
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:  # small ones are whole on every rank, also between steps
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def counters(self) -> list[Tensor]:
        """See Place."""
        return [self._zero.optimizer.state[shard]["step"] for shard in self._zero.fp32_partitioned_groups_flat]

    def step(self, loss: float, accept: Accept) -> tuple[float, bool]:
        """See Place."""
        return self._gate.step(self._engine, loss, accept)


def _gather_unseen(hooks: Any) -> None:
    """Weights come and go behind the back of selective recomputation, which must find the same operations twice.

    The second time a layer's weights may be there already.
    """
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        setattr(hooks, name, _unseen(getattr(hooks, name)))


def _unseen(hook: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def run(module: nn.Module) -> None:
        with _disable_current_modes():
            hook(module)

    return run


def empty_moments(shard: Tensor) -> dict[str, Tensor]:
    """Adam's state before the first step; there from the start, so that a checkpoint can be loaded into it."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=shard.device),
        "exp_avg": torch.zeros_like(shard, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
    }


def is_split(parameter: Tensor) -> bool:
    """Whether each rank of the expert axis has other rows of it."""
    return not getattr(parameter, "allreduce", True)


def norm_of_whole(gradients: Iterable[tuple[Tensor, bool]], meshes: Meshes) -> Tensor:
    """The norm over gradients that every rank has whole, but for those of split experts (True). Collective."""
    squares: dict[bool, list[Tensor]] = {False: [], True: []}
    for gradient, split in gradients:
        squares[split].append(gradient.norm().square())
    total = torch.stack(squares[False]).sum()
    if squares[True] and meshes.expert is not None:
        experts = torch.stack(squares[True]).sum()
        total += sum_over_ranks(experts) * meshes.expert.size() / meshes.world.size()
    return total.sqrt()

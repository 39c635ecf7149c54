"""Masters and moments under ZeRO-3, where the weights of a block come before it is used and go after it."""

from typing import Any

from torch import Tensor, nn

from llmsys.engine.deepspeed_gate import GuardedOptimizer
from llmsys.engine.deepspeed_place import build_empty_moments
from llmsys.engine.engine import Accept
from llmsys.parallel.group import get_rank


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

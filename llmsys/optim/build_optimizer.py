"""The optimizer of a config over named parameters, its state there from the start so that it can be loaded into."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from llmsys.config.optimizer import OptimizerConfig, UpdateRule
from llmsys.optim.muon import Apply, Muon, apply_to_each
from llmsys.optim.parameter_groups import ParameterGroup, build_parameter_groups

MOMENTS = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
"""Names of the logical state, and those of an optimizer's; a matrix under Muon has no second moment."""


Alike = Callable[[Iterable[Tensor]], Iterable[list[Tensor]]]


class OptimizersContainer:
    """AdamW and, where it is chosen, Muon, as one: the part of torch's optimizer that an engine uses."""

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        self._members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all members."""
        return [group for member in self._members for group in member.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Of all members, by parameter."""
        return {parameter: state for member in self._members for parameter, state in member.state.items()}

    def step(self) -> None:
        """One step of each. A parameter without a gradient decays as with a gradient of zeros, as in flat vectors."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        for member in self._members:
            member.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for member in self._members:
            member.zero_grad(set_to_none=set_to_none)


def build_optimizer(
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    *,
    compute_dtype: torch.dtype,
    apply: Apply = apply_to_each,
    alike: Alike = lambda parameters: [list(parameters)],
) -> OptimizersContainer:
    """Optimizers over all parameters, their state at zero.

    Muon's products are in `compute_dtype`, but never in fp16, which overflows. `apply` brings the parts of matrices
    together, `alike` sorts parameters into lists that one fused kernel can take.
    """
    groups = build_parameter_groups(named.items(), config)
    members: list[torch.optim.Optimizer] = []
    for rule in sorted({group.algorithm for group in groups}):
        entries = list(_iter_param_groups(groups, named, rule, alike))
        match rule:
            case "adamw":
                members.append(_build_adamw(entries, config))
            case "muon":
                assert config.kind == "muon"
                settings = {"momentum": config.momentum, "steps": config.newton_schulz_steps}
                dtype = torch.float32 if compute_dtype == torch.float32 else torch.bfloat16
                members.append(Muon([entry | settings for entry in entries], dtype=dtype, apply=apply))
            case unreachable:
                assert_never(unreachable)
    return OptimizersContainer(members)


def _iter_param_groups(
    groups: list[ParameterGroup], named: Mapping[str, nn.Parameter], rule: UpdateRule, alike: Alike
) -> Iterator[dict[str, Any]]:
    for group in groups:
        if group.algorithm == rule:
            for parameters in alike(named[name] for name in group.names):
                yield {"params": parameters, "weight_decay": group.weight_decay, "rate_scale": group.lr_multiplier}


def _build_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer

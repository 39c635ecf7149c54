"""The optimizers of a config, with state that exists from the start so that a checkpoint can be
loaded into it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    PythonOptimizerConfig,
    ScheduleFreeConfig,
    SoapConfig,
    UpdateRule,
)
from llmsys.log import get_logger
from llmsys.optim.adamw_kernel import choose_adamw_kernel
from llmsys.optim.compressed_adamw import CompressedAdamW
from llmsys.optim.elementwise import AVERAGE_WEIGHTS, STATE_KEYS, ElementwiseOptimizer
from llmsys.optim.matrix_optimizer import STATE_KEYS as MATRIX_STATE_KEYS
from llmsys.optim.matrix_optimizer import (
    BuildZeros,
    MatrixOptimizer,
    Update,
    build_plain_zeros,
    update_plain_tensors,
)
from llmsys.optim.muon import (
    NEURON_STATE_KEYS,
    Apply,
    BuildSums,
    Muon,
    SumShards,
    apply_to_each,
    build_plain_sums,
    sum_nothing,
)
from llmsys.optim.parameter_groups import ParameterGroup, build_parameter_groups

log = get_logger(__name__)

# Name of each moment in a checkpoint → in the optimizer's state. A matrix under Muon has no second
# moment; scales belong to moments of 8 bits.
MOMENTS = (
    STATE_KEYS
    | MATRIX_STATE_KEYS
    | NEURON_STATE_KEYS
    | {"scale_of_first_moment": "exp_avg_scale", "scale_of_second_moment": "exp_avg_sq_scale"}
)


Alike = Callable[[Iterable[Tensor]], Iterable[list[Tensor]]]


class OptimizersContainer(torch.optim.Optimizer):
    """The optimizers of a config, one per update rule, with the interface of one torch
    optimizer.
    """

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        """Join optimizers of disjoint parameters.

        Args:
            members: The optimizers, whose state exists already. Groups and states are shared with
                them, not copied.
        """
        # Not the base's, which would make its own groups and state; DeepSpeed asks for the class
        # only.
        self._members = members
        self.param_groups = [group for member in members for group in member.param_groups]
        # Every state exists from the start and is changed in place.
        self.state: Any = {
            parameter: state for member in members for parameter, state in member.state.items()
        }

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of each optimizer.

        A parameter without a gradient gets one of zeros, so weight decay and moments move it as
        they do in DeepSpeed's flat vectors.

        Args:
            closure: Not used; torch's interface has it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                # It decays, as it does in the flat vectors of DeepSpeed.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        for member in self._members:
            member.step()

    def get_shared_state(self) -> dict[str, Tensor]:
        """Return the state that belongs to no parameter, by its name in a checkpoint; not
        copied.
        """
        state: dict[str, Tensor] = {}
        for member in self._members:
            if isinstance(member, ElementwiseOptimizer) and member.average is not None:
                state[AVERAGE_WEIGHTS] = member.average.tensor
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients.

        Args:
            set_to_none: Free their memory. False: fill them with zeros. Default: True.
        """
        for member in self._members:
            member.zero_grad(set_to_none=set_to_none)


def build_optimizer(
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    *,
    compute_dtype: torch.dtype,
    model: ModelConfig | None = None,
    apply: Apply = apply_to_each,
    alike: Alike = lambda parameters: [list(parameters)],
    update: Update = update_plain_tensors,
    build_zeros: BuildZeros = build_plain_zeros,
    sum_shards: SumShards = sum_nothing,
    build_sums: BuildSums = build_plain_sums,
) -> OptimizersContainer:
    """Build the optimizers over all parameters, with their state at zero.

    Args:
        named: Parameters by name; plain tensors or DTensors.
        config: The `optimizer:` section.
        compute_dtype: Dtype of Muon's matmuls; bfloat16 where it is float16.
        model: The `model:` section, whose parametrization scales rates. None: the standard one.
        apply: Calls a function on full matrices for Muon, gathering shards where parameters are
            sharded.
        alike: Sorts parameters into lists that one fused kernel can take.
        update: Changes full tensors in place for Adafactor and SOAP, gathering shards where
            parameters are sharded.
        build_zeros: Builds their state, sharded like a parameter.
        sum_shards: Adds sums over a dim, for the second moments of neurons, where parameters are
            sharded.
        build_sums: Builds those moments.

    Returns:
        One container of all optimizers.
    """
    groups = build_parameter_groups(named.items(), config, model)
    members: list[torch.optim.Optimizer] = []
    if adamw := list(_iter_param_groups(groups, named, "adamw", alike)):
        members.append(
            _build_adamw(adamw, config, {parameter: name for name, parameter in named.items()})
        )
    match config:
        case AdamConfig() | AdamWConfig():
            pass
        case MuonConfig():
            # fp16 would overflow in the Newton-Schulz products.
            dtype = torch.float32 if compute_dtype == torch.float32 else torch.bfloat16
            hooks: dict[str, Any] = {
                "apply": apply,
                "sum_shards": sum_shards,
                "build_sums": build_sums,
            }
            if muon := [*_iter_param_groups(groups, named, "muon", alike)]:
                members.append(Muon(muon, config, dtype=dtype, **hooks))
        case AdafactorConfig() | SoapConfig():
            if matrices := [*_iter_param_groups(groups, named, "matrix", alike)]:
                members.append(
                    MatrixOptimizer(matrices, config, update=update, build_zeros=build_zeros)
                )
        case LionConfig() | AdEMAMixConfig() | PythonOptimizerConfig() | ScheduleFreeConfig():
            members.append(
                ElementwiseOptimizer(
                    [*_iter_param_groups(groups, named, "elementwise", alike)], config
                )
            )
        case unreachable:
            assert_never(unreachable)
    return OptimizersContainer(members)


def _iter_param_groups(
    groups: list[ParameterGroup], named: Mapping[str, nn.Parameter], rule: UpdateRule, alike: Alike
) -> Iterator[dict[str, Any]]:
    for group in groups:
        if group.algorithm == rule:
            for parameters in alike(named[name] for name in group.names):
                yield {
                    "params": parameters,
                    "weight_decay": group.weight_decay,
                    "rate_scale": group.lr_multiplier,
                }


def _build_adamw(
    groups: list[dict[str, Any]], config: OptimizerConfig, names: Mapping[Tensor, str]
) -> torch.optim.Optimizer:
    if isinstance(config, AdamWConfig) and config.moments != "fp32":
        settings: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": config.betas,
            "eps": config.eps,
            "is_cautious": config.cautious_weight_decay,
        }
        return CompressedAdamW(groups, moments=config.moments, names=names, **settings)
    if config.cautious_weight_decay:
        rule_config = AdamWConfig(betas=config.betas, eps=config.eps, cautious_weight_decay=True)
        return ElementwiseOptimizer(groups, rule_config)
    kernel = choose_adamw_kernel(group["params"] for group in groups)
    if kernel.kind != "fused":
        log.warning("AdamW steps with %s kernels: %s", kernel.kind, kernel.reason)
    options = {"fused": kernel.kind == "fused", "foreach": kernel.kind == "foreach"}
    rule = torch.optim.Adam if isinstance(config, AdamConfig) else torch.optim.AdamW
    optimizer = rule(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, **options)
    for group in groups:
        for parameter in group["params"]:
            # As torch's first step would create it; a float32 step counter is required by
            # fused=True. The other kernels read the counter on the host.
            optimizer.state[parameter] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if options["fused"] else "cpu"
                ),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer

"""AdamW's kernel follows from the devices, dtypes and meshes of its parameters, and each kernel
takes the same step.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmsys.config.optimizer import AdamWConfig
from llmsys.optim import build_optimizer as module
from llmsys.optim.adamw_kernel import AdamWKernel, choose_adamw_kernel
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.lr_schedule import set_rates


class Parameter:
    """What the choice reads of a parameter, on a device or mesh that this machine lacks."""

    def __init__(
        self, kind: str, mesh: str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.device, self.device_mesh, self.dtype = torch.device(kind), mesh, dtype


@pytest.mark.parametrize(
    ("lists", "kind", "reason"),
    [
        ([[Parameter("cpu"), Parameter("cuda")]], "fused", "torch has a fused kernel on cpu, cuda"),
        (
            [[Parameter("cuda", "dense")], [Parameter("cuda", "expert")]],
            "fused",
            "torch has a fused kernel on cuda",
        ),
        (
            [[Parameter("cuda", "dense"), Parameter("cuda", "expert")]],
            "loop",
            "a list holds shards of several meshes",
        ),
        (
            [[Parameter("cuda", "dense"), Parameter("cuda")]],
            "loop",
            "a list holds shards of several meshes",
        ),
        ([[Parameter("xla")]], "loop", "neither a fused kernel nor lists of tensors on xla"),
        (
            [[Parameter("cuda", dtype=torch.int8)]],
            "loop",
            "torch.int8 has neither a fused kernel nor lists",
        ),
    ],
)
def test_the_kernel_is_the_fastest_that_takes_every_list(
    lists: Any, kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_floating_point", lambda one: one.dtype.is_floating_point)
    choice = choose_adamw_kernel(lists)
    assert choice.kind == kind
    assert reason in choice.reason


def test_every_kernel_takes_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def take_steps(kernel: AdamWKernel) -> list[Tensor]:
        monkeypatch.setattr(module, "choose_adamw_kernel", lambda lists: kernel)
        torch.manual_seed(0)
        named = {
            "weight": nn.Parameter(torch.randn(4, 3)),
            "norm.weight": nn.Parameter(torch.randn(5)),
        }
        optimizer = build_optimizer(named, AdamWConfig(), compute_dtype=torch.float32)
        for _ in range(3):
            for parameter in named.values():
                parameter.grad = torch.randn_like(parameter)
            set_rates(optimizer.param_groups, 1e-2)
            optimizer.step()
        return [parameter.detach() for parameter in named.values()]

    fused = take_steps(AdamWKernel("fused", ""))
    assert not caplog.text
    for kind in ("foreach", "loop"):
        for found, wanted in zip(take_steps(AdamWKernel(kind, "why")), fused, strict=True):
            torch.testing.assert_close(found, wanted)
        assert f"AdamW steps with {kind} kernels: why" in caplog.text

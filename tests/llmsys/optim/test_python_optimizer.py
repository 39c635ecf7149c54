"""An optimizer of the user's own code: its steps, its place in engines and checkpoints, and the
refusals.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llmsys.config.loading.load import load_run_config
from llmsys.config.optimizer import PythonOptimizerConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.launch.commands.templates.optimizer import SignMomentum
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.python_optimizer import (
    PythonOptimizer,
    check_python_optimizer,
    load_python_optimizer,
)
from tests.helpers.paths import ROOT

TEMPLATE = (ROOT / "launch/commands/templates/optimizer.py").read_text()
ROWS = """
import torch
from llmsys.optim.python_optimizer import PythonOptimizer


class Rows(PythonOptimizer):
    def compute_update(self, gradient, moments, step, learning_rate):
        return gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-6) * learning_rate
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(TEMPLATE)
    return path


def test_its_steps_are_those_of_the_formula_in_fast_and_bitwise_mode(own: Path) -> None:
    config = PythonOptimizerConfig(
        path=f"{own}:SignMomentum", options={"beta": 0.5}, learning_rate=0.1, weight_decay=0.2
    )
    start, gradients = (
        torch.tensor([[1.0, -2.0]]),
        [torch.tensor([[3.0, -1.0]]), torch.tensor([[-8.0, 1.0]])],
    )
    fast, exact = ({"w": nn.Parameter(start.clone())} for _ in range(2))
    optimizer = build_optimizer(fast, config, compute_dtype=torch.float32)
    bitwise = BitwiseOptimizer(dict(exact), config)
    momentum, weight = torch.zeros(1, 2), start.clone()
    for gradient in gradients:
        fast["w"].grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        bitwise.step([gradient], 0.1, 1.0)
        momentum = 0.5 * momentum + 0.5 * gradient
        weight = weight * (1 - 0.1 * 0.2) - momentum.sign() * 0.1
    assert torch.equal(fast["w"], weight)
    assert torch.equal(exact["w"], weight)
    assert torch.equal(optimizer.state[fast["w"]]["exp_avg"], momentum)
    assert torch.equal(bitwise.moments["first_moment"]["w"], momentum)


def test_whole_tensors_reach_a_rule_that_needs_them(own: Path) -> None:
    own.write_text(ROWS)
    config = PythonOptimizerConfig(
        path=f"{own}:Rows", num_moments=0, elementwise=False, weight_decay=0, learning_rate=1
    )
    named = {"w": nn.Parameter(torch.zeros(2, 2))}
    optimizer = build_optimizer(named, config, compute_dtype=torch.float32)
    named["w"].grad = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert torch.allclose(named["w"], -torch.tensor([[0.6, 0.8], [0.0, 1.0]]))


def test_its_source_is_a_part_of_the_trajectory(own: Path) -> None:
    config = PythonOptimizerConfig(path=f"{own}:SignMomentum")
    train = {"tokens": 10_000, "precision": "fp32"}
    before = RunConfig(optimizer=config, train=train).trajectory_settings["optimizer"]
    own.write_text(TEMPLATE.replace(".sign()", ".tanh()"))
    after = RunConfig(optimizer=config, train=train).trajectory_settings["optimizer"]
    assert before["digest"] != after["digest"]


class _Changed(PythonOptimizer):
    body: str

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, learning_rate: float
    ) -> Tensor:
        found: Tensor = eval(self.body, {"g": gradient, "m": moments, "torch": torch, "step": step})
        return found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("g / g.norm()", "changes an element otherwise when it is called without its neighbours"),
        ("torch.randn_like(g)", "gives other changes when it is called again with equal tensors"),
        ("g[:2]", r"returned \(\(2,\), torch.float32\) for a gradient of \(12,\)"),
        ("g.double()", r"returned \(\(12,\), torch.float64\)"),
        ("3", "returned int for a gradient"),
        ("g.mul_(2)", "changed the gradient"),
        ("g / m[0]", "which is not finite. Correct compute_update"),
        ("m[4]", r"with 1 moments \(optimizer.num_moments\): IndexError"),
    ],
)
def test_the_kit_names_each_fault(body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_python_optimizer(_Changed(body=body), num_moments=1)
    check_python_optimizer(SignMomentum(), num_moments=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["optimizer.elementwise=false"],
            "elementwise: false needs whole parameters, which engine.kind=torch shards",
        ),
        (
            ["optimizer.elementwise=false", "engine.kind=deepspeed"],
            "which engine.kind=deepspeed shards over ranks",
        ),
        (
            ["optimizer.betas=[0.8,0.9]"],
            r"betas: \(0.8, 0.9\) is not read by kind=python. Use optimizer.options",
        ),
        (["optimizer.num_moments=4"], "num_moments: 4 is too large"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_code_runs(
    words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("train/demo", ["optimizer={kind: python, path: none.py:None}", *words])


def test_a_rule_that_is_not_elementwise_is_refused_when_it_is_loaded(own: Path) -> None:
    own.write_text(ROWS.replace(", keepdim=True", ""))
    with pytest.raises(ConfigError, match=r"or set optimizer\.elementwise=false"):
        load_python_optimizer(PythonOptimizerConfig(path=f"{own}:Rows", num_moments=0))

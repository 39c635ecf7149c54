"""Bitwise mode: one trajectory, bit for bit, on 1, 2, 4 and 8 processes, through a kill and a
change of their number.

Everything of one world size runs in one set of processes. Each planted bug is one that a hash must
show: it makes the trajectory depend on the number of processes.
"""

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.engine import bitwise_engine
from llmsys.engine.bitwise_engine import BitwiseEngine
from llmsys.engine.state_hash import hash_state
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.experts import GroupedExperts
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.parallel import reproducible_sharding
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
from llmsys.parallel.process_group import (
    all_reduce_sum,
    get_rank,
    get_world_size,
    init_process_group,
)
from llmsys.parallel.reproducible_sum import StreamingTreeSum
from llmsys.train import checkpoint_load
from llmsys.train.checkpoint_saver import CheckpointSaver
from tests.helpers.bitwise_runs import CASES, build, take_steps
from tests.helpers.ranks import run_ranks

DENSE, EXPERTS, ODD = CASES
STEPS = 2
SAVED, KILLED = 1, 2
"""A run saves after this step, and dies within this one."""

pytestmark = pytest.mark.distributed


class OneAfterAnother(StreamingTreeSum):
    """A rank's micro-batches first, as accumulation does it."""

    def add_leaf(self, leaf: list[torch.Tensor]) -> None:
        if self._sums:
            torch._foreach_add_(self._sums[0][1], leaf)
        else:
            self._sums.append((0, leaf))


def norm_of_shards(parameters: Any, gradients: list[torch.Tensor], **places: Any) -> float:
    """Each rank's share of the squares, then their sum."""
    squares = (
        torch.stack([gradient.norm() for gradient in gradients if gradient.numel()]).square().sum()
    )
    return float(all_reduce_sum(squares).sqrt())


def dropout_of_rank(engine: BitwiseEngine, micro_batch: int) -> None:
    """Every rank draws on from its own seed."""
    if micro_batch == get_rank():
        torch.manual_seed(1000 * engine._optimizer.steps + get_rank())


def fused_step(
    optimizer: BitwiseOptimizer, gradients: list[torch.Tensor], rate: float, scale: float
) -> None:
    """torch's fused kernel, which takes what is left of a vector another way."""
    optimizer.steps += 1
    local_moments = [
        [value.to_local() for value in values.values()]  # type: ignore[attr-defined]
        for values in optimizer.moments.values()
    ]
    parameters = [parameter.to_local().detach() for parameter in optimizer.named.values()]  # type: ignore[attr-defined]
    steps = [torch.tensor(float(optimizer.steps)) for _ in parameters]
    scaled = [gradient * scale for gradient in gradients]
    torch._fused_adamw_(  # type: ignore[call-overload]
        parameters, scaled, *local_moments, [], steps, lr=rate, beta1=0.9, beta2=0.95,
        weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def all_experts_at_once(self: Any, x_MD: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each rank's rows by themselves, but all experts in one activation, as in fast mode."""
    counts_RL = counts.view(-1, counts.shape[-1])
    parts = x_MD.split(counts_RL.sum(1).tolist())
    return torch.cat(
        [GroupedExperts.forward(self.experts, *pair) for pair in zip(parts, counts_RL, strict=True)]
    )


BUGS: dict[str, tuple[str, Any, str, Any]] = {
    "sums in the order of a rank": (DENSE, bitwise_engine, "StreamingTreeSum", OneAfterAnother),
    "norm by shards": (DENSE, bitwise_engine, "compute_gradient_norm", norm_of_shards),
    "dropout by rank": (DENSE, BitwiseEngine, "_seed_dropout", dropout_of_rank),
    "a fused optimizer": (ODD, BitwiseOptimizer, "step", fused_step),
    "rows of all ranks in one product": (
        ODD,
        reproducible_sharding.ReproducibleTokenDispatcher,
        "_compute_expert_outputs",
        AllToAllTokenDispatcher._compute_expert_outputs,
    ),
    "an expert beside others in an activation": (
        ODD, reproducible_sharding.SequentialExperts, "__call__", all_experts_at_once,
    ),
}  # fmt: skip


def with_bug(owner: Any, name: str, bug: Any, run: Callable[[], Any]) -> Any:
    right = getattr(owner, name)
    setattr(owner, name, bug)
    try:
        return run()
    finally:
        setattr(owner, name, right)


FROM_START = {1: tuple(CASES), 2: tuple(CASES), 4: (EXPERTS, ODD), 8: (EXPERTS,)}
RESUMED = {1: tuple(CASES), 2: (EXPERTS,), 4: (DENSE,), 8: (ODD,)}
"""Which cases each number of processes runs: every case has every number, from the start or from a
checkpoint, but for the dense one on eight. Each step of eight processes costs enough.
"""


def planted(_: int) -> dict[str, str]:
    """The last hash with each bug."""
    found = {}
    for bug, (name, owner, attribute, replacement) in BUGS.items():
        found[bug] = with_bug(
            owner,
            attribute,
            replacement,
            lambda case=CASES[name]: take_steps(build(case), 1, STEPS)[-2]["state"],
        )
    return found


def all_runs(_: int, folder: Path) -> dict[str, Any]:
    found = {
        name: take_steps(build(CASES[name]), 1, STEPS) for name in FROM_START[get_world_size()]
    }
    for name in RESUMED[get_world_size()]:
        engine = build(CASES[name])
        checkpoint_load.load_checkpoint(engine, folder / name / f"step-{SAVED:08d}")
        found[f"{name}, resumed"] = take_steps(engine, SAVED + 1, STEPS)
    return found


def run_and_die(number: int, folder: Path) -> None:
    """Save every case after a step, hand it to the fast engine, and be killed within the next step.

    What else two processes are to find is found before, and written down.
    """
    engines = {name: build(case) for name, case in CASES.items()}
    for name, engine in engines.items():
        told = take_steps(engine, 1, SAVED)[-2]
        CheckpointSaver(folder / name, CheckpointConfig()).save_state(engine.get_state(), SAVED, {})
        fast = build(CASES[name], TorchEngine)
        checkpoint_load.load_checkpoint(fast, folder / name / f"step-{SAVED:08d}")
        assert hash_state(fast.get_state()) == told["state"], name
    found = all_runs(number, folder) | planted(number)
    if number == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    engines[EXPERTS].module.blocks[0].register_full_backward_hook(lambda *_: die(number, folder))
    take_steps(engines[EXPERTS], KILLED, KILLED)


def die(number: int, folder: Path) -> None:
    if number == 1:
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What every world size found, on rank 0. Two begin and are killed, and all go on from what
    those saved.
    """
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises((AssertionError, EOFError)) as failure:
        run_ranks(run_and_die, 2, folder)
    assert (folder / "died").exists(), failure.value
    found = {2: pickle.loads((folder / "found").read_bytes())}
    with init_process_group():
        found[1] = all_runs(0, folder) | planted(0)
    return found | {world: run_ranks(all_runs, world, folder)[0] for world in (4, 8)}


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for world in (2, 4, 8) for name in FROM_START[world]]
)
def test_one_trajectory_whatever_the_number_of_processes(
    runs: dict[int, dict[str, Any]], name: str, world: int
) -> None:
    assert runs[world][name] == runs[1][name]


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for world in RESUMED for name in RESUMED[world]]
)
def test_a_killed_run_goes_on_bit_for_bit_on_any_number(
    runs: dict[int, dict[str, Any]], name: str, world: int
) -> None:
    assert runs[world][f"{name}, resumed"] == runs[1][name][SAVED:]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_shows(runs: dict[int, dict[str, Any]], bug: str) -> None:
    assert runs[1][bug] != runs[2][bug]

"""FSDP sums gradients over replicas as one plain process sums them, also where a block reduces
twice.
"""

import pytest

from llmsys.config.norm import ReversibleConfig
from llmsys.doctor.parity_models import DENSE, ParityModel
from llmsys.doctor.parity_reference import OPTIMIZER, Trajectory, compute_reference_trajectory
from tests.helpers.ranks import run_ranks
from tests.helpers.steps_around_events import (
    build_case_config,
    convert_to_arrays,
    find_farthest,
    train_around_event,
)

pytestmark = pytest.mark.distributed

# Its blocks run twice, once for each branch.
REVERSIBLE = ParityModel(
    "reversible", DENSE.model.model_copy(update={"residual": ReversibleConfig()})
)


def train_reversible(rank: int, expected: Trajectory) -> dict[str, tuple[float, str]]:
    """The farthest tensor with gradients summed over two replicas, by what is accumulated."""
    found = {}
    for gradients in ("sharded", "whole"):
        config = build_case_config(
            REVERSIBLE,
            OPTIMIZER,
            {"replicate": 2},
            engine={"kind": "torch", "gradient_accumulation": gradients},
        )
        trained = train_around_event(config, REVERSIBLE, "nothing")
        found[gradients] = find_farthest(trained, expected)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_branches_of_reversible_blocks_are_summed_over_replicas(ranks: int) -> None:
    expected = convert_to_arrays(compute_reference_trajectory(REVERSIBLE))
    for found in run_ranks(train_reversible, ranks, expected):
        assert all(distance <= 1 for distance, _ in found.values()), found

"""SOAP takes the same steps in every layout, up to rounding, with the eps that it has by default.

Its bases have null spaces: a gradient of more rows than columns has one in its first basis, and an
idle expert or a router has one in each. A basis of them that is rounding would be another one in
each layout.
"""

from typing import Any

import pytest

from llmsys.config.optimizer import SoapConfig
from llmsys.doctor.parity_models import DEEP, EXPERTS, IDLE, ParityModel
from llmsys.doctor.parity_reference import RATE, Trajectory
from tests.helpers.ranks import run_ranks
from tests.helpers.steps_around_events import (
    Settings,
    build_case_config,
    convert_to_arrays,
    find_farthest,
    train_around_event,
)

pytestmark = pytest.mark.distributed

STEPS = 5
# By name: model, steps between bases, layout on two ranks.
CASES: dict[str, tuple[ParityModel, int, Settings]] = {
    "experts on two ranks": (EXPERTS, 10, {"expert": 2}),
    "replicas": (IDLE, 2, {"replicate": 2}),
    "shards, latent attention": (DEEP, 2, {}),
}


def train_cases(rank: int, sharded: bool) -> dict[str, Trajectory]:
    found = {}
    for name, (model, every, layout) in CASES.items():
        optimizer: Any = {"kind": "soap", "learning_rate": RATE, "precondition_every_steps": every}
        config = build_case_config(model, optimizer, layout if sharded else {})
        assert config.optimizer.eps == SoapConfig(learning_rate=RATE).eps == 1e-8
        found[name] = convert_to_arrays(train_around_event(config, model, "nothing", STEPS))
    return found


def test_moments_and_weights_do_not_depend_on_the_layout() -> None:
    alone, together = run_ranks(train_cases, 1, False)[0], run_ranks(train_cases, 2, True)[0]
    # Eigenvectors turn by rounding over the gap of their eigenvalues, and second moments with them.
    bands = {"2/": 2e-2}
    far = {name: find_farthest(together[name], alone[name], bands) for name in CASES}
    assert not {name: distance for name, distance in far.items() if not distance[0] <= 1}

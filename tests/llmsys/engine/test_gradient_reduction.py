"""Gradients of every pipeline schedule are summed over replicas and shards as one plain process
sums them.

A rank of an interleaved pipeline has several stages, whose last backward passes come at different
times. Embedding, final norm, head and prediction modules are outside of blocks: on the first rank
they belong to its first stage, on the last rank to its last stage.
"""

import pytest

from llmsys.doctor.parity_models import DEEP, ParityModel
from llmsys.doctor.parity_reference import OPTIMIZER, Trajectory, compute_reference_trajectory
from llmsys.parallel.process_group import get_world_size
from tests.helpers.ranks import run_ranks
from tests.helpers.steps_around_events import (
    Settings,
    build_case_config,
    convert_to_arrays,
    find_farthest,
    train_around_event,
)

pytestmark = pytest.mark.distributed

SCHEDULES: dict[str, Settings] = {
    "gpipe": {"kind": "gpipe"},
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "stages_per_rank": 2},
}
# Ranks and axes of them; shards take what is left.
PLACES: dict[str, tuple[int, Settings]] = {
    "replicas": (4, {"replicate": 2}),
    "shards": (4, {}),
    "both": (8, {"replicate": 2}),
}
TIED = DEEP
UNTIED = ParityModel(
    "four layers, untied",
    DEEP.model.model_copy(update={"tie_word_embeddings": False, "multi_token_prediction": None}),
)
MODELS = {model.name: model for model in (TIED, UNTIED)}
# Every schedule in every place. How gradients are summed and whether embeddings are tied take
# turns, so that each meets every schedule, every place and the other.
TURNS = (
    (("sharded", TIED), ("whole", UNTIED), ("sharded", UNTIED)),
    (("whole", UNTIED), ("sharded", TIED), ("whole", TIED)),
    (("sharded", TIED), ("whole", UNTIED), ("sharded", TIED)),
)
CASES = [
    (schedule, place, gradients, model.name)
    for schedule, turns in zip(SCHEDULES, TURNS, strict=True)
    for place, (gradients, model) in zip(PLACES, turns, strict=True)
]


@pytest.fixture(scope="module")
def expected() -> dict[str, Trajectory]:
    """One process, one row at a time, with torch's own loss, clipping and AdamW."""
    return {
        name: convert_to_arrays(compute_reference_trajectory(model))
        for name, model in MODELS.items()
    }


def run_cases(
    rank: int, expected: dict[str, Trajectory]
) -> dict[tuple[str, ...], tuple[float, str]]:
    """The farthest tensor of every case on this number of ranks."""
    found: dict[tuple[str, ...], tuple[float, str]] = {}
    for case in CASES:
        schedule, place, gradients, name = case
        ranks, axes = PLACES[place]
        if ranks == get_world_size():
            layout = {"pipeline": 2, "pipeline_schedule": SCHEDULES[schedule], **axes}
            engine = {"kind": "torch", "gradient_accumulation": gradients}
            config = build_case_config(MODELS[name], OPTIMIZER, layout, engine=engine)
            found[case] = find_farthest(
                train_around_event(config, MODELS[name], "nothing"), expected[name]
            )
    return found


@pytest.mark.parametrize("ranks", sorted({ranks for ranks, _ in PLACES.values()}))
def test_every_schedule_sums_gradients_as_one_plain_process(
    ranks: int, expected: dict[str, Trajectory]
) -> None:
    [found, *others] = run_ranks(run_cases, ranks, expected)
    assert all(other.keys() == found.keys() for other in others)
    far = {case: distance for case, distance in found.items() if not distance[0] <= 1}
    assert not far
    assert len(found) == sum(PLACES[place][0] == ranks for _, place, _, _ in CASES)

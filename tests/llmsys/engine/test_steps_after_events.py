"""What runs between two steps changes neither: evaluations, texts and replays, in fast and in
bitwise mode.

The root of FSDP2 stays gathered after a forward without backward. Saves shard it again, so there
are none here.
"""

import pytest

from llmsys.doctor.parity_models import DENSE, EXPERTS, ParityModel
from llmsys.doctor.parity_reference import OPTIMIZER, Trajectory, compute_reference_trajectory
from llmsys.parallel.process_group import get_world_size
from tests.helpers.ranks import run_ranks
from tests.helpers.steps_around_events import (
    Event,
    Settings,
    build_case_config,
    convert_to_arrays,
    find_farthest,
    train_around_event,
)

pytestmark = pytest.mark.distributed

BITWISE: dict[str, Settings] = {"train": {"reproducibility": "bitwise"}}
WHOLE: dict[str, Settings] = {"engine": {"kind": "torch", "gradient_accumulation": "whole"}}
INTERLEAVED = {"kind": "interleaved", "stages_per_rank": 2}
DEEP = ParityModel(
    "four layers",
    DENSE.model.model_copy(update={"num_hidden_layers": 4, "tie_word_embeddings": False}),
)
MODELS = {model.name: model for model in (DENSE, EXPERTS, DEEP)}

# (model, layout, sections, event) by number of ranks. The sample of the covering array
# (llmsys/doctor/pairs) has an evaluation with every engine, axis, schedule and average; it has no
# texts and replays.
Case = tuple[ParityModel, Settings, dict[str, Settings], Event]
CASES: dict[int, dict[str, Case]] = {
    1: {
        "bitwise, evaluation": (DENSE, {}, BITWISE, "evaluation"),
        "bitwise, text": (EXPERTS, {}, BITWISE, "text"),
        "bitwise, replay": (DENSE, {}, BITWISE, "replay"),
        "fast, evaluation": (DENSE, {}, {}, "evaluation"),
        "fast, text": (EXPERTS, {}, {}, "text"),
        "fast, replay": (DENSE, {}, {}, "replay"),
        "zero-1, evaluation": (DENSE, {}, {"engine": {"kind": "deepspeed", "zero_stage": 1}},
            "evaluation"),
    },
    2: {
        "bitwise, evaluation": (DENSE, {}, BITWISE, "evaluation"),
        "bitwise, text": (DENSE, {}, BITWISE, "text"),
        "bitwise, replay": (EXPERTS, {}, BITWISE, "replay"),
        "bitwise, interleaved": (DEEP, {"pipeline": 2, "pipeline_schedule": INTERLEAVED}, BITWISE,
            "evaluation"),
        "bitwise, 1f1b, text": (DEEP, {"pipeline": 2}, BITWISE, "text"),
        "fast, evaluation": (DENSE, {}, {}, "evaluation"),
        "fast, whole": (EXPERTS, {}, WHOLE, "evaluation"),
        "fast, interleaved": (DEEP, {"pipeline": 2, "pipeline_schedule": INTERLEAVED}, {}, "text"),
    },
    4: {
        "bitwise, interleaved": (
            DEEP, {"pipeline": 2, "replicate": 2, "pipeline_schedule": INTERLEAVED}, BITWISE,
            "evaluation",
        ),
        "fast, interleaved": (
            DEEP, {"pipeline": 2, "replicate": 2, "pipeline_schedule": INTERLEAVED}, {},
            "evaluation",
        ),
        "fast, whole": (DENSE, {"replicate": 2}, WHOLE, "text"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> dict[str, Trajectory]:
    """One process without events, with torch's own loss, clipping and AdamW."""
    return {
        name: convert_to_arrays(compute_reference_trajectory(model))
        for name, model in MODELS.items()
    }


def run_cases(rank: int, expected: dict[str, Trajectory]) -> dict[str, tuple[float, str]]:
    """The farthest tensor of every case on this number of ranks."""
    found = {}
    for title, (model, layout, sections, event) in CASES[get_world_size()].items():
        config = build_case_config(model, OPTIMIZER, layout, **sections)
        found[title] = find_farthest(train_around_event(config, model, event), expected[model.name])
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_nothing_between_steps_changes_them(ranks: int, expected: dict[str, Trajectory]) -> None:
    found = run_ranks(run_cases, ranks, expected)[0]
    assert not {title: distance for title, distance in found.items() if not distance[0] <= 1}
    assert found.keys() == CASES[ranks].keys()

"""Laws of mixtures: exact proportions over every prefix, epochs of each source's own, and no
state.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.mixture import MixtureConfig, reduce_to_integers
from llmsys.data.dataset_mixture import MixtureOrder, MixtureWindows, build_period_order
from llmsys.data.step_batches import WindowStepBatches
from llmsys.data.step_plan import RunPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import ConfigError
from tests.helpers.dataset import make_dataset

LENGTH = 32
WEIGHTS = [
    (0.8, 0.2),
    (0.5, 0.3, 0.2),
    (7, 1, 1, 1, 1, 1),
    (0.9, 0.05, 0.03, 0.02),
    (1, 1, 1, 1, 1),
    (0.001, 0.333, 0.666),
]


def mixture(*weights: float, stages: object = ()) -> MixtureConfig:
    sources = [
        {"folder": f"data{number}", "weight": weight} for number, weight in enumerate(weights)
    ]
    return MixtureConfig.model_validate({"sources": sources, "stages": stages})


@pytest.mark.parametrize("weights", WEIGHTS)
def test_after_any_number_of_sequences_every_source_is_within_one_of_its_share(
    weights: tuple[float, ...],
) -> None:
    parts = reduce_to_integers(weights)
    order = MixtureOrder([(0, parts)])
    sources, _ = order.locate_sequences(np.arange(2 * sum(parts) + 7))
    seen = np.cumsum(sources[:, None] == np.arange(len(parts)), axis=0)
    due = np.arange(1, len(sources) + 1)[:, None] * np.array(parts) / sum(parts)
    assert np.abs(seen - due).max() < 1
    assert (seen[sum(parts) - 1] == parts).all()  # a whole period is exact


def test_every_random_choice_of_weights_keeps_the_bound() -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        parts = tuple(int(part) for part in generator.integers(1, 60, generator.integers(2, 12)))
        order = build_period_order(parts)
        seen = np.cumsum(order[:, None] == np.arange(len(parts)), axis=0)
        due = np.arange(1, len(order) + 1)[:, None] * np.array(parts) / sum(parts)
        assert np.abs(seen - due).max() < 1


def test_sources_are_read_without_gap_and_any_sequence_can_be_asked_for() -> None:
    stages = [(0, (4, 1, 0)), (23, (1, 1, 2)), (50, (0, 0, 1))]
    order = MixtureOrder(stages)
    sources, local = order.locate_sequences(np.arange(120))
    for source in range(3):
        assert local[sources == source].tolist() == list(range(int((sources == source).sum())))
    for number in (0, 22, 23, 49, 50, 119):
        one = order.locate_sequences(np.array([number]))
        assert (one[0][0], one[1][0]) == (sources[number], local[number])
        assert (
            order.count_by_source(number).tolist()
            == np.bincount(sources[:number], minlength=3).tolist()
        )
    assert set(sources[50:].tolist()) == {2}
    assert 2 not in sources[:23]


def test_proportions_are_those_that_are_written() -> None:
    assert reduce_to_integers((0.8, 0.2)) == (4, 1)
    assert reduce_to_integers((0.1, 0.2)) == (1, 2)
    assert reduce_to_integers((3, 0, 9)) == (1, 0, 3)
    stages = [{"start_tokens": 100, "weights": [0, 1]}]
    assert mixture(0.75, 0.25, stages=stages).stage_weights == ((0, (3, 1)), (100, (0, 1)))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> MixtureWindows:
    folder = tmp_path_factory.mktemp("sources")
    large, small = (
        open_tokens(make_dataset(folder / str(count), documents=count), "train")
        for count in (120, 15)
    )
    sources = (
        StreamWindows(require_paged(large), length=LENGTH, seed=3),
        StreamWindows(require_paged(small), length=LENGTH, seed=3),
    )
    return MixtureWindows(sources, ["large", "small"], [(0, (2, 1))])


def test_each_source_has_epochs_of_its_own_each_in_another_order(windows: MixtureWindows) -> None:
    small = windows.sources[1].windows_per_epoch
    sources, _ = windows.order.locate_sequences(np.arange(9 * small))
    mine = np.flatnonzero(sources == 1)
    for epoch in range(2):
        numbers = mine[epoch * small : (epoch + 1) * small]
        rows = windows.get_rows(numbers).tokens
        alone = windows.sources[1].get_rows(np.arange(epoch * small, (epoch + 1) * small)).tokens
        assert np.array_equal(rows, alone)
        documents = {
            document
            for number in numbers.tolist()
            for _, document in windows.list_documents(number)
        }
        assert len(documents) >= 15 - 1  # all but what may fall off the end
    first, second = (windows.get_rows(mine[start : start + 4]).tokens for start in (0, small))
    assert not np.array_equal(first, second)
    epochs = windows.get_progress(9 * small)["epochs"]
    assert epochs["small"] == pytest.approx(3.0, abs=0.01)
    assert 0 < epochs["large"] < 1


@pytest.mark.parametrize(
    ("ranks", "micro", "deal"), [(1, 2, "sequential"), (2, 3, "balanced"), (3, 0, "balanced")]
)
def test_who_handles_a_window_never_changes_the_windows_of_a_step(
    windows: MixtureWindows, ranks: int, micro: int, deal: str
) -> None:
    def seen(ranks: int, micro: int, deal: str) -> Counter[tuple[int, ...]]:
        batch = BatchConfig.model_validate(
            {
                "sequence_length": LENGTH,
                "sequences": 12,
                "micro_sequences": micro,
                "assignment": deal,
            }
        )
        rows = []
        for rank in range(ranks):
            steps = WindowStepBatches(
                windows, RunPlan(batch, ranks, rank), separate_documents=True, deal=batch.assignment
            )
            rows += [
                tuple(row) for part in steps.get_micro_batches(5) for row in part.tokens_BT.tolist()
            ]
        return Counter(rows)

    assert seen(ranks, micro, deal) == seen(1, 0, "sequential")


def test_the_same_tokens_twice_are_refused_by_name(tmp_path: Path) -> None:
    packed = [
        StreamWindows(
            require_paged(open_tokens(make_dataset(tmp_path / name), "train")),
            length=LENGTH,
            seed=3,
        )
        for name in "ab"
    ]
    with pytest.raises(
        ConfigError,
        match=r"b and a hold the same tokens .* Keep one of them, with the sum of the weights",
    ):
        MixtureWindows(packed, ["a", "b"], [(0, (1, 1))])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": [{"folder": "a"}, {"folder": "a"}]}, "sources.1.folder: a is listed twice"),
        (
            {"sources": [{"folder": "x/a"}, {"folder": "y/a"}]},
            "sources.1.name: two sources have the name a",
        ),
        ({"sources": [{"folder": "a", "weight": 0}]}, "sources: all weights are 0"),
        (
            {"sources": [{"folder": "a", "weight": 0.123457}, {"folder": "b"}]},
            r"are 1,123,457 integer parts, and the limit is 65,536. .* such as 0.1099, 0.8901",
        ),
        (
            {
                "sources": [{"folder": "a"}, {"folder": "b"}],
                "stages": [{"start_tokens": 9, "weights": [1]}],
            },
            "stages.0.weights: 1 weights for 2 sources",
        ),
        (
            {
                "sources": [{"folder": "a"}],
                "stages": [
                    {"start_tokens": 9, "weights": [1]},
                    {"start_tokens": 9, "weights": [1]},
                ],
            },
            "stages.1.start_tokens: 9 is not after the stage before it, from 9. Sort the stages",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MixtureConfig.model_validate(settings)

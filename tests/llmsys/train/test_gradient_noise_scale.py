"""Laws of the gradient noise scale: the known answer on known gradients, and the norms of the
engine it is fed.
"""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import InterleavedScheduleConfig
from llmsys.config.run import RunConfig
from llmsys.engine.engine import GradientProbe, StepResult
from llmsys.engine.torch_engine import TorchEngine
from llmsys.errors import ConfigError
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train import gradient_noise_scale
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.gradient_noise_scale import (
    GradientNoiseScale,
    NoiseScaleMeter,
    count_small_batch,
    require_micro_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, build_sequences, build_tiny_config

CPU = torch.device("cpu")


def test_known_gradients_give_the_known_noise_scale() -> None:
    generator = np.random.default_rng(0)
    mean, deviation = generator.normal(0, 0.1, 40), generator.uniform(0.5, 2, 40)
    scale, gradients, traces = GradientNoiseScale(), [], []
    for _ in range(3000):
        tokens = mean + deviation * generator.normal(size=(64, 40))
        small, large = tokens[:16].mean(0), tokens.mean(0)
        scale.update(float(small @ small), 16, float(large @ large), 64)
        single = GradientNoiseScale()
        single.update(float(small @ small), 16, float(large @ large), 64)
        gradients.append(single.gradient_squared / single.weight)
        traces.append(single.covariance_trace / single.weight)
    # Both estimates are unbiased, which their quotient in a single step is not.
    assert np.mean(gradients) == pytest.approx(mean @ mean, rel=0.1)
    assert np.mean(traces) == pytest.approx((deviation**2).sum(), rel=0.05)
    assert np.mean(traces) / np.mean(gradients) == pytest.approx(
        (deviation**2).sum() / (mean @ mean), rel=0.15
    )
    found = scale.to_dict()
    assert found["noise_scale_tokens"] == pytest.approx(
        (deviation**2).sum() / (mean @ mean), rel=0.7
    )


def test_a_negative_average_is_no_noise_scale() -> None:
    scale = GradientNoiseScale()
    scale.update(10.0, 16, 1.0, 64)  # so much noise that nothing of the gradient can be seen
    assert scale.to_dict()["noise_scale_tokens"] is None
    assert GradientNoiseScale().to_dict() == {}


class Engine:
    """What the meter uses of an engine whose gradients have a norm of 3."""

    device = CPU
    gradient_probe: GradientProbe | None = None

    def compute_partial_norm(self) -> float:
        return 3.0


def build_layout(**axes: Any) -> ParallelLayout:
    return ParallelLayout(**{"shard": 1, **axes})


def build_engine(ranks: int = 1) -> TorchEngine:
    meshes = build_device_meshes(ParallelLayout().resolve(ranks, build_tiny_config()), CPU)
    with torch.device("meta"):
        model = Transformer(build_tiny_config())
    return TorchEngine(
        model,
        meshes=meshes,
        optimizer=AdamWConfig(),
        loss=build_training_loss(RunConfig().loss),
        compute_dtype=torch.float32,
        seed=1, device=CPU,
    )  # fmt: skip


@pytest.mark.parametrize("layout", [{"context": 2}, {"pipeline": 2}], ids=str)
def test_ranks_with_the_same_sequences_count_them_once(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two ranks of a sequence, as each of them sees it.
    monkeypatch.setattr(gradient_noise_scale, "all_reduce_sum", lambda count: 2 * count)
    meter = NoiseScaleMeter(every_steps=1, layout=build_layout(**layout), seed=0)
    meter.engine = watched = Engine()
    batches = [build_sequences(0, micro, 1) for micro in range(2)]
    meter.begin_step(0, batches)
    assert watched.gradient_probe is not None
    assert watched.gradient_probe.count == 1
    watched.gradient_probe.look()
    # The gradient of one of two micro-batches, divided by the targets of both, has the norm 3.
    meter.end_step(StepResult(1.0, 4.0, 2 * LENGTH, is_applied=True))
    expected = GradientNoiseScale()
    expected.update((2 * 3.0) ** 2, LENGTH, 4.0**2, 2 * LENGTH)
    assert meter.scale == expected


class StepsOfOne:
    """One weight whose gradient a test gives for each micro-batch, with the hook of an engine."""

    device = CPU

    def __init__(self) -> None:
        self.gradient_probe: GradientProbe | None = None
        self.gradient = 0.0

    def compute_partial_norm(self) -> float:
        return abs(self.gradient)

    def train_step(self, gradients: list[float], targets: int) -> StepResult:
        self.gradient = 0.0
        for number, gradient in enumerate(gradients):
            self.gradient += gradient
            if self.gradient_probe is not None and self.gradient_probe.count == number + 1:
                self.gradient_probe.look()
        return StepResult(1.0, abs(self.gradient), targets, is_applied=True)


@pytest.mark.parametrize(
    ("count", "keeps_order", "num_small"), [(3, False, 1), (4, True, 2), (6, True, 4), (3, True, 2)]
)
def test_the_smaller_batch_ends_before_the_larger_one(
    count: int, keeps_order: bool, num_small: int
) -> None:
    meter = NoiseScaleMeter(every_steps=1, layout=build_layout(), seed=0, keeps_order=keeps_order)
    meter.engine = watched = StepsOfOne()
    batches = [build_sequences(0, micro, 1) for micro in range(count)]
    meter.begin_step(0, batches)
    gradients = [1.0, 10.0, 100.0, 1000.0, 1e4, 1e5][:count]
    meter.end_step(watched.train_step(gradients, count * LENGTH))
    small, large = sum(gradients[:num_small]) * count / num_small, sum(gradients)
    expected = GradientNoiseScale()
    expected.update(small**2, num_small * LENGTH, large**2, count * LENGTH)
    assert meter.scale == expected


def measure_small_norm(rank: int, ranks: int) -> tuple[float, float, float, float]:
    """(small norm and tokens of the meter, norm of that micro-batch alone, targets)."""
    meter = NoiseScaleMeter(every_steps=1, layout=build_layout(shard=ranks), seed=3)
    share = 4 // ranks
    batches = [
        build_sequences(0, 4 * micro + rank * share, share, ignored=0 if rank else 3)
        for micro in range(3)
    ]
    meter.engine = watched = build_engine(ranks)
    ordered = meter.begin_step(0, batches)
    assert sorted(map(id, ordered)) == sorted(map(id, batches))
    result = watched.train_step(ordered, 0.0)
    assert meter._small is not None
    meter.end_step(result)
    alone = build_engine(ranks).train_step(ordered[:1], 0.0)
    norm, targets = meter._small
    return norm * result.targets / targets, targets, alone.gradient_norm, result.targets


@pytest.mark.distributed
def test_the_small_norm_is_that_of_the_first_micro_batch_of_all_ranks_alone() -> None:
    found = run_ranks(measure_small_norm, 2, 2)
    for small, targets, alone, total in found:
        assert small == pytest.approx(alone, rel=1e-4)
        assert targets < total / 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # both ranks agree


def test_only_every_so_manieth_step_is_measured_and_a_refused_one_is_not_taken() -> None:
    meter = NoiseScaleMeter(every_steps=3, layout=build_layout(), seed=0)
    watched = Engine()
    meter.engine = watched
    batches = [build_sequences(0, micro, 1) for micro in range(2)]
    for step, due in enumerate([False, False, True, False]):
        ordered = meter.begin_step(step, batches)
        assert (meter._targets == LENGTH) == due == (watched.gradient_probe is not None)
        assert due or ordered == batches
    meter.begin_step(2, batches)
    meter._small = 1.0, 8.0
    meter.end_step(StepResult(1.0, 1.0, 32, is_applied=False))
    assert meter.scale.to_dict() == {}


@pytest.mark.parametrize("targets", [0.0, 32.0])
def test_a_step_whose_targets_are_all_in_one_part_is_not_taken(targets: float) -> None:
    meter = NoiseScaleMeter(every_steps=1, layout=build_layout(), seed=0)
    meter.engine = Engine()
    meter.begin_step(0, [build_sequences(0, micro, 1) for micro in range(2)])
    meter._small = 1.0, targets
    meter.end_step(StepResult(1.0, 1.0, 32, is_applied=True))
    assert meter.scale.to_dict() == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": {"kind": "deepspeed"}},
            "engine.kind: deepspeed reduces over ranks only after the last micro-batch",
        ),
        (
            {"batch": {"micro_sequences": 0}},
            "batch.micro_sequences: 0 makes one micro-batch of a rank's share",
        ),
        (
            {"train": {"precision": "fp16"}},
            "train.precision: fp16 unscales gradients only after the last micro-batch",
        ),
    ],
)
def test_where_it_cannot_be_had_it_is_refused_by_name(
    settings: dict[str, dict[str, object]], message: str
) -> None:
    base = {"train": {"noise_scale_every_steps": 1}, "batch": {"micro_sequences": 4}}
    sections = {
        key: base.get(key, {}) | settings.get(key, {}) for key in base.keys() | settings.keys()
    }
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(sections)


def test_one_micro_batch_on_a_rank_is_refused_when_ranks_are_known() -> None:
    config = RunConfig.model_validate({"batch": {"micro_sequences": 4}})
    with pytest.raises(
        ConfigError, match=r"batch.micro_sequences=4 gives each rank only one. Use a smaller"
    ):
        require_micro_batches(1, config, build_layout())
    assert require_micro_batches(2, config, build_layout())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("keeps_order", [False, True])
def test_an_interleaved_pipeline_runs_both_parts_of_a_step_or_refuses_them(
    ranks: int, keeps_order: bool
) -> None:
    schedule = InterleavedScheduleConfig()
    layout = build_layout(pipeline=ranks, pipeline_schedule=schedule)
    train = {"reproducibility": "bitwise" if keeps_order else "fast", "threads_per_process": 1}
    config = RunConfig.model_validate({"train": train, "batch": {"micro_sequences": 4}})
    refused = []
    for count in range(2, 65):
        if schedule.find_micro_batch_problem(ranks, count):
            continue  # no run has it
        small = count_small_batch(count, layout, keeps_order=keeps_order)
        assert 0 < small < count
        parts = small, count - small
        runs = not any(schedule.find_micro_batch_problem(ranks, part) for part in parts)
        if runs:
            assert require_micro_batches(count, config, layout)
            continue
        refused.append(count)
        with pytest.raises(ConfigError, match=f"runs {small} and then {count - small} of {count}"):
            require_micro_batches(count, config, layout)
    # Powers of two are always divided into powers of two.
    assert not {2, 4, 8, 16, 32, 64} & set(refused)
    assert keeps_order or not refused

"""A batch doubles by the noise scale: by the rule, never beyond its limits, and the same again
after a kill.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.data.step_plan import RunPlan
from llmsys.doctor.fault_injection import Fault, run_attempt
from llmsys.doctor.toy_dataset import LENGTH, build_toy_config, write_toy_dataset
from llmsys.errors import ConfigError
from llmsys.events import read_latest_events
from llmsys.report.run_record import read_run
from llmsys.train.batch_growth import BatchGrowth
from llmsys.train.build_trainer import train_run
from llmsys.train.gradient_noise_scale import NoiseScaleMeter
from llmsys.train.recorded_changes import load_recorded_changes, set_recorded_changes
from llmsys.train.trainer import Trainer
from tests.helpers import example_run

NOISE = {"noise_scale_every_steps": 2}
CONFIG = RunConfig.model_validate(
    {
        "batch": {
            "sequence_length": 8, "sequences": 16, "micro_sequences": 1,
            "ramp": {"kind": "noise_scale", "start_tokens": 16, "max_share": 0.5,
                "min_measurements": 3},
        },
        "train": {"tokens": 20_000} | NOISE,
    }
)  # fmt: skip
SERIES = [
    0.0,
    50,
    70,
    63,
    64,
    20,
    10_000,
    10_000,
    90,
    10_000,
    10_000,
    10_000,
    10_000,
    10_000,
    10_000,
    10_000,
    10_000,
    9e9,
]


class FakeMeter(NoiseScaleMeter):
    """A meter that reads SERIES: one measurement at each second step."""

    def read(self, step: int) -> None:
        if self.is_due(step):
            self.scale.measurements += 1
            self.scale.covariance_trace, self.scale.gradient_squared = (
                SERIES[self.scale.measurements - 1],
                1.0,
            )


def grow(steps: range, config: RunConfig, growth: BatchGrowth) -> tuple[RunConfig, dict[int, str]]:
    """Take steps, and return the config and the record of a checkpoint after each."""
    records = {}
    for step in steps:
        assert isinstance(growth.meter, FakeMeter)
        growth.meter.read(step)
        config = growth.find_growth(config, step) or config
        records[step] = json.dumps(growth.build_record(config))
    return config, records


def test_the_batch_doubles_once_twice_its_size_is_at_most_the_share_of_the_noise() -> None:
    steps = range(1, 2 * len(SERIES) + 1)
    final, records = grow(steps, CONFIG, BatchGrowth(FakeMeter(2, ParallelLayout(shard=1), 0)))
    # Measurement n is that of step 2n. 16 tokens double at a noise scale of 64, 32 at 128, 64 at
    # 256, 128 never.
    wanted: list[int] = []
    size, last = 16, 0
    for number, noise in enumerate(SERIES, 1):
        if size < 128 and number - last >= 3 and 0.5 * noise >= 2 * size:
            wanted, size, last = [*wanted, 2 * number], 2 * size, number
    assert isinstance(final.batch.ramp, NoiseRampConfig)
    assert final.batch.ramp.doubled_after_steps == tuple(wanted)
    assert len(wanted) == 3
    assert [
        final.batch.get_step_tokens(step) for step in (0, wanted[0] - 1, wanted[0], wanted[2])
    ] == [16, 16, 32, 128]
    for step in steps[:-1]:  # a run that continues from any checkpoint
        record = json.loads(records[step])
        meter = FakeMeter(2, ParallelLayout(shard=1), 0)
        again, later = grow(
            range(step + 1, steps[-1] + 1),
            set_recorded_changes(CONFIG, record),
            BatchGrowth(meter, record),
        )
        assert again == final
        assert later == {key: value for key, value in records.items() if key > step}


def test_given_doublings_are_followed_and_neither_measured_nor_recorded() -> None:
    given = {"kind": "noise_scale", "start_tokens": 16, "doubled_after_steps": [4, 9]}
    config = RunConfig.model_validate(
        {"batch": {"sequence_length": 8, "sequences": 16, "ramp": given}}
    )
    assert set_recorded_changes(config, {"batch_growth": {"doubled_after_steps": [1]}}) is config
    assert [config.batch.get_step_tokens(step) for step in (0, 4, 9)] == [16, 32, 64]
    assert BatchGrowth().build_record(config) == {}
    assert RunPlan(config.batch, 2, 1).get_step_plan(9) == (
        28,
        RunPlan(config.batch, 2, 1)._plans[8],
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train": {"noise_scale_every_steps": 0}},
            "0 measures no noise scale, by which .* Set it to 10, or give",
        ),
        (
            {"ramp": {"doubled_after_steps": [3]}},
            r"\[3\] are the doublings of another run, .*=2 measures for new ones",
        ),
        (
            {"ramp": {"start_tokens": 24}},
            "24 does not become the 128 tokens of a full step .* Use 64, 32, 16 or 8",
        ),
        ({"ramp": {"doubled_after_steps": [3, 3]}}, r"\[3, 3\] are not ascending numbers of steps"),
        (
            {"ramp": {"doubled_after_steps": [1, 2, 3, 4]}},
            "4 doublings of 16 exceed the 128 tokens of a full step",
        ),
        (
            {"engine": {"kind": "deepspeed"}},
            "deepspeed reduces over ranks only after the last micro-batch",
        ),
        (
            {"train": {"reproducibility": "bitwise"} | NOISE, "batch": {"assignment": "balanced"}},
            "measures its first",
        ),
    ],
)
def test_what_cannot_be_measured_or_does_not_fit_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    batch = CONFIG.batch.model_dump() | settings.get("batch", {})
    batch["ramp"] = batch["ramp"] | settings.get("ramp", {})
    sections = {"batch": batch, "train": NOISE} | {
        k: v for k, v in settings.items() if k not in ("ramp", "batch")
    }
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(sections)


def test_ranks_that_cannot_share_the_first_steps_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"begins with steps of 2 sequences, which 4 data ranks .* at least 32"
    ):
        RunPlan(CONFIG.batch, 4, 0)


def write_events(config: RunConfig, *events: dict[str, Any]) -> None:
    config.run.folder.mkdir(parents=True, exist_ok=True)
    example_run.write_events(
        config.run.folder / "events.jsonl", ({"time": 0} | event for event in events)
    )


def test_doublings_that_a_resume_or_a_rewind_took_back_are_not_those_of_the_run(
    tmp_path: Path,
) -> None:
    config = CONFIG.model_copy(
        update={"run": CONFIG.run.model_copy(update={"folder": tmp_path / "run"})}
    )
    assert load_recorded_changes(config) is config
    first, second = ({"event": "batch_growth", "step": 4, "doubled_after_steps": [4]},
                     {"event": "batch_growth", "step": 8, "doubled_after_steps": [4,
                         8]})  # fmt: skip
    ends: dict[tuple[int, ...], list[dict[str, Any]]] = {
        (4,): [{"event": "start", "resumed_from": 6}],
        (): [{"event": "rewind", "step": 9, "resumed_from": 2}],
        # The checkpoint of a step is written after the doubling at its end.
        (4, 8): [{"event": "rewind", "step": 9, "resumed_from": 8}],
    }
    for wanted, end in [((4, 8), list[dict[str, Any]]()), *ends.items()]:
        write_events(config, {"event": "start", "resumed_from": None}, first, second, *end)
        ramp = load_recorded_changes(config).batch.ramp
        assert isinstance(ramp, NoiseRampConfig)
        assert ramp.doubled_after_steps == wanted


def test_a_rewind_goes_back_to_the_averages_and_doublings_of_its_checkpoint() -> None:
    growth = BatchGrowth(FakeMeter(2, ParallelLayout(shard=1), 0))
    config, records = grow(range(1, 17), CONFIG, growth)
    record = json.loads(records[8]) | {"steps": 8}
    configs: list[RunConfig] = []
    rewound: list[int] = []
    trainer = SimpleNamespace(
        config=config,
        tokens_done=0,
        engine=None,
        checkpointing=SimpleNamespace(rewind=lambda *_: record),
        control=SimpleNamespace(batch_growth=growth, step_guard=None),
        observability=SimpleNamespace(
            metric_logger=SimpleNamespace(log_event=lambda *_, **__: None),
            rewind_records=rewound.append,
        ),
        _set_config=configs.append,
    )
    Trainer._rewind_to_checkpoint(
        cast(Any, trainer), 17, cast(Any, SimpleNamespace(advance=lambda _: None))
    )
    assert (trainer.steps_done, configs) == (8, [set_recorded_changes(CONFIG, record)])
    assert rewound == [8]
    assert growth.build_record(configs[0]) == json.loads(records[8])


def build_run(folder: Path, name: str) -> RunConfig:
    ramp = {
        "kind": "noise_scale",
        "start_tokens": 4 * LENGTH,
        "max_share": 4.0,
        "min_measurements": 3,
    }
    (folder / name).mkdir()
    return build_toy_config(
        folder / name,
        data={"folder": folder / "data"},
        batch={"micro_sequences": 1, "ramp": ramp, "sequences": 16},
        train={"noise_scale_every_steps": 1, "hang_timeout_seconds": 600},
    )


def read_steps(config: RunConfig) -> list[list[Any]]:
    """Return what may not depend on kills and ranks, of every step, doubling and save."""
    names = (
        "event",
        "step",
        "batch_tokens",
        "tokens",
        "loss",
        "batch_digest",
        "noise_scale_tokens",
        "state_hash",
    )
    kinds = ("step", "batch_growth", "state_hash")
    events = read_latest_events(config.run.folder / "events.jsonl")
    found = [[event.get(name) for name in names] for event in events if event["event"] in kinds]
    return sorted(found, key=lambda row: (row[1], row[0]))


@pytest.mark.distributed
def test_a_run_killed_after_its_batch_doubled_ends_in_the_same_bits_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    write_toy_dataset(tmp_path / "data")
    calm, killed = build_run(tmp_path, "calm"), build_run(tmp_path, "killed")
    train_run(calm, lambda *_: [])
    wanted = read_steps(calm)
    doubled = [row[1] for row in wanted if row[0] == "batch_growth"]
    assert len(doubled) >= 2
    # Its newest checkpoint is the one after the first doubling, or one step later.
    assert run_attempt(killed, 2, Fault("between backward and step", doubled[0] + 3))[0]
    assert run_attempt(killed, 1) == [0]
    assert read_steps(killed) == wanted
    record = read_run(killed.run.folder)
    assert (
        record.get_start_value("steps")
        == load_recorded_changes(killed).num_steps
        == max(row[1] for row in wanted)
    )

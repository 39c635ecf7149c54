"""TensorBoard through accelerate gets the numbers that events.jsonl gets; a package that is
missing is named.
"""

from pathlib import Path

import pytest

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.events import EventWriter, read_events
from llmsys.train import metric_logger
from llmsys.train.metric_logger import MetricLogger, Trackers


def load_config_with(folder: Path, **settings: bool) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"name": "toy", "folder": str(folder)}, "tracking": settings}
    )


def test_tensorboard_gets_the_numbers_of_the_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an optional package")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(load_config_with(tmp_path, tensorboard=True))
    with EventWriter(tmp_path / "events.jsonl") as events:
        record = MetricLogger(events, trackers)
        for step in (1, 2):
            record.log_event(
                "step",
                step,
                loss=3.0 / step,
                note="text stays in the events",
                layers={"blocks.0": 2},
            )
    trackers.finish()
    board = EventAccumulator(str(tmp_path / "tensorboard" / "toy")).Reload()
    assert [(point.step, point.value) for point in board.Scalars("step/loss")] == [
        (1, 3.0),
        (2, 1.5),
    ]
    assert [point.value for point in board.Scalars("step/layers/blocks.0")] == [2.0, 2.0]
    assert [event["loss"] for event in read_events(tmp_path / "events.jsonl")] == [3.0, 1.5]


def test_mlflow_gets_the_numbers_of_the_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an optional package")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trackers = Trackers(load_config_with(tmp_path, mlflow=True))
    for step in (1, 2):
        trackers.log_step(step, {"step/loss": 3.0 / step})
    trackers.finish()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("llmsys").experiment_id])
    assert run.info.run_name == "toy"
    assert [point.value for point in client.get_metric_history(run.info.run_id, "step/loss")] == [
        3.0,
        1.5,
    ]


def test_nothing_is_tracked_unless_asked(tmp_path: Path) -> None:
    Trackers(load_config_with(tmp_path)).log_step(1, {"step/loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tracking\.wandb=true needs the package wandb.*pip install wandb"
    ):
        Trackers(load_config_with(tmp_path, wandb=True))


def test_a_service_that_does_not_start_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Service:
        name = "wandb"

        def start(self) -> None:
            raise RuntimeError("No API key configured")

    monkeypatch.setattr(metric_logger, "_load_tracker_class", lambda *_: lambda *_, **__: Service())
    with pytest.raises(
        ConfigError, match=r"tracking\.wandb=true, but .* No API key .* set tracking\.wandb=false"
    ):
        Trackers(load_config_with(tmp_path, wandb=True))


def test_settings_become_flat_texts_and_numbers() -> None:
    settings = {
        "model": {"hidden_size": 8, "moe": {"num_experts": 4}},
        "prompts": ["a", "b"],
        "none": None,
    }
    assert metric_logger._flatten_settings(settings) == {
        "model.hidden_size": 8,
        "model.moe.num_experts": 4,
        "prompts": "['a', 'b']",
        "none": "None",
    }

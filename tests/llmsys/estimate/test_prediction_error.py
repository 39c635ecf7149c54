"""Predicted against measured: what is missing is named, and a profile that has learnt from runs
predicts them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.loading.load import load_run_config
from llmsys.errors import ConfigError, DataError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.prediction_error import (
    RESERVED,
    RESIDENT,
    load_profile_to_update,
    load_run_comparison,
    load_run_comparisons,
    update_profile,
)
from llmsys.estimate.program_profile import load_program_profile
from llmsys.estimate.residual_model import load_residuals
from llmsys.estimate.step_time import StepTime, estimate_step_time
from llmsys.events import EventWriter
from llmsys.launch.main import main
from tests.helpers.device_profile import NAME, build_abacus, write_abacus

DENSE, MOE = (
    ("layout.expert=1", "model.moe=null", "model.intermediate_size=704"),
    ("layout.expert=1",),
)


def timed(folder: Path, profile: Any) -> StepTime:
    config = load_run_config(str(folder / "config.yaml"))
    return estimate_step_time(config, config.resolve_layout(1), profile)


def write_run(
    folder: Path, times: float = 1.7, words: tuple[str, ...] = DENSE, **changes: Any
) -> Path:
    """A run on the made-up device whose steps took `times` what the model of time says."""
    folder.mkdir()
    config = load_run_config("train/demo", [f"run.name={folder.name}", *words])
    (folder / "config.yaml").write_text(format_recorded_config(config.model_dump(mode="json")))
    time = timed(folder, build_abacus())
    prediction = {
        "parameters": 1,
        "memory": {"peak_bytes": 2**30, "instant": "in the loss", "kind": "reserved"},
        "device": NAME,
        "world_size": 1,
        "step_seconds": time.seconds.model_dump(),
    }
    with EventWriter(folder / "events.jsonl") as events:
        events.write("prediction", step=0, **prediction | changes)
        measured = {
            "step_seconds": times * time.seconds.p50 / time.factor,
            "steps": 9,
            "peak_bytes": 3 * 2**29,
        }
        events.write("measured", step=9, **measured)
    return folder


def test_a_run_is_told_with_signed_residuals(tmp_path: Path) -> None:
    found = load_run_comparison(write_run(tmp_path / "a")).to_dict()
    assert found["memory_bytes"]["residual"] == 0.5
    time = found["step_seconds"]
    assert time["residual"] == pytest.approx(
        1.7 / load_program_profile("llmsys").fit["dense"].factor - 1
    )
    assert not time["within_p10_p90"]
    # 4 windows of 512 tokens; a slow step is few tokens.
    speed = found["tokens_per_second"]
    assert speed["measured"] == pytest.approx(4 * 512 / time["measured"])
    assert speed["predicted"]["p10"] == pytest.approx(4 * 512 / time["predicted"]["p90"])
    assert speed["residual"] == pytest.approx(1 / (1 + time["residual"]) - 1)
    assert load_run_comparison(write_run(tmp_path / "b", 1.0)).to_dict()["step_seconds"][
        "within_p10_p90"
    ]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            {"kind": RESIDENT, "process_bytes": 3 << 28},
            "both the resident set of the whole process on the fullest rank, in the steps before "
            "the first evaluation or save. Of the predicted bytes 768.0 MiB are the process as it",
        ),
        ({"kind": RESERVED, "process_bytes": 0}, "both what the allocator reserved on the fullest"),
    ],
    ids=["cpu", "accelerator"],
)
def test_it_is_said_what_both_memories_are_of(
    tmp_path: Path, memory: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"peak_bytes": 2**30, "instant": "in the loss", **memory}
    run = write_run(tmp_path / "a", memory=full)
    assert main(["reconcile", str(run)]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("words", [DENSE, MOE], ids=["dense", "moe"])
def test_the_profile_that_learnt_from_a_run_predicts_it(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    run, file = write_run(tmp_path / "a", 1.7, words), write_abacus(tmp_path / "mine.yaml")
    assert main(["reconcile", str(run), "--update", str(file)]) == 0
    after, measured = (
        timed(run, load_device_profile(str(file))),
        load_run_comparison(run).measured["step_seconds"],
    )
    assert after.seconds.p50 == pytest.approx(measured)
    assert after.factor == pytest.approx(1.7)
    assert sum(after.parts.values()) == pytest.approx(measured)
    before = timed(run, build_abacus()).seconds  # one run keeps the published spread
    assert after.seconds.p90 / after.seconds.p50 == pytest.approx(before.p90 / before.p50)
    other = write_run(tmp_path / "other", 1.0, MOE if words is DENSE else DENSE)
    assert (
        timed(other, load_device_profile(str(file))).factor == timed(other, build_abacus()).factor
    )  # another class has not learnt


def test_runs_add_up_and_the_same_run_counts_once(tmp_path: Path) -> None:
    file = write_abacus(tmp_path / "mine.yaml")
    runs = [
        write_run(tmp_path / name, times) for name, times in (("a", 1.4), ("b", 1.5), ("c", 1.6))
    ]
    for these in ([runs[0]], runs, [runs[1]]):
        assert main(["reconcile", *map(str, these), "--update", str(file)]) == 0
    learnt = load_device_profile(str(file)).residual["dense"]
    assert sorted(learnt.runs.values()) == pytest.approx([1.4, 1.5, 1.6])
    assert learnt.factor == pytest.approx(1.5)
    assert load_residuals().dense.spread / 3**0.5 < learnt.spread < load_residuals().dense.spread


def test_a_device_that_came_with_llmsys_is_copied_into_a_new_file(tmp_path: Path) -> None:
    name = load_device_profile("h200").name
    found, _ = load_run_comparisons([write_run(tmp_path / "a", device=name)])
    profile = update_profile(load_profile_to_update(tmp_path / "new.yaml", found), found)
    assert profile.name == name
    assert len(profile.residual["dense"].runs) == 1
    assert load_device_profile("h200").residual == {}


def test_no_device_learns_from_another(tmp_path: Path) -> None:
    file = write_abacus(tmp_path / "mine.yaml")
    for device, said in (("unknown", "an unknown device"), ("H100 SXM 80GB", "H100 SXM 80GB")):
        run = write_run(tmp_path / device.split()[0], device=device)
        with pytest.raises(
            ConfigError, match=f"was predicted for {said}, and .*mine.yaml describes {NAME}"
        ):
            load_profile_to_update(file, [load_run_comparison(run)])
    with pytest.raises(
        ConfigError,
        match=r"nowhere.yaml does not exist, and llmsys has no profile .* device, unknown. "
        r"Measure it",
    ):
        load_profile_to_update(
            tmp_path / "nowhere.yaml", [load_run_comparison(tmp_path / "unknown")]
        )


def test_runs_that_cannot_be_reconciled_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(
        tmp_path / "good", step_seconds=None, why_no_time="the device is unknown", device="unknown"
    )
    write_run(tmp_path / "foreign", memory={"peak_bytes": 1, "kind": "reserved"})
    for name, kind in (("old", "start"), ("killed", "prediction")):
        (tmp_path / name).mkdir()
        with EventWriter(tmp_path / name / "events.jsonl") as events:
            events.write(kind, step=0)
    with pytest.raises(DataError, match="old has no prediction"):
        load_run_comparison(tmp_path / "old")
    assert (
        main(
            [
                "reconcile",
                *(str(tmp_path / name) for name in ("good", "old", "killed", "foreign", "none")),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    for part in (
        "the device is unknown",
        "old has no prediction",
        "killed has no measurement",
        "foreign/events.jsonl: the prediction event has no memory.instant. Another version or "
        "program wrote it: train",
        "none/events.jsonl",
    ):
        assert part in said
    assert main(["reconcile", str(tmp_path / "old")]) == 2
    assert "has no prediction" in capsys.readouterr().err
    assert main(["reconcile", str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["step_seconds"]["predicted"] is None

"""Old names of config keys: an error that gives the new one, and records of old versions that
are read as they are.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.config.language import LanguageProfile, parse_language_rules, serialize_language_rules
from llmsys.config.loading.load import load_run_config
from llmsys.config.loading.yaml_files import list_config_names
from llmsys.config.migration import (
    RENAMED_KEYS,
    RENAMED_VALUES,
    find_new_key,
    to_current_keys,
    to_current_names,
    to_recorded_names,
)
from llmsys.config.run import RunConfig
from llmsys.config.scaling import ScalingLawConfig
from llmsys.config.section import SectionType, list_fields, list_section_types
from llmsys.data_pipeline.inspection.dataset_config import read_dataset_config
from llmsys.data_pipeline.inspection.threshold_sweep import sweep_threshold
from llmsys.dataset.manifest import Manifest
from llmsys.errors import CheckpointError, ConfigError, DataError
from llmsys.launch.main import main
from llmsys.train.initial_state import require_same_settings

# What version 094b5d9 made of three configs that name every renamed key: each as it was given, as
# the run folder and the manifest kept it, and as checkpoints and task keys did.
RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "old_config_names.json").read_text()
)
OLD_NAMES = [
    (section, old, new) for section, names in RENAMED_KEYS.items() for old, new in names.items()
]


def section_types(section: str) -> list[SectionType]:
    if section == "scale":
        return [ScalingLawConfig]
    members: list[SectionType] = [RunConfig]
    for key in (key for key in section.split(".") if key != "*"):
        members = [
            one
            for field in list_fields(members, key)
            for one in list_section_types(field.annotation)
        ]
    return members


@pytest.mark.parametrize(
    ("section", "old", "new"), [one for one in OLD_NAMES if one[0] != "bitwise"]
)
def test_the_table_names_keys_that_are_there_and_none_that_still_is(
    section: str, old: str, new: str
) -> None:
    members = section_types(section)
    assert list_fields(members, new)
    owners = [member for member in members if new in member.model_fields]
    assert not list_fields(owners, old)
    assert find_new_key((*section.split("."), old)) == f"{section}.{new}"


def select_recorded_keys(values: Any, recorded: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(recorded, dict):
        return values
    return {
        key: select_recorded_keys(value, recorded[key])
        for key, value in values.items()
        if key in recorded
    }


@pytest.mark.parametrize("name", RECORDED)
def test_an_old_config_is_read_to_the_same_settings_and_recorded_in_the_same_words(
    name: str,
) -> None:
    recorded = RECORDED[name]
    config = RunConfig.model_validate(to_current_names(recorded["given"]))
    values = to_recorded_names(config.model_dump(mode="json", exclude={"model"}))
    # The default of compile has changed since, and sections have keys that had no name then.
    expected = recorded["config"] | {"train": recorded["config"]["train"] | {"compile": "auto"}}
    assert select_recorded_keys(values, expected) == expected
    assert to_current_names(values) == config.model_dump(mode="json", exclude={"model"})
    trajectory = {key: value for key, value in config.trajectory_settings.items() if key != "model"}
    assert json.loads(json.dumps(trajectory)) == recorded["trajectory"]


def test_every_shipped_config_survives_both_ways() -> None:
    for name in list_config_names():
        if name.startswith("train/"):
            values = load_run_config(name).model_dump(mode="json")
            assert to_current_names(to_recorded_names(values)) == values


def test_rules_in_task_keys_keep_their_bytes() -> None:
    config = RunConfig.model_validate(to_current_names(RECORDED["crawl"]["given"]))
    rules = config.data.rules
    text = serialize_language_rules({"en": LanguageProfile(name="English")}, rules)
    assert text == RECORDED["crawl"]["rules"]
    assert parse_language_rules(text)["en"].rules == rules


@pytest.mark.parametrize("name", RECORDED)
def test_the_config_of_an_old_run_folder_loads(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run" / "config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(RECORDED[name]["given"]))
    with pytest.raises(ConfigError, match="was renamed to"):  # a file of a person's, by any name
        load_run_config(str(file))
    (file.parent / "events.jsonl").touch()
    config = load_run_config(str(file), ["run.name=later"])
    assert config.model_copy(update={"run": RunConfig().run}) == RunConfig.model_validate(
        to_current_names(RECORDED[name]["given"])
    )
    above = tmp_path / "above.yaml"
    above.write_text(f"base: {file}\n")
    assert load_run_config(str(above)).trajectory_settings == config.trajectory_settings


def test_old_names_are_answered_with_the_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base: train/demo\ntrain:\n  products: fp8\n  recompute: block\n  spike_detection: "
        "{window: 9}\nbatch:\n  ramp: {start_tokens: 8, over_tokens: 9}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run_config(
            str(file),
            ["schedule.kind=original", "batch.assignment=in_order", "data.rules.0.words=[a]"],
        )
    assert sorted(str(caught.value).splitlines()[1:]) == sorted(
        [
            "  command line: data.rules.0.words: was renamed to data.rules.0.word_lists.",
            "  command line: batch.assignment: in_order was renamed to sequential.",
            f"  {file}:7: batch.ramp.over_tokens: was renamed to batch.ramp.ramp_tokens.",
            "  command line: schedule.kind: original was renamed to noam.",
            f"  {file}:3: train.products: was renamed to train.matmul_dtype.",
            f"  {file}:4: train.recompute: was renamed to train.activation_checkpoint, and block "
            "to full.",
            f"  {file}:5: train.spike_detection.window: was renamed to "
            "train.spike_detection.window_steps.",
        ]
    )


def test_old_keys_of_scale_and_of_language_profiles_are_answered_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "budget=1e21", "served_tokens=1e9"]) == 2
    assert "served_tokens: was renamed to serve_tokens." in capsys.readouterr().err
    with pytest.raises(
        ValueError, match=r"perplexity\.head_below was renamed to head_max_perplexity"
    ):
        LanguageProfile(name="x", rules={"perplexity": {"model": "m", "head_below": 3}})


def test_paths_with_old_sections_and_old_values_are_found() -> None:
    assert to_current_keys(("train", "spike", "window")) == (
        "train",
        "spike_detection",
        "window_steps",
    )
    assert find_new_key(("train", "tokens")) is None
    for key, values in RENAMED_VALUES.items():
        section, _, name = key.rpartition(".")
        for old, new in values.items():
            assert to_recorded_names({name: new}, section) != {name: new}
            assert to_current_names({name: old}, section) == {name: new}


def manifest_of(name: str) -> Manifest:
    config = {key: RECORDED[name]["config"][key] for key in ("data", "tokenizer")}
    return Manifest.model_construct(config=config)  # type: ignore[call-arg]


def test_the_manifest_of_an_old_dataset_is_read() -> None:
    config = RunConfig.model_validate(to_current_names(RECORDED["crawl"]["given"]))
    assert read_dataset_config(manifest_of("crawl"), config.data) == config.data  # type: ignore[arg-type]


def test_a_sweep_asks_the_rules_of_an_old_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmsys.data_pipeline.inspection.threshold_sweep.load_manifest",
        lambda folder: manifest_of("crawl"),
    )
    with pytest.raises(
        DataError,
        match=r"without the rule c4\. Its rules: bad_words, perplexity; and language\.min",
    ):
        sweep_threshold(tmp_path, "c4.min_sentences=3")


def test_settings_of_a_checkpoint_are_named_as_they_are_now() -> None:
    saved = RECORDED["crawl"]["trajectory"]
    now = saved | {"schedule": saved["schedule"] | {"final_fraction": 0.5}}
    with pytest.raises(CheckpointError, match=r"schedule\.min_lr_factor was 0\.2, now 0\.5"):
        require_same_settings(Path("step"), saved, now)

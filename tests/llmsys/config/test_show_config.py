"""What a person sees of a config: the resolved text, what differs, the editor's schema, the
README's examples.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmsys.config.loading.format_yaml import find_differences, format_annotated_yaml, format_yaml
from llmsys.config.loading.json_schema import build_json_schema
from llmsys.config.loading.load import load_run_config, read_config
from llmsys.config.run import RunConfig
from llmsys.launch.main import main
from tests.helpers.paths import CONFIGS

# those are no runs
OVERRIDES = [
    "schedule.kind=linear",
    "run.name='3e-4'",
    "generation.prompts=['a: b', 'no']",
    "model.norm.eps=1e-6",
]


@pytest.mark.parametrize("overrides", [[], OVERRIDES])
def test_what_is_shown_loads_back_to_the_same_config(tmp_path: Path, overrides: list[str]) -> None:
    resolved = read_config("train/demo", overrides)
    for name, text in (
        ("a", format_yaml(resolved.run)),
        ("b", format_annotated_yaml(resolved.run, resolved.origins)),
    ):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        assert load_run_config(str(path)) == resolved.run


def test_the_defaults_differ_in_nothing() -> None:
    assert find_differences(RunConfig(), {}) == []
    assert "#" not in format_annotated_yaml(RunConfig(), {})


def test_a_difference_names_the_default_and_where_it_was_changed() -> None:
    resolved = read_config(
        "train/demo",
        ["schedule.kind=linear", "batch.sequence_length=256", "train.log_every_steps=10"],
    )
    changed = {one.key: one for one in find_differences(resolved.run, resolved.origins)}
    assert changed["batch.sequence_length"][1:] == (256, 512, "from command line")
    assert changed["schedule.kind"][1:] == ("linear", "cosine", "from command line")
    assert changed["run.name"].origin.startswith("from ")
    assert "configs/train/demo.yaml:" in changed["run.name"].origin
    assert "train.log_every_steps" not in changed
    text = format_annotated_yaml(resolved.run, resolved.origins)
    assert "  sequence_length: 256  # default 512; from command line\n" in text


def every_object(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in schema["$defs"].values() if one.get("type") == "object"] + [schema]


def test_the_schema_describes_every_field() -> None:
    for section in every_object(build_json_schema()):
        for name, field in section["properties"].items():
            described = field.get("description") or name == "kind" or "$ref" in field
            assert described, f"{section['title']}.{name} has no description"


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": {"learning_rat": 1}},
        {"schedule": {"kind": "cosin"}},
        {"batch": {"sequence_length": "long"}},
        {"train": {"precision": "fp8"}},
        {"nothing": {}},
        {"engine": {"kind": "torch", "zero_stage": 2}},
    ],
    ids=str,
)
def test_the_schema_refuses_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, build_json_schema())


def test_the_schema_accepts_bases_and_underscores_anywhere() -> None:
    model = {"base": ["a", "b"], "moe": {"base": "c", "num_experts": "1_000"}}
    jsonschema.validate(
        {"base": "x", "model": model, "train": {"tokens": "1_000"}}, build_json_schema()
    )


def test_the_schema_accepts_a_choice_that_leaves_its_kind_to_the_default() -> None:
    jsonschema.validate(
        {"schedule": {"warmup_tokens": 10}, "model": {"norm": {"eps": 1e-6}}}, build_json_schema()
    )


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (CONFIGS / "README.md").read_text(), flags=re.DOTALL
    )


def test_the_examples_of_the_readme_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks("yaml"):
        name = text.split("\n", 1)[0].removeprefix("# ")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = [
        line.removeprefix("$ llmsys ") for block in blocks("console") for line in block.splitlines()
    ]
    assert len(commands) > 6
    for command in commands:
        assert main(shlex.split(command)) == 0, command
    capsys.readouterr()
    assert main(["show", "train/wrong"]) == 2
    assert capsys.readouterr().err == blocks("text")[0]


def test_show_prints_the_config_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "train/demo", "--json", "run.seed=7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert RunConfig.model_validate(shown["config"]) == load_run_config(
        "train/demo", ["run.seed=7"]
    )
    assert shown["differences"]["run.seed"] == {
        "value": 7,
        "default": 0,
        "origin": "from command line",
    }

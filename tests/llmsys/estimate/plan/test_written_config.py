"""The config that a plan writes is the user's, but for the keys that the plan chose."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo

from llmsys.config.batch import BatchConfig
from llmsys.config.engine import DeepSpeedEngineConfig, TorchEngineConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.section import Section
from llmsys.config.train import TrainConfig
from llmsys.errors import LlmsysError
from llmsys.launch.main import main
from tests.helpers.layout_search import limit_search

CHOSEN = {
    "engine": {"kind", "data_parallel", "cpu_offload", "gradient_accumulation", "zero_stage"},
    "batch": {"micro_sequences"},
    "train": {"activation_checkpoint"},
}
SECTIONS: list[tuple[str, type[Section]]] = [
    ("engine", TorchEngineConfig),
    ("engine", DeepSpeedEngineConfig),
    ("batch", BatchConfig),
    ("train", TrainConfig),
]
# Keys whose other values need further keys, or files that this test has not: none is the plan's.
NEED_MORE = {
    "batch.ramp", "batch.length_ramp", "batch.tokens", "train.branch_from", "train.matmul_dtype",
    "train.expert_matmul_dtype",
}  # fmt: skip
BASE = {
    "model": {"base": "model/llama3.2-1b"},
    "batch": {"sequence_length": 4096, "sequences": 64},
    "engine": {"kind": "torch"},
    "train": {"tokens": 1_000_000_000},
}


def list_other_values(field: FieldInfo) -> list[Any]:
    """Return values of a key that are not its default, simple ones only."""
    kind, default = field.annotation, field.default
    options = [kind, *get_args(kind)]
    values: list[Any] = []
    for one in options:
        if get_origin(one) is Literal:
            values += [value for value in get_args(one) if value != default]
        elif one is bool:
            values.append(not default)
        elif one is int:
            base = default if isinstance(default, int) and default else 0
            values += [1024, 64, base + 1, 2 * base + 2]
        elif one is float:
            values += [0.5, 0.25, 2.0]
        elif one is str:
            values.append("mine")
    return [value for value in values if value != default]


def iter_keys() -> Iterator[tuple[str, str, str]]:
    for section, kind in SECTIONS:
        for name in kind.model_fields:
            if name not in CHOSEN[section] and f"{section}.{name}" not in NEED_MORE:
                yield section, kind.__name__, name


def write_user_config(path: Path, section: str, kind: str, name: str) -> Any:
    """Write a config with another value of one key, and return the value; None where the key has
    no simple other value.
    """
    field = dict(SECTIONS_BY_NAME)[kind].model_fields[name]
    for value in list_other_values(field):
        values: dict[str, Any] = json.loads(json.dumps(BASE))
        if kind == "DeepSpeedEngineConfig":
            values["engine"] = {"kind": "deepspeed"}
        values.setdefault(section, {})[name] = value
        path.write_text(yaml.safe_dump(values))
        try:
            load_run_config(str(path))
        except LlmsysError:
            continue
        return value
    return None


SECTIONS_BY_NAME = [(kind.__name__, kind) for _, kind in SECTIONS]


@pytest.fixture
def _few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search one layout: which one is chosen is another test's subject."""
    limit_search(monkeypatch, most=2)


@pytest.mark.usefixtures("_few_layouts")
def test_no_key_of_the_users_config_is_dropped(tmp_path: Path, capsys) -> None:
    mine, chosen = tmp_path / "mine.yaml", tmp_path / "chosen.yaml"
    kept, refused = [], []
    for section, kind, name in iter_keys():
        value = write_user_config(mine, section, kind, name)
        if value is None:
            continue
        words = ["plan", str(mine), "gpus=8", "device=h100-sxm", "--output", str(chosen)]
        if main(words) != 0:
            refused.append((name, capsys.readouterr().err))
            continue
        before, after = load_run_config(str(mine)), load_run_config(str(chosen))
        assert getattr(getattr(after, section), name) == value, f"{section}.{name}"
        for part, chosen_keys in CHOSEN.items():
            old, new = getattr(before, part).model_dump(), getattr(after, part).model_dump()
            assert {key: old[key] for key in old if key not in chosen_keys} == {
                key: new[key] for key in new if key not in chosen_keys
            }, f"{section}.{name} changes {part}"
        for part in type(before).model_fields.keys() - {*CHOSEN, "layout", "run"}:
            assert getattr(after, part) == getattr(before, part), f"{section}.{name}: {part}"
        kept.append(f"{section}.{name}")
    assert not refused
    assert len(kept) >= 20, kept
    assert {"engine.reshard", "engine.reduce_dtype", "train.compile"} <= set(kept)


@pytest.mark.usefixtures("_few_layouts")
@pytest.mark.parametrize("policy", ["sharded", "whole"])
def test_a_policy_of_accumulation_that_somebody_wrote_is_kept(
    policy: str, tmp_path: Path, capsys
) -> None:
    mine, chosen = tmp_path / "mine.yaml", tmp_path / "chosen.yaml"
    mine.write_text(yaml.safe_dump(BASE | {"engine": {"gradient_accumulation": policy}}))
    words = ["plan", str(mine), "gpus=8", "device=h100-sxm", "--output", str(chosen), "--json"]
    assert main(words) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {one["engine"]["gradient_accumulation"] for one in best} == {policy}
    engine = load_run_config(str(chosen)).engine
    assert isinstance(engine, TorchEngineConfig)
    assert engine.gradient_accumulation == policy

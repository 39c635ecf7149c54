"""`llmsys list` names what can be written in a config or on the command line."""

import json

import pytest

from llmsys.config.loading.load import read_config
from llmsys.config.quality_rules import RULE_KINDS
from llmsys.estimate.device_profile import load_device_profile
from llmsys.launch.main import main


def test_every_name_is_one_that_a_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["configs", "models", "devices", "rules"]
    assert all(about for entries in found.values() for about in entries.values())
    assert tuple(found["rules"]) == RULE_KINDS
    assert all(load_device_profile(name) for name in found["devices"])
    assert "train/demo" in found["configs"]
    assert "model/llama-7b" in found["models"]
    assert read_config("model/llama-7b").is_model_only
    assert not read_config("data/sample").is_model_only


def test_one_sort_is_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("h100-sxm ")] == [
        "h100-sxm            H100 SXM 80GB: 79 GiB, 989.4 TFLOP/s in bf16"
    ]

"""Published layouts are judged legal and priced; searches for what a plan would choose are left to the bench."""

import json

import pytest

from launch.main import main
from tests.helpers.paths import ROOT
from tools.bench.published_layouts import LAYOUTS, PublishedLayout, format_judged_row

# One published step in five is outside of P10 to P90: these two are 16 % and 19 % slower than P50.
OUTSIDE = {"MT-NLG 530B, 2,240 A100", "MT-NLG 530B, 3,360 A100"}


@pytest.fixture(autouse=True)
def _run_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_a_published_layout_is_legal_and_priced(row: PublishedLayout, capsys) -> None:
    words = [word for word in row.arguments if word != "--compare"]
    assert main([*words, "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["legal"], found["problems"]) == (True, [])
    assert found["devices"] == int(next(word for word in words if word.startswith("gpus=")).removeprefix("gpus="))
    step = found["step_seconds"]
    if row.measured is not None:
        assert (step["p10"] < row.measured < step["p90"]) is (row.name not in OUTSIDE)
        assert 0.8 < step["p50"] / row.measured < 1.25
    line = format_judged_row(row, found | {"own": "another one", "cpu_seconds": 1.0})
    assert f"| `{row.layout}` | legal | " in line
    assert f"{step['p50']:.3g} (" in line


def test_a_layout_of_other_devices_is_illegal(capsys) -> None:
    words = LAYOUTS[0].arguments[:-3]
    assert main([*words, "--check", "tp=8,pp=16,dp=32"]) == 2
    assert capsys.readouterr().out.startswith("illegal: ")

"""Published layouts are judged legal and priced; searches for what a plan would choose are left
to the bench.
"""

import json

import pytest

from llmsys.launch.main import main
from tests.helpers.paths import ROOT
from tools.bench.published_layouts import LAYOUTS, PublishedLayout, format_judged_row

# One published step in five is outside of P10 to P90: this one is a quarter slower than P50.
OUTSIDE = {"MT-NLG 530B, 3,360 A100"}


@pytest.fixture(autouse=True)
def _run_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_a_published_layout_is_legal_and_priced(row: PublishedLayout, capsys) -> None:
    words = [word for word in row.arguments if word != "--compare"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["legal"], found["fits"], found["problems"]) == (True, True, [])
    assert found["devices"] == int(
        next(word for word in words if word.startswith("gpus=")).removeprefix("gpus=")
    )
    step = found["step_seconds"]
    if row.measured is not None:
        assert (step["p10"] < row.measured < step["p90"]) is (row.name not in OUTSIDE)
        assert 0.75 < step["p50"] / row.measured < 1.25
    line = format_judged_row(row, found | {"own": "another one", "cpu_seconds": 1.0})
    assert f"| `{row.layout}` | legal | " in line
    assert f"{step['p50']:.3g} (" in line


def test_what_no_source_gives_is_printed_with_the_memory_without_it(capsys) -> None:
    assert main([word for word in LAYOUTS[2].arguments if word != "--compare"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if "assumed: " in line)
    assert first.strip().startswith(
        "assumed: memory.stages=short_ends, because the cut is not published"
    )
    assert second.strip().startswith("assumed: memory.expert_weights=inputs, because DeepEP sends")
    # 8 x 7,168 values of 2 bytes a token, for 9 and 8 micro-batches of 4,096 tokens in 4 layers,
    # and 12 % on top. One block's are there in any case.
    outputs = 1.12 * (17 * 4 - 1) * 4096 * 8 * 7168 * 2 / 2**30
    assert float(second.rsplit(" ", 2)[1]) == pytest.approx(78.6 + outputs, abs=0.1)


def test_a_layout_of_other_devices_is_illegal(capsys) -> None:
    words = LAYOUTS[0].arguments[:-3]
    assert main([*words, "--check", "tp=8,pp=16,dp=32"]) == 2
    assert capsys.readouterr().out.startswith("illegal: ")

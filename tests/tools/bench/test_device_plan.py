"""The plan of thirty minutes: every row is a legal run, rows are kept and never run twice."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from llmsys.config.loading.load import read_config
from llmsys.doctor.step_check import NARROW_DENSE
from tools.bench import device_plan
from tools.bench.device_plan import ROWS, STEP, PlanRow, describe_group, main, run_plan, run_row

ADD = (
    "import sys; open(sys.argv[1], 'a').write('x'); print('{\"step_ms\": 2.0, \"losses\": [1.0]}')"
)


def plant(folder: Path, name: str, code: str = ADD, limit: int = 60) -> PlanRow:
    return PlanRow("planted", name, "nothing", ("-c", code, str(folder / "runs.txt")), limit)


def test_the_words_of_every_step_are_a_legal_run() -> None:
    keys = [row.key for row in ROWS]
    assert len(set(keys)) == len(keys)
    steps = [row for row in ROWS if row.arguments[: len(STEP)] == STEP]
    assert len(steps) > 10
    for row in steps:
        config, *words = row.arguments[len(STEP) :]
        run = read_config(config, [word for word in words if "=" in word]).run
        assert run.batch.sequences_per_step % int(run.batch.micro_sequences) == 0, row.key


def test_a_step_is_measured_on_the_device_of_this_machine(tmp_path: Path) -> None:
    words = ("model/llama3.2-1b", *NARROW_DENSE, "batch.sequences=2", "train.precision=fp32")
    line = run_row(PlanRow("tiny", "fsdp", "", (*STEP, *words, "--steps", "1")), tmp_path)
    assert line["status"] == "done", line
    assert line["found"]["step_ms"] > 0
    assert len(line["found"]["losses"]) == 3


def test_rows_are_kept_and_the_same_command_goes_on(tmp_path: Path) -> None:
    rows = [
        plant(tmp_path, "first"),
        plant(tmp_path, "broken", "raise SystemExit('no such kernel')"),
        plant(tmp_path, "slow", "import time; time.sleep(60)", limit=1),
        plant(tmp_path, "last"),
    ]
    assert run_plan(rows, tmp_path, 0) == [row.key for row in rows]
    assert run_plan(rows[:2], tmp_path, 10) == []
    assert run_plan(rows, tmp_path, 10) == []
    assert (tmp_path / "runs.txt").read_text() == "xx"
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(line["name"], line["status"]) for line in lines] == [
        ("first", "done"),
        ("broken", "failed"),
        ("slow", "over its limit"),
        ("last", "done"),
    ]
    assert lines[1]["found"]["lines"] == ["no such kernel"]
    assert lines[2]["found"]["lines"] == ["ended after 1 s"]


def test_a_group_is_compared_with_its_first_row() -> None:
    def build_line(name: str, **found: object) -> dict[str, object]:
        status = "failed" if "lines" in found else "done"
        return {"key": f"g: {name}", "name": name, "status": status, "seconds": 3, "found": found}

    lines = [
        build_line("fsdp", step_ms=200.0, mfu=0.483, losses=[2.0, 1.0]),
        build_line("plain", step_ms=150.0, mfu=0.561, losses=[2.0, 1.0]),
        build_line("ddp", step_ms=180.0, losses=[2.0, 1.5]),
        build_line("other", lines=["first", "out of memory"]),
        build_line("doctor"),
    ]
    assert describe_group(lines) == [
        "g: fsdp: 200.0 ms, 48.3% MFU",
        "g: plain: 150.0 ms, 56.1% MFU, 0.75 times fsdp, equal losses",
        "g: ddp: 180.0 ms, 0.90 times fsdp, other losses",
        "g: other: failed: out of memory",
        "g: doctor: done in 3 s",
    ]
    # Nothing is compared with a row that failed.
    assert describe_group([lines[3], lines[1]])[1] == "g: plain: 150.0 ms, 56.1% MFU"


def test_a_machine_without_an_accelerator_is_told_what_it_can_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(device_plan, "describe_machine", lambda: {"device": "cpu"}):
        assert main(["--output", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "torch sees no accelerator" in told
    assert "tools.bench.host_time" in told
    assert not (tmp_path / "out").exists()


def test_rows_can_be_listed_and_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "8B slice: "]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "8B slice: fsdp: whether one rank needs a wrapper",
        "8B slice: plain: whether one rank needs a wrapper",
    ]

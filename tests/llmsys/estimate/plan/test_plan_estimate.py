"""A plan and an estimate of the file that it writes agree: bytes of the peak, and seconds of a
step.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.launch.main import main

RUNS = {
    "dense": ["model/llama3.2-1b", "batch.sequence_length=4096", "batch.sequences=32"],
    "experts": [
        "model/olmoe-1b-7b",
        "batch.sequence_length=4096",
        "batch.sequences=32",
        "engine.kind=torch",
    ],
    "a config": ["train/llama-1b-1xh200", "train.compile=none"],
}
CLUSTER = "device: h100-sxm\ndevices: 4\nexpert_load: 1.5\n"


def print_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_the_written_layout_is_estimated_as_it_was_planned(words, tmp_path: Path, capsys) -> None:
    costs, chosen = tmp_path / "cluster.yaml", tmp_path / "chosen.yaml"
    costs.write_text(CLUSTER)
    best = print_json(["plan", *words, f"cluster={costs}", "--output", str(chosen)], capsys)[
        "best"
    ][0]
    found = print_json(["estimate", str(chosen), "--cluster", str(costs), "--gpus", "4"], capsys)
    assert found["memory"]["peak_bytes"] == best["peak_bytes"]
    assert found["memory"]["layout"] == best["layout"]
    assert found["time"]["step_seconds"] == best["step_seconds"]
    assert found["time"]["ranks"] == found["memory"]["ranks"] == 4


def test_the_fullest_rank_of_experts_takes_more_memory_and_time(tmp_path: Path, capsys) -> None:
    costs, found = tmp_path / "cluster.yaml", []
    layout = ["layout.expert=4", "layout.shard=4", "batch.micro_sequences=1"]
    for load in (1, 1.5):
        costs.write_text(f"device: h100-sxm\ndevices: 4\nexpert_load: {load}\n")
        words = ["estimate", *RUNS["experts"], *layout, "--cluster", str(costs), "--gpus", "4"]
        found.append(print_json(words, capsys))
    even, uneven = found
    # OLMoE saves 8 visits of 2,048 channels sorted, and inside of experts 1,024 channels several
    # times.
    visits = 4096 * 8 * 2 * (2048 * 2 + 1024 * 2)
    more = uneven["memory"]["peak_bytes"] - even["memory"]["peak_bytes"]
    assert more > 0.5 * 16 * visits
    parts = [one["time"]["parts_seconds"] for one in found]
    assert parts[1]["experts"] > 1.4 * parts[0]["experts"]
    assert parts[1]["attention"] == parts[0]["attention"]


def test_experts_that_every_rank_has_are_even(tmp_path: Path, capsys) -> None:
    costs, peaks = tmp_path / "cluster.yaml", []
    for load in (1, 1.5):
        costs.write_text(f"device: h100-sxm\ndevices: 4\nexpert_load: {load}\n")
        words = [
            "estimate",
            *RUNS["experts"],
            "layout.shard=4",
            "--cluster",
            str(costs),
            "--gpus",
            "4",
        ]
        found = print_json(words, capsys)
        peaks.append((found["memory"]["peak_bytes"], found["time"]["step_seconds"]["p50"]))
    assert peaks[0] == peaks[1]

"""The program that a command line is priced for: named, llmsys' own, or unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.launch.main import main

WORDS = (
    "estimate",
    "model/llama3.2-1b",
    "batch.sequence_length=2048",
    "batch.sequences=64",
    "--device",
    "h100-sxm",
)


def price(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main([*WORDS, "--gpus", "8", "--json", *words]) == 0
    found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_bare_model_that_nobody_names_a_program_for_is_priced_as_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unnamed, named = price(capsys), price(capsys, "--program", "unknown")
    assert unnamed == named
    assert unnamed["time"]["program"] == "unknown program"
    assert price(capsys, "--layout", "tp=2,dp=4")["time"]["program"] == "unknown program"
    own = price(capsys, "--program", "llmsys", "launch.processes=8")
    # settings that only llmsys has say that it trains
    assert price(capsys, "engine.data_parallel=fsdp")["time"]["program"] == "llmsys"
    assert price(capsys, "train.compile=none")["time"]["program"] == "llmsys"
    assert own["time"]["program"] == "llmsys, compiled blocks"
    assert unnamed["time"]["program_spread"] >= own["time"]["program_spread"]


def test_a_run_of_llmsys_keeps_its_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "train/demo", "--device", "h100-sxm", "--gpus", "2", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["time"]["program"] == "llmsys"


def test_the_program_and_the_variance_between_programs_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--gpus", "8", "train.tokens=1_000_000_000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    program = next(line for line in lines if line.startswith("program "))
    assert "unknown program" in program
    assert "within a program" in program
    assert "between programs" in program
    hours = next(line for line in lines if line.startswith("hours "))
    assert "no surer than a constant utilisation" in hours
    assert any(line.startswith("  factor of runs") for line in lines)


def test_the_network_of_a_cluster_file_is_that_of_the_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    level = "network: [{devices: 8, bandwidth: 450e9}, {devices: 64, bandwidth: %s}]\n"
    seconds = []
    for bandwidth in ("50e9", "5e9"):
        cluster.write_text("device: h100-sxm\n" + level % bandwidth)
        words = [word for word in WORDS if word not in ("--device", "h100-sxm")]
        assert main([*words, "--cluster", str(cluster), "--gpus", "64", "--json"]) == 0
        price_of = json.loads(capsys.readouterr().out)["time"]["parts_seconds"]
        seconds.append(price_of["data"])
    assert seconds[1] > 2 * seconds[0]

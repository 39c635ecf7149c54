"""Laws of `llmsys ablate` as a whole: what it compares, what it repeats, and where it goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.launch.commands.ablate import split_words
from llmsys.launch.main import main
from tests.helpers.forked_commands import run_forked
from tests.helpers.paths import ROOT
from tests.helpers.process import wait_until
from tests.helpers.tiny_crawl import make_crawl

SETS = ("pages", "kept_by_base")


def write_base(folder: Path) -> Path:
    make_crawl(folder / "crawl")
    base = {
        "data": {
            "inputs": [f"{folder}/crawl/*.warc.gz"],
            "rules": [{"kind": "gopher_quality", "min_words": 30}],
            "split": {"heldout_fraction": 0.3},
            "documents": {"num_shards": 2},
            "executor": {"kind": "inline"},
        },
        "tokenizer": {"kind": "sentencepiece", "vocab_size": 400},
        "model": {
            "vocab_size": 400,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "batch": {"sequence_length": 32, "sequences": 4},
        "schedule": {"warmup_tokens": 128},
        "train": {"tokens": 1_024, "precision": "fp32", "threads_per_process": 1},
        "launch": {"processes": 1},
    }
    (folder / "start.yaml").write_text(dump_yaml(base))
    copies = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
    (folder / "copies.yaml").write_text(dump_yaml({"data": {"deduplicate": copies}}))
    (folder / "all.yaml").write_text(dump_yaml({"data": {"rules": []}}))
    return folder


def build_words(folder: Path, out: Path, seeds: int) -> list[object]:
    files = [folder / f"{name}.yaml" for name in ("start", "copies", "all")]
    return ["ablate", *files, "--output", out, "--json", "--seeds", seeds]


@pytest.fixture(scope="module")
def ablated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Two variants with two seeds: the folder, the result, and what was logged."""
    folder = write_base(tmp_path_factory.mktemp("ablation"))
    done = run_forked(*build_words(folder, folder / "out", 2))
    return folder, json.loads(done.stdout), done.stderr


def count_extractions(folder: Path) -> int:
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "stage"]
    return sum(event["tasks"] for event in events if event["stage"] == "extract")


def test_every_variant_is_scored_on_the_same_bytes_by_the_same_model(
    ablated: tuple[Path, dict[str, Any], str],
) -> None:
    folder, result, _ = ablated
    assert list(result["variants"]) == ["base", "copies", "all"]
    sizes = {
        (name, run["scores"][name]["evaluated_bytes"], run["scores"][name]["evaluated_tokens"])
        for runs in result["runs"].values()
        for run in runs.values()
        for name in SETS
    }
    assert sorted(sizes) == sorted(
        (name, result["sets"][name]["text_bytes"], result["sets"][name]["tokens"]) for name in SETS
    )
    counts = {name: one["documents"] for name, one in result["datasets"].items()}
    assert counts["base"] < counts["copies"]
    assert counts["base"] < counts["all"]
    assert {name: len(runs) for name, runs in result["runs"].items()} == dict.fromkeys(counts, 2)
    assert result["variants"]["all"]["changes"]["rules"][1] == []
    assert (folder / "out" / "ablation.html").stat().st_size > 10_000


def test_differences_are_variant_minus_base_of_one_seed(
    ablated: tuple[Path, dict[str, Any], str],
) -> None:
    _, result, _ = ablated
    for name in ("copies", "all"):
        for heldout in SETS:
            found = result["differences"][name][heldout]
            by_seed = {
                seed: run["scores"][heldout]["bits_per_byte"]
                - result["runs"]["base"][seed]["scores"][heldout]["bits_per_byte"]
                for seed, run in result["runs"][name].items()
            }
            assert found["by_seed"] == pytest.approx(by_seed)
            assert found["mean"] == pytest.approx(sum(by_seed.values()) / 2)
            # Two values: the quantile of one degree of freedom times half their distance.
            apart = abs(by_seed["0"] - by_seed["1"])
            assert found["half_width"] == pytest.approx(12.7062 * apart / 2, rel=1e-4)


def test_a_score_is_that_of_llmsys_evaluate(ablated: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = ablated
    out = folder / "out"
    done = run_forked(
        "evaluate", out / "runs/copies/seed-1", f"data.folder={out}/heldout/pages", "--json"
    )
    score = result["runs"]["copies"]["1"]["scores"]["pages"]
    assert json.loads(done.stdout)["bits_per_byte"] == score["bits_per_byte"]


def test_pages_are_extracted_once(ablated: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = ablated
    data = folder / "out" / "data"
    assert count_extractions(data / "base") == 3
    assert count_extractions(data / "copies") == count_extractions(data / "all") == 0
    assert count_extractions(folder / "out" / "heldout" / "all_pages") == 0


def test_no_page_that_is_scored_on_is_in_any_training(
    ablated: tuple[Path, dict[str, Any], str],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, _, _ = ablated
    held = pq.read_table(folder / "out" / "heldout" / "pages.parquet").to_pylist()
    for name in ("base", "copies", "all"):
        tokens = folder / "out" / "data" / name / "tokens"
        ids = set[str]()
        for path in sorted(tokens.glob("train-*.arrow")):
            ids.update(pa.ipc.open_file(path).read_all().column("id").to_pylist())
        assert ids
        assert not ids & {row["id"] for row in held}


def test_the_same_command_repeats_nothing_and_more_seeds_add_runs(
    ablated: tuple[Path, dict[str, Any], str],
) -> None:
    folder, result, logged = ablated
    assert logged.count("] train ") == 6
    again = run_forked(*build_words(folder, folder / "out", 2))
    assert json.loads(again.stdout) == result
    assert "] train " not in again.stderr
    more = run_forked(*build_words(folder, folder / "out", 3))
    assert more.stderr.count("] train ") == 3
    runs = json.loads(more.stdout)["runs"]
    assert {name: list(one) for name, one in runs.items()} == {
        name: ["0", "1", "2"] for name in runs
    }
    assert runs["all"]["0"] == result["runs"]["all"]["0"]


def test_variants_with_the_same_documents_or_none_are_named_before_a_run(
    ablated: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    folder, _, _ = ablated
    out = tmp_path / "out"
    cases = {
        "nothing": (
            {"rules": [{"kind": "gopher_quality", "min_words": 99_999}]},
            "variant nothing: ",
        ),
        "same": (
            {"rules": [{"kind": "gopher_quality", "min_words": 29}]},
            "variants base and same keep the same documents",
        ),
    }
    for name, (data, said) in cases.items():
        (tmp_path / f"{name}.yaml").write_text(dump_yaml({"data": data}))
        words = ["ablate", folder / "start.yaml", tmp_path / f"{name}.yaml", "--output", out]
        done = run_forked(*words, check=False)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (out / "runs").exists()


def test_a_killed_ablation_goes_on_where_it_stood(
    ablated: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    """Kills the process once in the preparation and once among the runs: two imports of torch more
    than the others.
    """
    folder, whole, _ = ablated
    words = build_words(folder, tmp_path, 2)
    command = [sys.executable, "-m", "llmsys.launch.main", *map(str, words)]
    for waits_for in (tmp_path / "data/copies", tmp_path / "runs/base/seed-0/events.jsonl"):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        wait_until(waits_for.exists, f"{waits_for} appears")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run_forked(*words)
    result = json.loads(done.stdout)
    assert result["datasets"] == whole["datasets"]
    for name, by_set in whole["differences"].items():
        for heldout, found in by_set.items():
            again = result["differences"][name][heldout]
            assert again["mean"] == pytest.approx(found["mean"], abs=1e-6)


def test_words_are_variants_unless_they_set_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.yaml").touch()
    found = split_words(["a.yaml", "train.tokens=5", "a=b.yaml"])
    assert found == (["a.yaml", "a=b.yaml"], ["train.tokens=5"])
    assert main(["ablate", "train/demo", "train.tokens=5"]) == 2
    assert "no variant to compare with the base. Give one" in capsys.readouterr().err

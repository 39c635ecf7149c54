"""A plan takes layouts that are likely to fit, and lists the faster ones that it turned away."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import DeviceProfile, load_device_profile
from llmsys.estimate.plan import layout_search
from llmsys.estimate.plan.candidate_enumeration import iter_candidates
from llmsys.estimate.plan.layout_candidate import PlanTarget, estimate_candidate, format_engine_name
from llmsys.estimate.plan.layout_search import search_layouts
from llmsys.estimate.plan.layout_table import build_plan_output
from llmsys.estimate.software_profile import resolve_for_profile
from llmsys.launch.main import main
from tests.helpers.layout_search import limit_search

H100 = load_device_profile("h100-sxm")
ENGINES = (
    TorchEngineConfig(data_parallel="fsdp"),
    TorchEngineConfig(data_parallel="fsdp", gradient_accumulation="whole"),
)
WORDS = ["batch.sequence_length=4096", "batch.sequences=64", "engine.kind=torch"]


def build_run(*words: str) -> RunConfig:
    return read_config("model/llama3.2-1b", [*WORDS, *words]).run


@pytest.fixture(autouse=True)
def _few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search FSDP over all ranks: other layouts are another test's subject."""
    limit_search(monkeypatch, lambda one: format_engine_name(one.engine).startswith("fsdp"))


def build_tight_device(probability: float) -> DeviceProfile:
    """Return an H100 on which the fastest layout of a roomy one fits with a probability."""
    best = search_layouts(build_run(), PlanTarget(ClusterCosts(devices=8), H100)).ranked[0]
    low, high = 0.0, 2.0 * best.memory.peak_bytes
    for _ in range(60):
        middle = (low + high) / 2
        device = H100.model_copy(update={"memory_bytes": middle})
        place = PlanTarget(ClusterCosts(devices=8), device)
        low, high = (
            (middle, high)
            if place.compute_fit_probability(best.memory, 8) < probability
            else (low, middle)
        )
    return H100.model_copy(update={"memory_bytes": high})


def test_the_least_probability_decides_between_a_fast_and_a_safe_layout() -> None:
    device = build_tight_device(0.7)
    bold = PlanTarget(ClusterCosts(devices=8), device, min_fit_probability=0.65)
    safe = replace(bold, min_fit_probability=0.9)
    first, second = (search_layouts(build_run(), place) for place in (bold, safe))
    assert first.ranked[0].step_seconds < second.ranked[0].step_seconds
    for found, place in ((first, bold), (second, safe)):
        for one in found.ranked:
            chance = place.compute_fit_probability(one.memory, 8)
            assert chance >= place.min_fit_probability
    turned_away = {one.choice.format_layout() for one in second.turned_away}
    assert first.ranked[0].choice.format_layout() in turned_away
    assert all(one.step_seconds < second.ranked[0].step_seconds for one in second.turned_away)
    output = build_plan_output(second, safe, [], programs=[], launch="", dryrun="")
    row = next(
        one for one in output.turned_away if one.choice == first.ranked[0].choice.format_layout()
    )
    assert row.fit_probability == pytest.approx(0.7, abs=0.01)
    assert row.reason.startswith("memory: it fits with 70%, less than 90%; ")


def test_a_plan_prints_the_probability_and_what_it_turned_away(tmp_path: Path, capsys) -> None:
    profile = tmp_path / "tight.yaml"
    values = build_tight_device(0.7).model_dump(mode="json", exclude_none=True)
    profile.write_text(json.dumps(values))
    words = ["plan", "model/llama3.2-1b", *WORDS, "gpus=8", f"device={profile}"]
    assert main([*words, "--min-fit-probability", "0.65"]) == 0
    bold = capsys.readouterr().out
    assert "fit with 65% or more" in bold
    assert " 70%  " in bold
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["min_fit_probability"] == 0.9
    assert all(one["fit_probability"] >= 0.9 for one in data["best"])
    assert data["turned_away"]
    assert main(words) == 0
    assert "faster, but not likely to fit (--min-fit-probability 0.9)" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["1", "0", "-1", "most", "nan"])
def test_a_probability_is_between_0_and_1(value: str, capsys) -> None:
    words = ["plan", "model/llama3.2-1b", *WORDS, "gpus=8", "--min-fit-probability", value]
    assert main(words) == 2
    assert "--min-fit-probability" in capsys.readouterr().err


@pytest.mark.parametrize(
    # 4 bytes for each of 1.24 billion weights
    ("memory_bytes", "names"),
    [(5e9, {"fsdp", "fsdp+whole"}), (4.9e9, {"fsdp"})],
)
def test_whole_gradients_are_tried_where_they_fit(memory_bytes: float, names: set[str]) -> None:
    device = H100.model_copy(update={"memory_bytes": memory_bytes})
    place = PlanTarget(ClusterCosts(devices=8), device)
    found = iter_candidates(build_run(), place, ENGINES)
    assert {format_engine_name(one.engine) for one in found if one.tensor == 1} == names


def test_a_layout_is_dropped_by_its_state_only_where_it_cannot_fit() -> None:
    run = resolve_for_profile(build_run(), H100)
    for memory in (2e9, 5e9, 10e9, 20e9):
        device = H100.model_copy(update={"memory_bytes": memory})
        place = PlanTarget(ClusterCosts(devices=8), device)
        for one in iter_candidates(run, place, ENGINES):
            smallest = replace(one, recompute="full", micro_sequences=1)
            fits = place.explain_rejection(estimate_candidate(run, smallest, place)) is None
            missing = layout_search._compute_missing_state_bytes(run, one, place)
            assert not (fits and missing > 0), one.format_layout()

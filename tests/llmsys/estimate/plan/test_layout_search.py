"""Plans against exhaustive search, published layouts against their own arithmetic, refusals that
say what would do.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config, read_config
from llmsys.config.run import RunConfig
from llmsys.config.section import list_divisors
from llmsys.errors import ConfigError, LayoutError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.named_layout import find_layout_violations, parse_layout
from llmsys.estimate.plan.candidate_enumeration import iter_candidates
from llmsys.estimate.plan.layout_candidate import (
    ENGINES,
    RECOMPUTE,
    IllegalLayoutError,
    PlanTarget,
    estimate_candidate,
    format_engine_name,
)
from llmsys.estimate.plan.layout_search import search_layouts
from llmsys.estimate.plan.layout_table import build_plan_output
from llmsys.estimate.software_profile import resolve_for_profile
from llmsys.launch.main import main
from tests.helpers.published_layouts import PUBLISHED

H100 = load_device_profile("h100-sxm")


def config(model: str, *overrides: str) -> RunConfig:
    return read_config(f"model/{model}", overrides).run


@pytest.mark.parametrize(
    ("name", "model", "layout", "devices", "legal"), PUBLISHED, ids=[row[0] for row in PUBLISHED]
)
def test_published_layouts_are_judged_by_their_own_arithmetic(
    name, model, layout, devices, legal
) -> None:
    run = RunConfig(model=model) if not isinstance(model, str) else config(model)
    problems = list(find_layout_violations(run, parse_layout(layout), devices, with_batch=False))
    assert (not problems) == legal, problems


def test_the_misprinted_layout_of_llama_3_is_caught_with_what_it_should_say(capsys) -> None:
    words = ["plan", "model/llama3.1-405b", "gpus=16384", "--check", "tp=8,cp=16,pp=16,dp=4"]
    assert main(words) == 2
    text = capsys.readouterr().out
    assert text.startswith("illegal: ")
    assert (
        "is 8192 devices, and there are 16384. With the other axes unchanged, data=8 uses all of "
        "them."
    ) in text
    assert main([*words[:-1], "tp=8,cp=16,pp=16,dp=8", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["legal"] is True


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3,dp=2", "32 attention heads cannot be divided over context=1 × tensor=3 ranks"),
        (
            "pp=64",
            "32 blocks cannot be divided over pipeline=64 stages. Use pipeline=4, 8, 16 or 32.",
        ),
        ("ep=2,dp=8", "A dense model has no experts to split over expert=2"),
        ("cp=16,dp=1", "batch.sequence_length=8200 positions cannot be divided over context=16"),
        (
            "dp=48",
            "64 sequences of a step cannot be divided evenly over 48 data ranks. Use "
            "batch.sequences=48.",
        ),
    ],
)
def test_a_layout_that_cannot_work_says_which_number_binds(layout, message) -> None:
    run = config("llama3.1-8b", "batch.sequence_length=8200", "batch.sequences=64")
    assert message in "\n".join(
        find_layout_violations(run, parse_layout(layout), None, with_batch=True)
    )


@pytest.mark.parametrize("text", ["tp=8,zp=2", "tp=0", "tp", "tp=2,tensor=2", "dp=2,shard=2"])
def test_a_layout_is_read_strictly(text) -> None:
    with pytest.raises(
        ConfigError, match=r"is not an axis of a layout|twice|also replicate or shard"
    ):
        parse_layout(text)


def exhaustive(run: RunConfig, place: PlanTarget) -> float:
    """The fastest step of every legal choice that fits, each micro-batch tried."""
    best = float("inf")
    for widest in iter_candidates(run, place, ENGINES):
        for recompute in RECOMPUTE:
            for micro in list_divisors(widest.micro_sequences):
                try:
                    one = estimate_candidate(
                        run, replace(widest, recompute=recompute, micro_sequences=micro), place
                    )
                except IllegalLayoutError:
                    continue
                if place.explain_rejection(one) is None:
                    best = min(best, one.step_seconds)
    return best


@pytest.mark.parametrize("model", ["llama3.2-1b", "olmoe-1b-7b"])
def test_the_fastest_of_a_plan_is_within_a_percent_of_trying_everything(model) -> None:
    run = resolve_for_profile(
        config(model, "batch.sequence_length=4096", "batch.sequences=32"), H100
    )
    place = PlanTarget(ClusterCosts(devices=4), H100)
    found = search_layouts(run, place)
    assert found.ranked[0].step_seconds <= 1.01 * exhaustive(run, place)
    assert all(place.explain_rejection(one) is None for one in found.ranked)
    peaks = [one.memory.peak_bytes for one in found.pareto]
    assert peaks == sorted(peaks, reverse=True), "each slower one of the set needs less"


def test_every_neighbour_of_the_best_has_the_reason_that_binds_it() -> None:
    run = config("llama3.1-8b", "batch.sequence_length=8192", "batch.sequences=64")
    place = PlanTarget(ClusterCosts(devices=16), H100)
    found = search_layouts(run, place)
    kinds = {one.reason.split(":")[0] for one in found.rejected}
    assert kinds <= {"illegal", "memory", "time"}
    assert {"memory", "time"} <= kinds
    ddp = next(one for one in found.rejected if one.change == "ddp")
    assert ddp.reason.startswith("memory: "), (
        "8B parameters, masters and moments do not fit one device"
    )
    counted = build_plan_output(found, place, [], programs=[], launch="", dryrun="")
    assert 0 < counted.fitting < len(found.ranked), (
        "a layout with several micro-batches is one layout"
    )


def test_what_fits_nowhere_says_by_how_much_and_what_would_do() -> None:
    run = config("llama3.1-405b", "batch.sequence_length=8192", "batch.sequences=64")
    with pytest.raises(
        LayoutError,
        match=r"No layout fits 8 × H100 .* GiB over the capacity .* With this batch, \d+ devices",
    ):
        search_layouts(run, PlanTarget(ClusterCosts(devices=8), H100))


def test_offload_is_the_last_resort_and_host_memory_is_counted() -> None:
    run = config("llama3.1-70b", "batch.sequence_length=4096", "batch.sequences=8")
    roomy = search_layouts(run, PlanTarget(ClusterCosts(devices=8, host_memory_bytes=2e12), H100))
    assert all(getattr(one.choice.engine, "cpu_offload", "none") != "none" for one in roomy.ranked)
    with pytest.raises(LayoutError, match=r"host memory: .* GiB over the capacity of one machine"):
        search_layouts(run, PlanTarget(ClusterCosts(devices=8, host_memory_bytes=5e11), H100))


def test_saved_tensors_go_to_the_host_where_blocks_are_not_compiled_and_it_has_room() -> None:
    def list_chosen(compiled: str, host_memory_bytes: float) -> list[str]:
        words = (
            "engine.kind=torch",
            f"train.compile={compiled}",
            "batch.sequence_length=16384",
            "batch.sequences=32",
        )
        fast_host = H100.model_copy(update={"host_bandwidth": 1e15})
        place = PlanTarget(ClusterCosts(devices=4, host_memory_bytes=host_memory_bytes), fast_host)
        return [
            one.choice.recompute
            for one in search_layouts(config("llama3.2-1b", *words), place).ranked
        ]

    # Copies that take no time: larger micro-batches than without, and nothing is computed again.
    assert list_chosen("none", 2e12)[0] == "offload"
    assert "offload" not in list_chosen("none", 1e9)
    assert "offload" not in list_chosen("block", 2e12)


def test_a_ring_is_tried_only_where_a_sequence_is_longer_than_heads_can_divide() -> None:
    """32 heads, and up to 64 ranks on a sequence."""
    for length, rings in ((8192, set()), (1 << 18, {("ring", 64)})):
        run = config(
            "llama3.1-8b",
            f"batch.sequence_length={length}",
            f"model.max_position_embeddings={length}",
        )
        found = iter_candidates(run, PlanTarget(ClusterCosts(devices=64), H100), ENGINES[:1])
        kinds = {(one.context_kind, one.context) for one in found}
        assert {(kind, size) for kind, size in kinds if kind == "ring" and size > 32} == rings
        assert ("ulysses", 32) in kinds


def list_wrappers(devices: int) -> set[str]:
    """Return the kinds of data parallelism of the candidates on so many devices."""
    run = config("llama3.2-1b", "batch.sequences=64", "batch.sequence_length=4096")
    place = PlanTarget(ClusterCosts(devices=devices), H100)
    return {format_engine_name(one.engine) for one in iter_candidates(run, place, ENGINES[:4])}


def test_whole_weights_without_a_wrapper_are_for_one_machine() -> None:
    assert list_wrappers(1) == {"fsdp", "plain"}
    assert list_wrappers(8) == {"fsdp", "fsdp+whole", "plain", "ddp"}
    assert list_wrappers(16) == {"fsdp", "fsdp+whole", "ddp"}


def test_one_device_has_no_wrapper() -> None:
    run = config("llama3.2-1b", "batch.sequences=64", "batch.sequence_length=4096")
    found = search_layouts(run, PlanTarget(ClusterCosts(devices=1), H100))
    assert format_engine_name(found.ranked[0].choice.engine) == "plain"
    assert any(one.change == "fsdp" and "copies" in one.reason for one in found.rejected)


def test_an_engine_that_the_config_names_is_kept() -> None:
    run = config("llama3.2-1b", "batch.sequences=16", "engine.kind=deepspeed")
    assert {
        one.choice.engine.kind
        for one in search_layouts(run, PlanTarget(ClusterCosts(devices=4), H100)).ranked
    } == {"deepspeed"}


def test_the_written_config_is_what_was_priced(tmp_path: Path, capsys) -> None:
    output = tmp_path / "chosen.yaml"
    words = [
        "model/llama3.2-1b",
        "gpus=16",
        "device=h100-sxm",
        "batch.sequence_length=2048",
        "batch.sequences=64",
    ]
    assert main(["plan", *words, "--output", str(output), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    best = data["best"][0]
    assert data["launch"] == f"llmsys launch {output} nodes=2 launch.processes=8"
    loaded = load_run_config(str(output))
    layout = loaded.layout.resolve(16, loaded.model)
    assert layout.to_settings() == best["layout"]
    capsys.readouterr()
    assert main(["estimate", str(output), "--device", "h100-sxm", "--gpus", "16", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert {name: priced["memory"][name] for name in ("peak_bytes", "driver_bytes")} == {
        name: best[name] for name in ("peak_bytes", "driver_bytes")
    }
    assert priced["time"]["step_seconds"] == best["step_seconds"]
    assert loaded.batch.sequence_length == 2048


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "A plan needs a cluster. Give gpus=64 device=h100-sxm, or cluster=FILE."),
        (["gpus=many"], "gpus=many is not a number of devices"),
        (
            ["gpus=99999999999999999999"],
            "gpus=99999999999999999999 is not a number of devices. Use 1 to 10000000.",
        ),
        (["gpus=8", "--top", "0"], "--top: 0 is too small: the minimum is 1"),
        (
            ["gpus=8", "batch.sequences=8", "program="],
            "program= names no program. Give one, such as program=megatron",
        ),
        (["gpus=8", "device=h101"], "'h101' has no device profile"),
        (["cluster=nowhere.yaml"], "cluster file nowhere.yaml does not exist"),
        (
            ["gpus=8"],
            "is a bare model without a batch, and the fastest layout depends on it. Give one, "
            "such as",
        ),
    ],
)
def test_a_place_that_nobody_described_is_refused(words, message, capsys) -> None:
    assert main(["plan", "model/llama3.2-1b", *words]) == 2
    assert message in capsys.readouterr().err

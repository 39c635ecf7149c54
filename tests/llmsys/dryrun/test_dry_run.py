"""Laws of a dry run: memory, collectives, waits and parameters of a tiny model equal what is
computed by hand.
"""

import subprocess

import pytest

from llmsys.dryrun.dry_run import iter_dry_runs, run_dry_run
from llmsys.errors import ConfigError, LaunchError
from tests.helpers.dry_runs import (
    EXPERTS,
    INNER,
    LAYERS,
    LENGTH,
    RANKS,
    VOCABULARY,
    WIDTH,
    build_request,
    run_planted,
    run_tiny,
)

BLOCK_SHAPES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER), (WIDTH,), (WIDTH,)]
ROOT_SHAPES = [(VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (WIDTH,)]
FP32, BF16 = 4, 2


def round_up(size: int) -> int:
    return -(-size // 512) * 512


def count_elements(shapes: list[tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes:
        total += shape[0] * (shape[1] if len(shape) == 2 else 1)
    return total


def test_peak_memory_of_a_dense_model_is_the_sum_by_hand() -> None:
    memory = run_tiny()["memory"]
    shards = [count_elements([shape]) // RANKS for shape in LAYERS * BLOCK_SHAPES + ROOT_SHAPES]
    masters = sum(round_up(FP32 * shard) for shard in shards)
    root, block = count_elements(ROOT_SHAPES), count_elements(BLOCK_SHAPES)
    # The vocabulary is large, so the peak is where the gradients of embedding and head are reduced.
    expected = {
        "parameters": masters,
        "optimizer state": 2 * masters + 512 * len(shards),  # and a step count for each parameter
        "gradients": LAYERS * round_up(FP32 * block // RANKS) + round_up(FP32 * root // RANKS),
        "gradients in reduction": round_up(FP32 * root),
    }
    assert {name: memory["categories"][name] for name in expected} == expected
    assert memory["peak_phase"] == "step 2, last micro-batch: backward"
    # What is left are the gradients themselves in bf16, the rotary tables, and scalars of 512
    # bytes.
    gradients = BF16 * root
    rest = memory["peak_bytes"] - sum(expected.values()) - gradients
    assert 0 <= rest < 0.02 * memory["peak_bytes"]


def test_collectives_of_fsdp_are_a_gather_twice_and_a_reduction_once_for_each_unit() -> None:
    result = run_tiny()
    micro = result["micro_batches"]
    assert micro == 2
    found = {one["operation"]: one for one in result["collectives"]}
    # Blocks are gathered in forward and backward; embedding and head stay gathered from one to the
    # other.
    assert found["all_gather"]["count"] == micro * (2 * LAYERS + 1)
    assert found["reduce_scatter"]["count"] == micro * (LAYERS + 1)
    root, block = count_elements(ROOT_SHAPES), count_elements(BLOCK_SHAPES)
    assert found["all_gather"]["bytes"] == micro * BF16 * (2 * LAYERS * block + root)
    assert found["reduce_scatter"]["bytes"] == micro * FP32 * (LAYERS * block + root)
    assert {one["ranks"] for one in result["collectives"]} == {RANKS}


def test_without_a_wrapper_a_step_has_one_gather_and_one_reduction() -> None:
    result = run_tiny("engine.data_parallel=plain")
    assert result["micro_batches"] == 2
    found = {one["operation"]: one for one in result["collectives"]}
    elements = count_elements(LAYERS * BLOCK_SHAPES + ROOT_SHAPES)
    assert found["all_gather"]["count"] == found["reduce_scatter"]["count"] == 1
    assert found["all_gather"]["bytes"] == BF16 * elements
    assert found["reduce_scatter"]["bytes"] == FP32 * elements
    memory = result["memory"]["categories"]
    shapes = LAYERS * BLOCK_SHAPES + ROOT_SHAPES
    masters = sum(round_up(FP32 * count_elements([shape]) // RANKS) for shape in shapes)
    weights = sum(round_up(BF16 * count_elements([shape])) for shape in shapes)
    assert memory["parameters"] == masters + weights
    assert memory["optimizer state"] == 2 * masters + 512 * len(shapes)


def test_a_planted_item_is_counted_with_the_line_that_calls_it() -> None:
    plant = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def wait(self, x, *arguments, **options):
    x.sum().item()
    return forward(self, x, *arguments, **options)
TransformerBlock.forward = wait
"""
    planted, plain = run_planted(plant), run_tiny()
    new = {(one["cause"], one["line"]): one["count"] for one in planted["waits"]}
    for one in plain["waits"]:
        new[one["cause"], one["line"]] -= one["count"]
    [((cause, line), count)] = [(key, count) for key, count in new.items() if count]
    assert cause == "item"
    # the planted forward is in no file: its caller is the wrapper of compiled blocks, which H100s
    # have
    assert line.startswith("llmsys/parallel/block_compilation.py:")
    assert count == LAYERS * planted["recorded_micro_batches"]


def test_a_planted_table_of_positions_is_found() -> None:
    plant = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def tabulate(self, x, *arguments, **options):
    self.table = x.new_zeros(1, x.shape[1], x.shape[1])
    return forward(self, x, *arguments, **options)
TransformerBlock.forward = tabulate
"""
    found = [
        one for one in run_planted(plant)["squares"] if one["tensor"] == "bfloat16 [1, 32, 32]"
    ]
    assert [one["owner"] for one in found] == ["blocks.*"]


def test_all_kinds_runs_one_rank_of_each_and_uneven_rows_are_an_imbalance() -> None:
    # 4,097 rows over 8 ranks: seven have 513, the last 506. Embedding and head are alike.
    results = list(iter_dry_runs(build_request("model.vocab_size=4097"), all_kinds=True))
    assert [one["rank"] for one in results] == [0, 7]
    rows = [513] * 7 + [506]
    fixed = (LAYERS * count_elements(BLOCK_SHAPES) + WIDTH) // RANKS
    sizes = [2 * WIDTH * row + fixed for row in rows]
    first, last = (one["parameters"] for one in results)
    assert (first["own"], last["own"]) == (sizes[0], sizes[7])
    assert (last["largest"], last["smallest"], last["largest_rank"]) == (sizes[0], sizes[7], 0)
    assert last["imbalance"] == pytest.approx(sizes[0] / (sum(sizes) / RANKS))
    assert [(kind["first_rank"], kind["num_ranks"]) for kind in last["kinds"]] == [(0, 7), (7, 1)]
    assert (first["own_kind"], last["own_kind"]) == (0, 1)


def test_skewed_experts_receive_as_many_rows_as_asked() -> None:
    even, skewed = (run_tiny(*EXPERTS, "layout.expert=4", skew=skew) for skew in (1.0, 2.0))

    assert even["flops"]["aten._grouped_mm.default"] > 0
    ratio = skewed["flops"]["aten._grouped_mm.default"] / even["flops"]["aten._grouped_mm.default"]
    assert ratio == pytest.approx(2, rel=0.1)
    sent, received = (
        sum(one["bytes"] for one in result["collectives"] if one["operation"] == "all_to_all")
        for result in (even, skewed)
    )
    assert received > sent


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("engine.kind=deepspeed",),
            "DeepSpeed flattens parameters into buffers that it addresses by data pointer",
        ),
        (("engine.kind=accelerate",), "accelerate joins its own process group"),
        (("optimizer.moments=bf16",), "rounds at random, with a generator of the device"),
    ],
)
def test_engines_that_cannot_be_pretended_are_refused_with_the_reason(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_dry_run(build_request(*overrides))


def test_a_process_that_dies_is_one_message_with_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = subprocess.CompletedProcess([], -9, None, "out of memory")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: died)
    with pytest.raises(
        LaunchError, match=r"rank 0 ended with status -9, which is a bug(.|\n)*out of memory"
    ):
        run_dry_run(build_request())


def test_a_rank_beyond_the_cluster_and_a_skew_beyond_all_tokens_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rank=8 is not a rank of 1 nodes with 8 devices. Use rank=0 to rank=7"
    ):
        run_dry_run(build_request(rank=8))
    with pytest.raises(
        ConfigError, match=r"--expert-skew 5 is not a load: .* at most 4 times the mean"
    ):
        run_dry_run(build_request(*EXPERTS, "layout.expert=4", skew=5.0))


def test_a_rank_of_a_pipeline_runs_its_whole_schedule() -> None:
    """The last of two stages: hidden states of four micro-batches come in, and their gradients
    go out.
    """
    found = run_tiny("layout.pipeline=2", rank=4)
    messages = {one["operation"]: one for one in found["collectives"] if one["axis"] == "pipeline"}
    sent = 4 * LENGTH * WIDTH * 2
    assert {
        name: (messages[name]["count"], messages[name]["bytes"]) for name in ("send", "receive")
    } == {
        "send": (4, sent),
        "receive": (4, sent),
    }
    assert found["parameters"]["kinds"][0]["first_rank"] == 4
    assert abs(found["estimate"]["difference"]) < 0.25

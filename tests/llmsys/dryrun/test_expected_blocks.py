"""Laws of what blocks are expected to do, by hand: runs, products, waits and tables of a rank, and
the sentence of each difference.
"""

from collections import Counter
from typing import Any

import pytest

from llmsys.config.loading.load import read_config
from llmsys.dryrun.block_check import check_blocks, count_expected_products, count_expected_runs
from llmsys.dryrun.expected_messages import RankContext
from llmsys.dryrun.expected_passes import ONCE, REPEATED, list_passes
from llmsys.dryrun.host_waits import HostWait, HostWaitLog
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.dryrun.table_makers import AUTOGRAD, KEPT_TABLE
from llmsys.dryrun.wait_check import iter_wait_differences
from llmsys.estimate.rank_parameters import PipelineStage
from tests.helpers.dry_runs import EXPERTS, INNER, LENGTH, RANKS, WIDTH, write_tiny_config

NO_TABLE: list[dict[str, Any]] = [{"has_table": False}]
EXPERT_WIDTH = 32


def build_context(*overrides: str, layers: range = range(2), rank: int = 0) -> RankContext:
    """The context of a rank with two micro-batches of one row."""
    config = read_config(str(write_tiny_config()), list(overrides)).run
    config = config.resolve_precision("bf16", "a test")
    layout = config.resolve_layout(RANKS)
    last = config.model.num_hidden_layers - 1
    stage = PipelineStage(frozenset(layers), 0 in layers, last in layers, 1.0)
    passes = list_passes(layout, rank, 2, (REPEATED, ONCE))
    return RankContext(config, layout, rank, stage, (layers,), passes, 1, LENGTH, (), 1.0)


def build_recorder(context: RankContext) -> DryRunRecorder:
    """A recorder of a run that does what is expected."""
    recorder = DryRunRecorder()
    recorder.block_runs = count_expected_runs(context)
    recorder.products = count_expected_products(context)
    return recorder


def test_each_block_runs_once_in_a_forward_pass_and_multiplies_every_token() -> None:
    context = build_context()
    one = Counter({"blocks.0": 1, "blocks.1": 1})
    for part in (REPEATED, ONCE):
        runs = {name: n for (own, name), n in count_expected_runs(context).items() if own == part}
        assert runs == one
    products = count_expected_products(context)
    # Both layers of the two micro-batches' parts.
    assert products[REPEATED, "blocks.*.attention.q_proj"] == 2 * 2 * LENGTH * WIDTH * WIDTH
    assert products[ONCE, "blocks.*.feed_forward.up_proj"] == 2 * 2 * LENGTH * WIDTH * INNER
    assert check_blocks(build_recorder(context), context, NO_TABLE).differences == ()


def test_tensor_ranks_share_the_products_of_a_block() -> None:
    whole, half = (
        count_expected_products(build_context(f"layout.tensor={ranks}")) for ranks in (1, 2)
    )
    assert {key: flops // 2 for key, flops in whole.items()} == half


def test_a_looped_block_runs_as_often_as_it_has_steps() -> None:
    looped = ("model.recurrence.kind=fixed", "model.position.kind=sinusoidal")
    runs = count_expected_runs(build_context(*looped))
    assert runs == Counter({(REPEATED, "blocks.0"): 2, (ONCE, "blocks.0"): 2})


def test_a_stage_runs_its_own_layers() -> None:
    overrides = ("layout.pipeline=2", "model.num_hidden_layers=4")
    context = build_context(*overrides, layers=range(2, 4), rank=4)
    recorder = build_recorder(context)
    recorder.block_runs = Counter({("once", "blocks.0"): 2, ("once", "blocks.3"): 2})
    found = check_blocks(recorder, context, NO_TABLE).differences
    assert sorted(found) == [
        "repeated block: blocks.0 runs 2 times in the forward passes of the rest of the step, "
        "expected 0",
        "skipped block: blocks.2 runs 0 times in the forward passes of the rest of the step, "
        "expected 2",
    ]


def test_rows_that_nobody_routed_are_unneeded() -> None:
    context = build_context(*EXPERTS)
    recorder = build_recorder(context)
    name = "blocks.*.feed_forward.experts"
    # Two experts of each of 32 tokens, three matrices, two layers.
    flops = 2 * 2 * 3 * WIDTH * EXPERT_WIDTH
    assert recorder.products[ONCE, name] == flops * 64
    recorder.products[ONCE, name] += flops * 16
    [found] = check_blocks(recorder, context, NO_TABLE).differences
    assert found == (
        f"unneeded products: {name} computes {flops * 80:,} FLOPs in the forward passes of the "
        f"rest of the step, expected {flops * 64:,}, as many as 1.250 times the rows that tokens "
        "are routed to; rows that nobody routed are padding"
    )


@pytest.mark.parametrize("module", ["blocks.*.attention", "prediction.*.block", "encoder.blocks.*"])
def test_a_wait_in_a_block_is_a_difference(module: str) -> None:
    context = build_context()
    recorder = build_recorder(context)
    recorder.waits = build_waits(module, "item", 3)
    [found] = check_blocks(recorder, context, NO_TABLE).differences
    assert found.startswith(f"wait of the host in a block: item in {module} at ")
    assert "3 times in the micro-batches that ran, expected 0" in found


@pytest.mark.parametrize("module", ["", "norm", "head"])
def test_a_wait_outside_of_blocks_is_a_difference(module: str) -> None:
    context = build_context()
    recorder = build_recorder(context)
    recorder.waits = build_waits(module, "item", 2)
    [found] = check_blocks(recorder, context, NO_TABLE).differences
    where = f" in {module}" if module else ""
    assert found.startswith(f"wait of the host outside of blocks: item{where} at ")
    assert "2 times in the micro-batches that ran, expected 0" in found


@pytest.mark.parametrize(
    ("overrides", "cause", "file", "count", "is_named"),
    [
        ((), "tolist", "llmsys/engine/engine.py", 1, False),
        ((), "tolist", "llmsys/engine/engine.py", 2, True),
        ((), "item", "llmsys/engine/engine.py", 1, True),
        ((), "copy to the host", "llmsys/engine/logit_clip.py", 1, True),
        (
            ("optimizer.max_attention_logit=9", "train.compile=none"),
            "copy to the host",
            "llmsys/engine/logit_clip.py",
            1,
            False,
        ),
        ((), "copy to the host", "torch/distributed/fsdp/_fully_shard/_fsdp_param.py", 9, True),
        (
            ("engine.cpu_offload=state",),
            "copy to the host",
            "torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
            9,
            False,
        ),
    ],
)
def test_a_step_reads_its_numbers_once(
    overrides: tuple[str, ...], cause: str, file: str, count: int, is_named: bool
) -> None:
    waits = [HostWait(cause, f"{file}:7", count, "")]
    found = list(iter_wait_differences(waits, build_context(*overrides)))
    assert bool(found) is is_named


@pytest.mark.parametrize(("count", "named"), [(4, ""), (8, "together are 4"), (0, "0, expected 4")])
def test_the_rows_of_experts_are_read_once_a_layer(count: int, named: str) -> None:
    """Two layers of two micro-batches."""
    context = build_context(*EXPERTS, "layout.expert=4")
    recorder = build_recorder(context)
    recorder.waits = build_waits("blocks.*.feed_forward", "tolist", count)
    assert named in "".join(check_blocks(recorder, context, NO_TABLE).differences)
    assert (count == 4) == (check_blocks(recorder, context, NO_TABLE).differences == ())


def build_waits(module: str, cause: str, count: int) -> HostWaitLog:
    waits = HostWaitLog(is_recording=True, modules=[module])
    for _ in range(count):
        waits.record(cause)
    return waits


@pytest.mark.parametrize(
    ("maker", "has_table", "is_named"),
    [
        ("model/scaled_dot_product.py:compute_attention", False, True),
        ("model/mask_builder.py:build_tables", False, True),
        (AUTOGRAD, False, True),
        ("model/scaled_dot_product.py:compute_attention", True, False),
        ("model/mask_builder.py:build_tables", True, False),
        (AUTOGRAD, True, False),
        ("model/multi_head_attention.py:forward", True, True),
        ("/home/me/plant.py:forward", True, True),
        (KEPT_TABLE, True, True),
    ],
)
@pytest.mark.parametrize("owner", ["", "blocks.*", "blocks.*.attention"])
def test_a_table_is_named_unless_a_kernel_has_one_and_its_code_makes_it(
    owner: str, maker: str, has_table: bool, is_named: bool
) -> None:
    context = build_context()
    recorder = build_recorder(context)
    recorder.squares[owner, "bool [64, 64]", maker] = 2
    found = check_blocks(recorder, context, [{"has_table": has_table}]).differences
    assert bool(found) is is_named
    assert all("makes bool [64, 64], 2 times in a micro-batch" in one for one in found)

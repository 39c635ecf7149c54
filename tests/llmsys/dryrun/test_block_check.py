"""Laws of the comparison of blocks: planted waits, tables, padding and skipped blocks are named,
and end a dry run with status 1.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from llmsys.dryrun import dry_run
from llmsys.errors import RefutedStepError
from llmsys.launch.main import main
from tests.helpers.dry_runs import (
    EXPERTS,
    INNER,
    LENGTH,
    RANKS,
    WIDTH,
    run_planted,
    run_tiny,
    write_tiny_config,
)

VOCABULARY = 128
LOSS_ITEM = """
from llmsys.engine import micro_batch_loss
select = micro_batch_loss.select_valid_positions
def wait(x, *arguments):
    x.sum().item()
    return select(x, *arguments)
micro_batch_loss.select_valid_positions = wait
"""
BACKWARD_ITEM = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def wait_in_backward(self, x, *arguments, **options):
    if x.requires_grad:
        x.register_hook(lambda gradient: (gradient.sum().item(), None)[1])
    return forward(self, x, *arguments, **options)
TransformerBlock.forward = wait_in_backward
"""
EXPERTS_ASTRAY = """
from llmsys.parallel.expert_parallel import AllToAllTokenDispatcher
build = AllToAllTokenDispatcher.__init__
def build_over_world(self, group, config):
    build(self, torch.distributed.group.WORLD, config)
AllToAllTokenDispatcher.__init__ = build_over_world
"""
WHOLE_EXPERTS = """
from llmsys.parallel import parallelize
shard = parallelize.fully_shard
def leave_whole(module, **options):
    if hasattr(module, "multiply_groups"):
        options["ignored_params"] = {module.down_proj}
    return shard(module, **options)
parallelize.fully_shard = leave_whole
"""
SKIPPED_STAGE = """
from llmsys.model.layer_stack import LayerStack
select = LayerStack.select_blocks
def skip_stage(self, layers):
    return select(self, layers) if layers is None or 0 in layers else []
LayerStack.select_blocks = skip_stage
"""
LOST_MICRO_BATCH = """
from llmsys.engine.torch_engine import TorchEngine
add = TorchEngine._add_gradients
def lose_last(self, batches, *arguments):
    return add(self, batches[:-1], *arguments)
TorchEngine._add_gradients = lose_last
"""
ITEM = """
from llmsys.model.multi_head_attention import MultiHeadAttention
forward = MultiHeadAttention.forward
def wait(self, x, *arguments, **options):
    x.sum().item()
    return forward(self, x, *arguments, **options)
MultiHeadAttention.forward = wait
"""
TABLES = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def tabulate(self, x, *arguments, **options):
    length = x.shape[1]
    self.tables = x.new_zeros(length, length), x.new_zeros(3, length, length)
    return forward(self, x, *arguments, **options)
TransformerBlock.forward = tabulate
"""
# Experts compute eight rows that nobody routed.
PADDING = """
from llmsys.model.experts import GroupedExperts
forward = GroupedExperts.forward
def pad(self, x_MD, counts_E):
    padded_MD = torch.nn.functional.pad(x_MD, (0, 0, 0, 8))
    counts_E = counts_E.clone()
    counts_E[-1] += 8
    return forward(self, padded_MD, counts_E)[: len(x_MD)]
GroupedExperts.forward = pad
"""
SKIPPED = """
from llmsys.model.layer_stack import LayerStack
select = LayerStack.select_blocks
def skip_last(self, layers):
    return select(self, layers)[:-1]
LayerStack.select_blocks = skip_last
"""
# A stage runs the first of its blocks twice, in the place of its second.
EXCHANGED = """
from llmsys.model.layer_stack import LayerStack
select = LayerStack.select_blocks
def repeat_first(self, layers):
    found = select(self, layers)
    return found[:1] * len(found)
LayerStack.select_blocks = repeat_first
"""


def list_differences(result: dict[str, Any]) -> list[str]:
    differences: list[str] = result["block_check"]["differences"]
    assert result["is_proven"] is False
    assert result["fits"]
    return differences


@pytest.mark.parametrize(
    ("overrides", "rank"),
    [(("layout.tensor=2", "layout.replicate=2"), 5), ((*EXPERTS, "layout.expert=2"), 1)],
    ids=["tensor", "expert"],
)
def test_a_planted_item_is_named_with_its_module(overrides: tuple[str, ...], rank: int) -> None:
    result = run_planted(ITEM, *overrides, rank=rank)
    [found] = list_differences(result)
    # Two layers, in each of two micro-batches.
    assert found.startswith("wait of the host in a block: item in blocks.*.attention at ")
    assert "4 times in the micro-batches that ran, expected 0; the device runs empty" in found
    assert "so keep the value on the device" in found


@pytest.mark.parametrize(
    ("plant", "count"), [(LOSS_ITEM, 2), (BACKWARD_ITEM, 4)], ids=["in the loss", "in a backward"]
)
def test_a_planted_item_outside_of_the_forward_of_blocks_is_named(plant: str, count: int) -> None:
    [found] = list_differences(run_planted(plant, rank=3))
    assert found.startswith("wait of the host outside of blocks: item at ")
    assert f", {count} times in the micro-batches that ran, expected 0" in found


@pytest.mark.parametrize(
    ("plant", "overrides", "named"),
    [
        (
            EXPERTS_ASTRAY,
            (*EXPERTS, "layout.expert=4"),
            (
                r"RuntimeError: .* in step 1, first micro-batch: forward\.",
                r"additional: all_to_all over world \(8 ranks: 0, 1, 2, 3, …\), bfloat16, .* "
                "expected 0",
            ),
        ),
        (
            WHOLE_EXPERTS,
            (*EXPERTS, "layout.expert=2"),
            (r"wrong shard: blocks\.1\.feed_forward\.experts\.down_proj holds 8,192 elements",),
        ),
        (
            SKIPPED_STAGE,
            ("layout.pipeline=2", "layout.tensor=2", "batch.sequences=8"),
            (r"skipped block: blocks\.1 runs 0 times in the forward passes",),
        ),
        (
            LOST_MICRO_BATCH,
            ("batch.sequences=16",),
            (r"skipped block: blocks\.0 runs 0 times in the forward passes of the rest",),
        ),
    ],
    ids=["wrong group", "unsharded", "skipped stage", "lost micro-batch"],
)
def test_a_step_that_breaks_is_refuted_by_what_it_did_until_then(
    plant: str, overrides: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with pytest.raises(RefutedStepError) as refuted:
        run_planted(plant, *overrides, rank=5)
    assert refuted.value.exit_status == 1
    assert [one for one in named if not re.search(one, str(refuted.value))] == []
    assert "rank 5 of 8 cannot run a step: " in str(refuted.value)


@pytest.mark.parametrize(
    "length",
    [LENGTH, WIDTH, INNER, VOCABULARY],
    ids=["alone", "as hidden_size", "as intermediate_size", "as vocab_size"],
)
def test_planted_tables_of_two_and_of_three_dimensions_are_named(length: int) -> None:
    result = run_planted(
        TABLES,
        f"batch.sequence_length={length}",
        f"model.max_position_embeddings={length}",
        f"model.vocab_size={VOCABULARY}",
        "model.num_hidden_layers=1",
    )
    assert [
        f"table of positions by positions: blocks.* makes bfloat16 {shape}, 1 times in a "
        "micro-batch (<string>:tabulate), and no attention kernel of the layers needs one"
        for shape in ([length, length], [3, length, length])
    ] == list_differences(result)


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        # 32 tokens with two experts each, of which a rank of two has as many.
        (("layout.expert=2", "layout.replicate=2"), 64),
        # Eight experts, each with ceil(0.5 · 32 · 2 / 8) tokens at most.
        (("model.moe.routing.kind=capacity", "model.moe.routing.factor=0.5"), 32),
    ],
    ids=["expert", "capacity"],
)
def test_rows_that_nobody_routed_are_padding(overrides: tuple[str, ...], rows: int) -> None:
    differences = list_differences(run_planted(PADDING, *EXPERTS, *overrides))
    # Two layers and three matrices of 64 × 32.
    [repeated] = [one for one in differences if "a repeated micro-batch" in one]
    flops = 2 * 2 * 3 * WIDTH * 32
    assert repeated == (
        f"unneeded products: blocks.*.feed_forward.experts computes {flops * (rows + 8):,} FLOPs "
        f"in the forward passes of a repeated micro-batch, expected {flops * rows:,}, as many as "
        f"{(rows + 8) / rows:.3f} times the rows that tokens are routed to; rows that nobody "
        "routed are padding"
    )
    assert len(differences) == 2


@pytest.mark.parametrize(
    ("plant", "overrides", "rank", "named"),
    [
        (
            SKIPPED,
            ("layout.pipeline=2", "layout.context=2", "batch.sequences=8"),
            4,
            ["skipped block: blocks.1 runs 0 times in the forward passes of the rest of the step"],
        ),
        (
            EXCHANGED,
            (
                "layout.pipeline=2",
                "layout.tensor=2",
                "model.num_hidden_layers=4",
                "batch.sequences=8",
            ),
            0,
            [
                "repeated block: blocks.0 runs 12 times in the forward passes of the rest of the "
                "step, expected 4",
                "skipped block: blocks.1 runs 0 times in the forward passes of the rest of the "
                "step, expected 4",
            ],
        ),
    ],
    ids=["of the last stage", "another in its place"],
)
def test_a_skipped_block_of_a_stage_is_named(
    plant: str, overrides: tuple[str, ...], rank: int, named: list[str]
) -> None:
    differences = list_differences(run_planted(plant, *overrides, rank=rank))
    assert [one for one in named if not any(other.startswith(one) for other in differences)] == []
    products = [one for one in differences if one.startswith("too few products")]
    assert bool(products) is (plant == SKIPPED)


def test_host_work_is_counted_by_block() -> None:
    """A forward of a block has at least its seven projections and attention, and a backward twice
    as many products.
    """
    work = run_tiny()["host_work"]
    assert work["forward"] >= 8
    assert work["backward"] > 14
    # 6 µs a launch.
    assert work["seconds"] == pytest.approx(6e-6 * (work["forward"] + work["backward"]))


def test_a_wait_in_a_block_is_printed_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "wait of the host in a block: item in blocks.*.attention"
    check = {"differences": [found], "unchecked": ["products of experts in fp8"]}
    result = run_tiny() | {"block_check": check, "is_proven": False}
    monkeypatch.setattr(dry_run, "iter_dry_runs", lambda request, all_kinds: iter([result]))
    words = ["dryrun", str(write_tiny_config()), f"nodes=1:{RANKS}", "device=h100-sxm"]
    assert main([*words, "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"1 differences from the work that the config asks for:\n  {found}" in printed
    assert "products of experts in fp8 are not checked" in printed
    assert "host work of a block and micro-batch, eager: " in printed
    page = (tmp_path / "dryrun.html").read_text()
    assert found in page
    assert "not checked: products of experts in fp8" in page

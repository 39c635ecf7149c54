"""Laws of the comparison of collectives: layouts agree with their config, and a planted mistake is
named.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import InterleavedScheduleConfig
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.expected_passes import list_passes
from llmsys.dryrun.rank_groups import RankGroups
from tests.helpers.dry_runs import EXPERTS, run_forked, run_planted, run_tiny

MORE = "batch.sequences=32"
INTERLEAVED = (
    "layout.pipeline=2",
    "layout.pipeline_schedule.kind=interleaved",
    "layout.pipeline_schedule.stages_per_rank=2",
    "model.num_hidden_layers=4",
)
LAYOUTS: list[tuple[tuple[str, ...], int]] = [
    ((), 0),
    (("engine.data_parallel=plain",), 0),
    (("engine.data_parallel=ddp",), 0),
    (("engine.reshard=after_step", MORE), 0),
    (
        (
            "layout.tensor=2",
            "layout.context=2",
            "layout.replicate=2",
            "engine.gradient_accumulation=whole",
            "train.activation_checkpoint=selective",
        ),
        5,
    ),
    (
        (
            *EXPERTS,
            "model.moe.num_shared_experts=1",
            "layout.tensor=2",
            "layout.expert=4",
            "train.activation_checkpoint=full",
        ),
        3,
    ),
    (
        (
            *INTERLEAVED,
            "model.tie_word_embeddings=true",
            "engine.reshard=never",
            MORE,
        ),
        4,
    ),
    *(((*INTERLEAVED, "batch.sequences=16"), rank) for rank in (0, 7)),
]
SHARED_PARAMETERS = """
from llmsys.parallel.tensor_parallel import PartialGradientReducer
"""
WRONG_GROUP = (
    SHARED_PARAMETERS
    + """
reduce = PartialGradientReducer.all_reduce
def reduce_over_all(self):
    self._group = torch.distributed.group.WORLD
    reduce(self)
PartialGradientReducer.all_reduce = reduce_over_all
"""
)
MISSING_REDUCTION = SHARED_PARAMETERS + "PartialGradientReducer.all_reduce = lambda self: None"
DOUBLED_GATHER = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def gather_again(self, *arguments, **options):
    if torch._C._current_graph_task_id() == -1:
        self.reshard()
        self.unshard()
    return forward(self, *arguments, **options)
TransformerBlock.forward = gather_again
"""
WHOLE_NORM = """
from llmsys.parallel import parallelize
shard = parallelize.fully_shard
def shard_all_but_a_norm(module, **options):
    kept = {one for name, one in module.named_parameters() if name == "attention_norm.weight"}
    kept |= {one for name, one in module.named_parameters() if ".attention_norm.weight" in name}
    return shard(module, **options, ignored_params=kept)
parallelize.fully_shard = shard_all_but_a_norm
"""
HALF_REDUCTION = """
from llmsys.parallel import parallelize
policy = parallelize.MixedPrecisionPolicy
def reduce_in_half(**options):
    return policy(**options | {"reduce_dtype": torch.bfloat16})
parallelize.MixedPrecisionPolicy = reduce_in_half
"""
ALL = "(8 ranks: 0, 1, 2, 3, …)"


@pytest.mark.parametrize(("overrides", "rank"), LAYOUTS)
def test_collectives_and_shards_are_those_that_follow_from_the_config(
    overrides: tuple[str, ...], rank: int
) -> None:
    result = run_tiny(*overrides, rank=rank)
    check = result["collective_check"]
    assert (check["differences"], check["unchecked"]) == ([], [])
    assert check["num_messages"] >= 4
    assert result["is_proven"]


@pytest.mark.parametrize(
    ("plant", "overrides", "named"),
    [
        (
            WRONG_GROUP,
            ("layout.tensor=2",),
            [
                "missing: all_reduce over tensor (2 ranks: 0, 1), float32, 256 bytes, rest of the "
                "step: 0 calls, expected 1",
                f"additional: all_reduce over world {ALL}, float32, 256 bytes, rest of the step: "
                "1 calls, expected 0",
            ],
        ),
        (
            MISSING_REDUCTION,
            ("layout.tensor=2",),
            [
                "missing: all_reduce over tensor (2 ranks: 0, 1), float32, 256 bytes, rest of the "
                "step: 0 calls, expected 1"
            ],
        ),
        (
            DOUBLED_GATHER,
            (),
            [
                f"too many: all_gather over world {ALL}, bfloat16, 69,888 bytes, each repeated "
                "micro-batch: 6 calls, expected 4",
                f"too many: all_gather over world {ALL}, bfloat16, 69,888 bytes, rest of the "
                "step: 6 calls, expected 4",
            ],
        ),
        (
            WHOLE_NORM,
            (),
            [
                "wrong shard: blocks.0.attention_norm.weight holds 64 elements on this rank, "
                "expected 8",
                f"missing: all_gather over world {ALL}, bfloat16, 69,888 bytes, rest of the step: "
                "0 calls, expected 4",
            ],
        ),
        (
            HALF_REDUCTION,
            (),
            [
                f"missing: reduce_scatter over world {ALL}, float32, 139,776 bytes, rest of the "
                "step: 0 calls, expected 2",
                f"additional: reduce_scatter over world {ALL}, bfloat16, 69,888 bytes, rest of "
                "the step: 2 calls, expected 0",
            ],
        ),
    ],
    ids=["wrong group", "missing reduction", "doubled gather", "unsharded tensor", "wrong dtype"],
)
def test_a_planted_mistake_is_named(
    plant: str, overrides: tuple[str, ...], named: list[str]
) -> None:
    """A block has 34,944 parameters: four of 64 × 64, three of 64 × 96, two norms."""
    result = run_planted(plant, *overrides)
    assert not result["is_proven"]
    assert result["fits"]
    differences = result["collective_check"]["differences"]
    assert [one for one in named if one not in differences] == []


REPLICAS = """
from llmsys.parallel.fsdp import FsdpModel
enter = FsdpModel.enter_micro_batch
def enter_without_replicas(self, *, last, stage=None):
    found = enter(self, last=last, stage=stage)
    for unit in self._units_by_stage[stage]:
        unit.set_requires_all_reduce(False, recurse=False)
    return found
FsdpModel.enter_micro_batch = enter_without_replicas
"""
WHOLE_EMBEDDING = """
from llmsys.parallel import parallelize
shard = parallelize.fully_shard
def shard_all_but_the_embedding(module, **options):
    kept = {one for name, one in module.named_parameters() if name == "embed.weight"}
    return shard(module, **options, ignored_params=kept)
parallelize.fully_shard = shard_all_but_the_embedding
"""
WRONG_EXPERTS = """
from llmsys.parallel import fsdp
apply = fsdp.apply_expert_parallel
def apply_over_the_other_axis(model, meshes):
    apply(model, meshes)
    for layer in model.list_moe_layers():
        mesh = meshes.expert_fsdp
        layer.dispatcher.group = mesh.get_group(mesh.ndim - 1)
fsdp.apply_expert_parallel = apply_over_the_other_axis
"""


def test_mistakes_planted_in_replicas_of_tensor_ranks_are_all_named() -> None:
    """Two replicas of two shards of two tensor ranks; a block has 34,944 parameters, of which a
    tensor rank has half of the matrices.
    """
    plants = (WRONG_GROUP, DOUBLED_GATHER, WHOLE_EMBEDDING)
    overrides = ("layout.tensor=2", "layout.replicate=2")
    result = run_planted("\n".join(plants), *overrides, rank=5)
    assert not result["is_proven"]
    text = "\n".join(result["collective_check"]["differences"])
    elements = (34_944 - 2 * 64) // 2 + 2 * 64
    for named in (
        "missing: all_reduce over tensor (2 ranks: 4, 5), float32",
        f"additional: all_reduce over world {ALL}, float32",
        f"too many: all_gather over shard (2 ranks: 5, 7), bfloat16, {2 * elements:,} bytes",
        "wrong shard: embed.weight holds 262,144 elements on this rank, expected 65,536",
    ):
        assert named in text


def test_mistakes_planted_in_replicas_of_expert_ranks_are_all_named() -> None:
    """Two replicas of four ranks, of which two neighbours share the experts."""
    plants = (WRONG_EXPERTS, REPLICAS, DOUBLED_GATHER, WHOLE_NORM)
    overrides = (*EXPERTS, "layout.expert=2", "layout.replicate=2")
    result = run_planted("\n".join(plants), *overrides, rank=6)
    assert not result["is_proven"]
    text = "\n".join(result["collective_check"]["differences"])
    for named in (
        "missing: all_to_all over expert (2 ranks: 6, 7), bfloat16",
        "additional: all_to_all over expert_fsdp (2 ranks: 4, 6), bfloat16",
        "missing: all_reduce over replicate (2 ranks: 2, 6), float32",
        # Without the norm, which no rank gathers any more.
        "additional: all_gather over shard (4 ranks: 4, 5, 6, 7), bfloat16, 33,920 bytes",
        "wrong shard: blocks.0.attention_norm.weight holds 64 elements on this rank, expected 16",
    ):
        assert named in text


def test_what_has_no_expectation_is_named() -> None:
    """The projections of an encoder-decoder take source and target tokens."""
    result = run_forked(DryRunRequest("train/t5-tiny", (), 1, 2, 1, "h100-sxm"))
    named = ["products of projections with an encoder and a decoder"]
    assert result["block_check"] == {"differences": [], "unchecked": named}
    assert result["is_proven"]


def test_groups_are_the_rows_and_columns_of_the_grid_of_ranks() -> None:
    """2 replicas × 2 shards × 2 context × 2 tensor ranks; experts over 4 of the 8 of a replica."""
    layout = ParallelLayout(replicate=2, shard=2, context=2, tensor=2, expert=4)
    groups = RankGroups(layout, 13)
    assert groups.list_ranks("world") == tuple(range(16))
    assert groups.list_ranks("tensor") == (12, 13)
    assert groups.list_ranks("ulysses") == (13, 15)
    assert groups.list_ranks("sequence") == (12, 13, 14, 15)
    assert groups.list_ranks("fsdp") == (9, 11, 13, 15)
    assert groups.list_ranks("replica") == tuple(range(8, 16))
    assert groups.list_ranks("replicate") == (5, 13)
    assert groups.list_ranks("expert") == (12, 13, 14, 15)
    assert groups.list_ranks("expert_fsdp") == (9, 13)


@pytest.mark.parametrize(
    ("ranks", "stages", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (4, 2, 10)]
)
def test_passes_of_interleaved_stages_have_the_order_of_torchs_schedule(
    ranks: int, stages: int, count: int
) -> None:
    schedule: Any = SimpleNamespace(
        n_local_stages=stages,
        microbatches_per_round=count // max(1, count // ranks),
        pp_group_size=ranks,
        _n_microbatches=count,
    )
    layout = ParallelLayout(
        shard=1,
        pipeline=ranks,
        pipeline_schedule=InterleavedScheduleConfig(stages_per_rank=stages),
    )
    for rank in range(ranks):
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)
        expected = [
            (one.stage_index // ranks, "BACKWARD" in one.computation_type.name)
            for one in actions
            if one is not None
        ]
        passes = list_passes(layout, rank, count, ())
        assert [(one.stage, one.is_backward) for one in passes] == expected
        last = Counter(one.stage for one in passes if one.is_last)
        assert last == Counter(range(stages))

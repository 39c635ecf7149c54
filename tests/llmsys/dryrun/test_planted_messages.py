"""Laws of expected messages: optimizers, rings, pipelines, capacities and repeated blocks send what
follows from their config, and planted mistakes are named.
"""

from math import ceil
from typing import Any

import pytest
import torch

from llmsys.config.optimizer import AdafactorConfig, SoapConfig
from llmsys.dryrun.expected_rings import list_distances
from llmsys.dryrun.expected_routing import drop_beyond_capacity
from llmsys.dryrun.expected_updates import assign_owners, list_state_shapes
from llmsys.parallel.distributed_muon import assign_matrices
from llmsys.parallel.ring_context import list_ring_distances
from tests.helpers.dry_runs import EXPERTS, WIDTH, run_planted, run_tiny

ONE_LAYER = "model.num_hidden_layers=1"
LOOPED = (
    "model.recurrence.kind=fixed",
    "model.position.kind=sinusoidal",
    "engine.reshard=after_forward",
)
RING = ("layout.context=4", "layout.context_kind=ring")
"""Ranks 0, 2, 4 and 6 of tensor rank 0 where layout.tensor is 2."""
CAPACITY = (
    *EXPERTS,
    "model.moe.routing.kind=capacity",
    "model.moe.routing.factor=0.5",
    "layout.expert=4",
)
HYBRID = (
    "model.layer_types=[linear_attention,full_attention]",
    "model.linear_attention.kind=gated_delta",
    "model.linear_attention.num_key_heads=2",
    "model.linear_attention.num_value_heads=8",
    "model.linear_attention.key_head_dim=8",
    "model.linear_attention.value_head_dim=4",
    "model.linear_attention.chunk_length=4",
    "model.attention.output_gate=true",
)
ALONE = (
    "model.layer_types=[full_attention,feed_forward]",
    "model.feed_forward_layers=[false,true]",
)
BESIDE = (*HYBRID, "model.linear_attention.kind=mamba2", "model.layer_types=[hybrid]")
AGREEING: list[tuple[tuple[str, ...], int]] = [
    ((*RING, "layout.tensor=2", "train.activation_checkpoint=full", ONE_LAYER), 5),
    (
        (
            "layout.context=8",
            "layout.context_kind=ulysses_ring",
            "model.num_key_value_heads=4",
            "model.num_attention_heads=4",
            "model.head_dim=16",
        ),
        3,
    ),
    (("optimizer.kind=muon", "layout.tensor=2", ONE_LAYER), 1),
    (("optimizer.kind=muon", *EXPERTS, "layout.expert=2", "layout.replicate=2", ONE_LAYER), 1),
    (("optimizer.kind=muon", "optimizer.neuron_beta=0.9", "layout.tensor=2", ONE_LAYER), 2),
    (
        (
            "optimizer.kind=muon",
            "optimizer.neuron_beta=0.9",
            *EXPERTS,
            "layout.expert=2",
            "layout.replicate=2",
            ONE_LAYER,
        ),
        3,
    ),
    (("optimizer.kind=adafactor", *EXPERTS, "layout.tensor=2", "layout.expert=4", ONE_LAYER), 7),
    (("optimizer.kind=soap", "layout.replicate=2", ONE_LAYER), 6),
    ((*CAPACITY, "model.moe.routing.factor=0.7", "optimizer.max_attention_logit=9"), 2),
    ((*EXPERTS, "model.moe.routing.kind=expert_choice", "layout.expert=2", ONE_LAYER), 1),
    (LOOPED, 0),
    ((*HYBRID, "layout.context=4", "train.activation_checkpoint=selective"), 3),
    ((*HYBRID, *RING, "train.activation_checkpoint=full"), 5),
    ((*HYBRID, *RING, "model.linear_attention.kind=mamba2"), 1),
    ((*HYBRID, *RING, "model.linear_attention.kind=kimi_delta"), 2),
    ((*ALONE, "layout.tensor=2", "train.activation_checkpoint=full"), 5),
    (
        (
            *HYBRID,
            *ALONE,
            "model.layer_types=[linear_attention,feed_forward]",
            "layout.context=4",
            "train.activation_checkpoint=full",
        ),
        1,
    ),
    ((*BESIDE, *RING, "train.activation_checkpoint=selective"), 2),
    (
        (
            *HYBRID,
            "layout.context=8",
            "layout.context_kind=ulysses_ring",
            "batch.attention_scope=window",
            "model.layer_types=[linear_attention,sliding_attention]",
            "model.sliding_window=9",
        ),
        2,
    ),
]


@pytest.mark.parametrize(("overrides", "rank"), AGREEING)
def test_messages_are_those_of_the_formula(overrides: tuple[str, ...], rank: int) -> None:
    result = run_tiny("train.compile=none", *overrides, rank=rank)
    check = result["collective_check"]
    assert (check["differences"], check["unchecked"]) == ([], [])
    # The rows are so short that a half of what a rank of a ring has is no prime to look for.
    has_ring = any(one.startswith("layout.context_kind=") for one in overrides)
    unchecked = ["tables of positions by positions"] if has_ring else []
    assert result["block_check"] == {"differences": [], "unchecked": unchecked}
    assert result["is_proven"]


# Gradients of keys go to the neighbour, whoever owns the keys.
GRADIENTS_ASTRAY = """
from llmsys.parallel.ring_attention import _Ring
start = _Ring.start_exchange
_Ring.start_exchange = lambda self, pair, distance: start(self, pair, max(distance, -1))
"""
WHOLE_MATRICES = """
from llmsys.parallel import distributed_muon
distributed_muon._find_split_axis = lambda part: None
"""
GATHERED_TWICE = """
from llmsys.engine import torch_engine
update = torch_engine.update_full_tensors
def gather_again(tensors, function):
    tensors[0].full_tensor()
    update(tensors, function)
torch_engine.update_full_tensors = gather_again
"""
ONE_SIDE = """
from llmsys.optim.matrix_optimizer import SoapRule
list_shapes = SoapRule.list_state_shapes
SoapRule.list_state_shapes = lambda self, shape: {
    key: found for key, found in list_shapes(self, shape).items() if "right" not in key
}
"""
NOTHING_DROPPED = """
from dataclasses import replace
from llmsys.model import moe_layer
moe_layer.drop_overflow = lambda routing, *arguments: replace(routing, partial=True)
"""
OWN_MAXIMA = """
from llmsys.engine import logit_clip
logit_clip.all_reduce_max = lambda maxima: maxima
"""
KEPT_WEIGHTS = """
from llmsys.parallel import parallelize
shard = parallelize.fully_shard
def keep_weights(module, **options):
    found = shard(module, **options)
    module.set_reshard_after_forward(False, recurse=False)
    return found
parallelize.fully_shard = keep_weights
"""
WRONG_SCHEDULE = """
from llmsys.parallel import pipeline
pipeline.Schedule1F1B = pipeline.ScheduleGPipe
"""
ALL = "(8 ranks: 0, 1, 2, 3, …)"
MATRIX_BYTES = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("plant", "overrides", "rank", "named"),
    [
        (
            GRADIENTS_ASTRAY,
            (*RING, "layout.tensor=2"),
            4,
            # 8 positions × 4 heads × 8 channels in bfloat16.
            [
                "too many: send over context (4 ranks: 0, 2, 4, 6) to rank 2, bfloat16, 512 bytes",
                "too few: send over context (4 ranks: 0, 2, 4, 6) to rank 0, bfloat16, 512 bytes",
                "too few: receive over context (4 ranks: 0, 2, 4, 6) from rank 0, bfloat16",
                "wrong order: messages of the ring",
            ],
        ),
        (
            WHOLE_MATRICES,
            ("optimizer.kind=muon",),
            0,
            [
                f"missing: all_to_all over world {ALL}, bfloat16",
                f"additional: all_gather over world {ALL}, bfloat16, {2 * WIDTH * WIDTH:,} bytes, "
                "optimizer: 4 calls, expected 0",
            ],
        ),
        (
            GATHERED_TWICE,
            ("optimizer.kind=adafactor",),
            3,
            # Weight and gradient of four projections, the row moments of embedding and head; and
            # the four weights once more.
            [
                f"too many: all_gather over world {ALL}, float32, {MATRIX_BYTES:,} bytes, "
                "optimizer: 14 calls, expected 10"
            ],
        ),
        (
            ONE_SIDE,
            ("optimizer.kind=soap",),
            3,
            # 64 × 64: four projections with weight, gradient, two moments, and preconditioner and
            # basis of two sides; and those of the side of 64 of three matrices of 64 × 96, which is
            # the right one of two.
            [
                f"too few: all_gather over world {ALL}, float32, {MATRIX_BYTES:,} bytes, "
                "optimizer: 26 calls, expected 38"
            ],
        ),
        (NOTHING_DROPPED, CAPACITY, 1, ["missing: all_to_all over expert (4 ranks: 0, 1, 2, 3)"]),
        (
            OWN_MAXIMA,
            ("optimizer.max_attention_logit=9", "train.compile=none"),
            1,
            # One layer of eight heads.
            [
                f"missing: all_reduce over world {ALL}, float32, 32 bytes, optimizer: 0 calls, "
                "expected 1"
            ],
        ),
        (
            KEPT_WEIGHTS,
            (*LOOPED, "model.num_hidden_layers=3"),
            0,
            # One block three times in a forward and three times in a backward.
            [
                "too few: all_gather over world",
                "each repeated micro-batch: 3 calls, expected 6",
            ],
        ),
        (
            WRONG_SCHEDULE,
            ("layout.pipeline=2",),
            0,
            [
                "wrong order: passes of the pipeline 3 is the forward of micro-batch 2 in stage 0, "
                "expected the backward of micro-batch 0 in stage 0"
            ],
        ),
    ],
    ids=["ring", "muon", "adafactor", "soap", "capacity", "logits", "looped", "pipeline"],
)
def test_a_planted_mistake_is_named(
    plant: str, overrides: tuple[str, ...], rank: int, named: list[str]
) -> None:
    layers = () if "layout.pipeline=2" in overrides else (ONE_LAYER,)
    result = run_planted(plant, *layers, *overrides, rank=rank)
    assert not result["is_proven"]
    assert result["fits"]
    text = "\n".join(result["collective_check"]["differences"])
    assert [one for one in named if one not in text] == []


def test_matrices_are_dealt_by_their_cost() -> None:
    shapes = [(64, 64)] * 4 + [(96, 64)] * 2 + [(64, 96), (8, 512)]
    found = assign_owners(shapes, 3)
    assert found == assign_matrices([torch.Size(shape) for shape in shapes], 3)
    load = [0] * 3
    for shape, owner in zip(shapes, found, strict=True):
        load[owner] += min(shape) ** 2 * max(shape)
    assert max(load) - min(load) <= 64 * 64 * 96


def test_state_of_matrix_optimizers_has_the_shapes_of_the_papers() -> None:
    assert list_state_shapes(AdafactorConfig(), (5,)) == [(5,)]
    assert list_state_shapes(AdafactorConfig(), (3, 5, 7)) == [(3, 5, 1), (3, 1, 7)]
    small = SoapConfig(max_precondition_size=6)
    assert list_state_shapes(small, (5, 7)) == [(5, 7), (5, 7), (5, 5), (5, 5)]


def test_a_capacity_keeps_the_first_of_each_group() -> None:
    """Six tokens that all choose expert 0 first, in groups of four and two: ceil(0.75 · T · 2 / 4)
    are two and one.
    """
    chosen_NK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [0, 2], [0, 3]])
    kept = drop_beyond_capacity(chosen_NK, [4, 2], 0.75, 4)
    assert kept.tolist() == [[0, 1], [0, 2], [-1, 3], [-1, 1], [0, 2], [-1, 3]]
    assert ceil(0.75 * 4 * 2 / 4) == 2


@pytest.mark.parametrize("window", [1, 4, 5, 9, 10, 33])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_window_hides_ranks_of_a_ring(window: int, ranks: int) -> None:
    """By positions: rank r has the chunks r and 2N - 1 - r."""
    length = 8 * ranks
    context: Any = _RingContext(ranks, length, window)
    owner = [min(at // 4, 2 * ranks - 1 - at // 4) for at in range(length)]
    seen = {
        (owner[query] - owner[key]) % ranks
        for query in range(length)
        for key in range(query + 1)
        if query - key < window
    }
    assert list_distances(context, 0) == tuple(sorted(seen - {0}))
    assert {0, *list_distances(context, 0)} == {*list_ring_distances(ranks, length, window, True)}


class _RingContext:
    """The parts of a rank's context that its ring follows from."""

    def __init__(self, ranks: int, length: int, window: int) -> None:
        self.length = length
        self.layout = type("Layout", (), {"ring_size": ranks})
        attention = type("Batch", (), {"attention_scope": "window"})
        model = type(
            "Model",
            (),
            {
                "family": "decoder",
                "has_linear_layers": False,
                "get_attention_window": lambda self, layer: window,
            },
        )()
        self.config = type("Config", (), {"batch": attention, "model": model})

"""Attention over a ring of 2 and 4 ranks against one process: outputs, gradients, and the order
of tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.model.attention_mask import DistributedMask
from llmsys.model.mask_builder import MaskBuilder, MaskInputs
from llmsys.model.scaled_dot_product import compute_attention
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.ring_context import RingMaskBuilder, compute_ring_order, list_ring_distances
from llmsys.parallel.sequence_sharding import SequenceSharding
from tests.helpers.ranks import run_ranks

ROWS, LENGTH, HEADS, GROUPS = 2, 64, 4, 2
ALIBI: dict[str, Any] = {"position": {"kind": "alibi"}}
SINKS: dict[str, Any] = {"attention": {"kind": "multi_head", "sinks": True}}
WINDOW: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention"]}
LATENT = {
    "kind": "latent",
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
EVERYTHING: dict[str, Any] = {
    "attention": {"kind": "multi_head", "sinks": True, "logit_softcap": 2.0},
    **ALIBI,
    **WINDOW,
}
# Ranks have neighbouring positions.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_attention": {"kind": "mamba2", "num_value_heads": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "causal, by flash attention": {},
    "one key-value head": {"num_key_value_heads": 1},
    "sinks": SINKS,
    "soft cap": {"attention": {"kind": "multi_head", "logit_softcap": 2.0}},
    "ALiBi": ALIBI,
    "window": WINDOW,
    "scale": {"attention": {"kind": "multi_head", "scale": 0.7}},
    "latent, values narrower than keys": {"attention": LATENT, "num_key_value_heads": HEADS},
    "both directions": {"family": "encoder", "head": {"kind": "mlm"}},
    "everything": EVERYTHING,
    "neighbours, by flash attention": HYBRID,
    "neighbours, everything": EVERYTHING
    | HYBRID
    | {"layer_types": ["linear_attention", "sliding_attention"]},
}
PLAIN = ("soft cap", "ALiBi", "scale", "sinks")  # with documents: see "everything"
CELLS = [
    (name, documents)
    for name in MODELS
    for documents in (False, True)
    if not (documents and name in PLAIN)
]


def build_config(name: str) -> tuple[ModelConfig, int]:
    """A model of one layer, and the width of its values."""
    shape = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": LENGTH,
    }
    config = ModelConfig.model_validate(shape | heads | MODELS[name])
    return config, getattr(config.attention, "v_head_dim", 8)


def build_documents() -> Tensor:
    """Documents of unequal lengths, some shorter than a ring, and padding."""
    lengths = [[1, 2, 30, 3, 17, 5, 6], [40, 24]]
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    documents_BT = torch.tensor(rows)
    documents_BT[0, -6:] = -1
    return documents_BT


def build_inputs(config: ModelConfig, width: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Queries, keys and values; the weights of the outputs in a loss; sinks."""
    draw = torch.Generator().manual_seed(5)
    sizes = (HEADS, 8), (config.num_key_value_heads, 8), (config.num_key_value_heads, width)
    given = [torch.randn(ROWS, LENGTH, *size, generator=draw) for size in sizes]
    weights = torch.randn(ROWS, LENGTH, HEADS, width, generator=draw)
    sinks_H = (
        torch.randn(HEADS, generator=draw) if getattr(config.attention, "sinks", False) else None
    )
    return given, weights, sinks_H


def attend(
    config: ModelConfig, given: list[Tensor], weights: Tensor, sinks_H: Tensor | None, mask: Any
) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    leaves = [x.clone().requires_grad_() for x in [*given, *([] if sinks_H is None else [sinks_H])]]
    q, k, v, *sinks = leaves
    scale, softcap = config.attention.scale, getattr(config.attention, "logit_softcap", None)
    out = compute_attention(
        q, k, v, mask, scale=scale, softcap=softcap, sinks_H=sinks[0] if sinks else None
    )
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def build_mask_inputs(documents_BT: Tensor | None) -> MaskInputs:
    return MaskInputs(LENGTH, torch.zeros(ROWS, LENGTH, 1), slice(None), documents_BT=documents_BT)


def compute_ring_errors(rank: int, cells: list[tuple[str, bool]]) -> list[tuple[str, int, float]]:
    """Each cell on both sizes of a ring: the largest difference from one process."""
    errors = []
    for context in (2, 4):
        layout = ParallelLayout(context=context, shard=4 // context, context_kind="ring")
        meshes = build_device_meshes(layout, torch.device("cpu"))
        for name, has_documents in cells:
            config, width = build_config(name)
            with torch.device("meta"):
                sharding = SequenceSharding(Transformer(config).train(), meshes)
            documents_BT = build_documents() if has_documents else None
            sharding.set_ring_order(
                compute_ring_order(
                    documents_BT,
                    LENGTH,
                    context,
                    torch.device("cpu"),
                    is_dealt=not config.has_linear_layers,
                )
            )
            own_PL = sharding.get_ring_positions()[:, sharding.ring.rank].expand(ROWS, -1)
            given, weights, sinks_H = build_inputs(config, width)
            inputs, builder = build_mask_inputs(documents_BT), MaskBuilder(config)
            (mask,) = builder.build_self_masks(inputs).values()
            (ring_mask,) = RingMaskBuilder(builder, sharding).build_self_masks(inputs).values()
            assert isinstance(ring_mask, DistributedMask)

            def select(x: Tensor, own_PL: Tensor = own_PL) -> Tensor:
                return x[torch.arange(ROWS)[:, None], own_PL]

            expected = attend(config, given, weights, sinks_H, mask)
            found = attend(config, [select(x) for x in given], select(weights), sinks_H, ring_mask)
            # A compiled block takes them to be so.
            assert all(gradient.is_contiguous() for gradient in found[1:4]), name
            for sum_over_ranks in found[4:]:
                torch.distributed.all_reduce(sum_over_ranks, group=sharding.ring.group)
            worst = max(
                float((ours - (select(theirs) if ours.dim() == 4 else theirs)).abs().max())
                for ours, theirs in zip(found, expected, strict=True)
            )
            errors.append((f"{name}, documents={has_documents}, ring of {context}", width, worst))
    return errors


@pytest.mark.distributed
def test_a_ring_computes_what_one_process_does() -> None:
    """1e-5 in fp32, forward and backward, for every combination that the config accepts."""
    for errors in run_ranks(compute_ring_errors, 4, CELLS):
        assert len(errors) == 2 * len(CELLS)
        for title, _, error in errors:
            assert error < 1e-5, f"{title}: {error:.1e}"


def test_every_rank_has_the_same_share_of_the_work() -> None:
    """Tokens exactly, visible pairs but for the first few tokens of each document."""
    documents_BT, places_T = build_documents(), torch.arange(LENGTH)
    for given in (documents_BT, None):
        numbers_BT = torch.zeros(ROWS, LENGTH, dtype=torch.long) if given is None else given
        visible_BTT = (numbers_BT[:, :, None] == numbers_BT[:, None, :]) & (
            places_T[None, :] <= places_T[:, None]
        )
        pairs_BT = visible_BTT.sum(-1)
        for ranks in (2, 4):
            order_BT = compute_ring_order(given, LENGTH, ranks, torch.device("cpu")).expand(
                ROWS, -1
            )
            assert torch.equal(order_BT.sort(dim=1).values, places_T.expand(ROWS, -1))
            own_BNL = order_BT.unflatten(1, (ranks, -1))
            assert bool((own_BNL.diff(dim=-1) > 0).all())
            work_BN = pairs_BT.gather(1, order_BT).unflatten(1, (ranks, -1)).sum(-1)
            spread_B = work_BN.amax(1) - work_BN.amin(1)
            assert int(spread_B.max()) <= (0 if given is None else 4 * ranks)


@pytest.mark.parametrize("is_dealt", [True, False], ids=["dealt", "neighbours"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 8, 9, 10, 17, 63])
def test_a_window_leaves_out_exactly_the_steps_that_see_nothing(
    window: int, causal: bool, is_dealt: bool
) -> None:
    for ranks in (1, 2, 4, 8):
        chunk = LENGTH // (2 * ranks)
        order_T = compute_ring_order(None, LENGTH, ranks, torch.device("cpu"), is_dealt=is_dealt)[0]
        owner = {int(place): index // (2 * chunk) for index, place in enumerate(order_T)}
        seen = {
            (owner[query] - owner[key]) % ranks
            for query in range(LENGTH)
            for key in range(LENGTH)
            if abs(query - key) < window and (key <= query or not causal)
        }
        assert set(list_ring_distances(ranks, LENGTH, window, causal, is_dealt)) == seen
    assert list_ring_distances(8, LENGTH, None, causal) == tuple(range(8))

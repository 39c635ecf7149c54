"""Compiled blocks against plain ones, on two ranks: gradients in fp32, graphs, graph breaks, and
further steps.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.parallel.block_wrapping import wrap_blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded_steps import (
    ROWS,
    build_named_batch,
    build_sharded_engine,
    check_gradients,
    collect_gradients,
    compute_plain_gradients,
)
from tests.helpers.tiny_model import build_tiny_model, build_tiny_moe_config, build_tiny_tokens

EXPERTS = "experts, evenness over the batch"
MANY = "experts, latent attention, multi-token prediction"


class Compilation(NamedTuple):
    """Graphs after each step, graph breaks, and frames that dynamo gave up."""

    graphs: list[int]
    breaks: int
    skipped: int


# Model, layout, recomputation, and the number of graphs: kinds of blocks × pieces.
CASES: list[tuple[str, ParallelLayout, str, int]] = [
    ("llama", ParallelLayout(context=2), "selective", 1),
    ("llama", ParallelLayout(context=2, context_kind="ring"), "selective", 1),
    (EXPERTS, ParallelLayout(expert=2), "full", 5),
    ("llama", ParallelLayout(tensor=2), "full", 1),
    (EXPERTS, ParallelLayout(tensor=2), "full", 5),
    (MANY, ParallelLayout(tensor=2, expert=2), "selective", 6),
    ("fp8, experts", ParallelLayout(tensor=2, expert=2), "selective", 5),
]


def turn_rows(batch: Batch, by: int) -> Batch:
    """The same batch with its rows in another order: other documents in every row."""
    tensors = ("tokens_BT", "targets_BT", "documents_BT")
    return replace(batch, **{name: getattr(batch, name).roll(by, 0) for name in tensors})


def train_compiled(rank: int) -> list[tuple[dict[str, Any], Compilation]]:
    """The gradients of a first step of each case, and what two steps with other documents
    compile.
    """
    counters, found = torch._dynamo.utils.counters, []
    for name, layout, recompute, _ in CASES:
        torch._dynamo.reset()
        counters.clear()
        engine = build_sharded_engine(name, layout, recompute, compiled="aot_eager")  # type: ignore[arg-type]
        gradients = collect_gradients(rank, engine, name, layout)
        graphs = [counters["stats"]["unique_graphs"]]
        rows = ROWS // layout.resolve(2, engine.module.config).data_parallel_size
        for step in (1, 2):
            engine.train_step([turn_rows(build_named_batch(name, 0, rows), step)], 1e-3)
            graphs.append(counters["stats"]["unique_graphs"])
        frames = counters["frames"]
        compilation = Compilation(
            graphs, len(counters["graph_break"]), frames["total"] - frames["ok"]
        )
        found.append(({key: value.numpy() for key, value in gradients.items()}, compilation))
    return found


@pytest.mark.distributed
def test_compiled_blocks_agree_on_two_ranks_and_are_compiled_once() -> None:
    for case, (found, compilation) in zip(CASES, run_ranks(train_compiled, 2)[0], strict=True):
        name, *_, graphs = case
        assert compilation == Compilation([graphs] * 3, 0, 0), case
        # Sums in another order move a few values to the next of fp8.
        check_gradients(case, found, compute_plain_gradients(name), 2e-4 if "fp8" in name else 2e-5)


def test_a_forward_of_ddp_compiles_the_graphs_that_its_recomputation_runs() -> None:
    """torch would cut graphs inside that forward, and not in the pass that repeats it."""
    choice = {"num_shared_experts": 1, "routing": {"kind": "expert_choice", "factor": 1.0}}
    model = build_tiny_model(build_tiny_moe_config(choice)).train()
    tokens = build_tiny_tokens(2, 8, 37)
    parameters = list(model.parameters())
    plain = model(tokens)
    expected = [plain, *torch.autograd.grad(plain.square().mean(), parameters)]
    torch._dynamo.reset()
    wrap_blocks(model, "selective", compiles=True, backend="aot_eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replicated = DistributedDataParallel(model)
        logits = replicated(tokens)
        logits.square().mean().backward()
    finally:
        dist.destroy_process_group()
    found = [logits, *(parameter.grad for parameter in parameters)]
    for value, true in zip(found, expected, strict=True):
        torch.testing.assert_close(value, true)

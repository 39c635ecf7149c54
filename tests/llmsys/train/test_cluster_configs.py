"""The configs for real clusters: legal, small enough for their devices, and sharded over all of
them in a dry run.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmsys.config.loading.load import load_run_config
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.named_layout import NamedLayout, find_layout_violations, parse_layout
from llmsys.estimate.plan.layout_check import estimate_layout_fit
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.parallelize import apply_expert_parallel, apply_fsdp
from llmsys.train.build_engine import build_model
from llmsys.train.build_objective import build_run_plan

CLUSTERS = {
    "llama-8b-8xh100": (8, "h100-sxm"),
    "llama-8b-64xh100": (64, "h100-sxm"),
    "qwen3-30b-a3b-64xh100": (64, "h100-sxm"),
    "llama-1b-1xh200": (1, "h200"),
    "olmoe-1b-7b-1xh200": (1, "h200"),
}
PADDING = 0.02
"""Share of a rank's parameters that uneven splits may add."""


@pytest.fixture
def fake_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many ranks, of which this process is the first and the only one."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "ranks", "device"), [(name, *where) for name, where in CLUSTERS.items()]
)
def test_a_config_passes_the_judgement_of_plan(name: str, ranks: int, device: str) -> None:
    config = load_run_config(f"train/{name}")
    layout = config.resolve_layout(ranks)
    named = NamedLayout(
        layout.tensor, layout.context, 1, layout.expert, layout.replicate, layout.shard
    )
    assert list(find_layout_violations(config, named, ranks, with_batch=True)) == []
    found = estimate_layout_fit(config, named, ClusterCosts(device=device, devices=ranks))
    assert found.fits, found.memory
    build_run_plan(config, layout.data_parallel_size, 0)


@pytest.mark.parametrize(
    ("name", "fake_ranks"),
    [(name, ranks) for name, (ranks, _) in CLUSTERS.items()],
    indirect=["fake_ranks"],
)
def test_a_config_is_sharded_evenly_over_a_fake_group_of_its_size(
    name: str, fake_ranks: int
) -> None:
    config = load_run_config(f"train/{name}")
    model = build_model(config)
    meshes = build_device_meshes(config.resolve_layout(fake_ranks), torch.device("cpu"))
    apply_expert_parallel(model, meshes)
    apply_fsdp(model, meshes, torch.bfloat16)
    local = sum(math.prod(p.to_local().shape) for p in model.parameters() if isinstance(p, DTensor))
    share = count_parameters(config.model).total / fake_ranks
    assert share <= local <= share * (1 + PADDING)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "text", ["shard=32,expert=8,context=2", "shard=32 x expert=8 x cp=2", "dp=32 ep=8 × context=2"]
)
def test_a_layout_may_be_written_with_any_of_its_names(text: str) -> None:
    assert parse_layout(text) == NamedLayout(shard=32, expert=8, context=2)

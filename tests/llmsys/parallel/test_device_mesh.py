"""Every sub-mesh is a view of one root, and its groups are the ranks that share the other axes'
indices.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.parallel.device_mesh import build_device_meshes

RANK, RANKS = 17, 24


@pytest.fixture(autouse=True)
def _fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


# Rank 17 of replicate=2 × shard=3 × context=2 × tensor=2 has the indices (1, 1, 0, 1).
AXES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "context": lambda rank: (rank // 4, rank % 2),
    "tensor": lambda rank: (rank // 2,),
    "sequence": lambda rank: (rank // 4,),
    "expert": lambda rank: (rank // 4,),
}


def build(**sizes: int) -> dict[str, object]:
    return vars(build_device_meshes(ParallelLayout(**sizes), torch.device("cpu")))


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_holds_the_ranks_with_equal_other_indices(axis: str) -> None:
    mesh = build(replicate=2, shard=3, context=2, tensor=2, expert=4)[axis]
    assert isinstance(mesh, dist.DeviceMesh)
    index = AXES[axis]
    assert dist.get_process_group_ranks(mesh.get_group()) == [
        r for r in range(RANKS) if index(r) == index(RANK)
    ]


@pytest.mark.parametrize("sizes", [
    {"shard": 24}, {"replicate": 4, "shard": 6, "expert": 3}, {"shard": 4, "tensor": 6,
        "expert": 4},
    {"replicate": 2, "shard": 3, "context": 2, "tensor": 2, "expert": 4},
    {"shard": 3, "context": 4, "tensor": 2, "context_kind": "ulysses_ring"},
    {"shard": 6, "context": 4, "context_kind": "ring"},
])  # fmt: skip
def test_all_meshes_share_one_root(sizes: dict[str, int]) -> None:
    meshes = [mesh for mesh in build(**sizes).values() if isinstance(mesh, dist.DeviceMesh)]
    assert len({id(mesh._get_root_mesh()) for mesh in meshes}) == 1


def test_axes_of_one_rank_have_no_mesh() -> None:
    meshes = build(shard=24)
    assert [name for name, mesh in meshes.items() if mesh is None] == [
        "expert_fsdp", "expert", "context", "ring", "ulysses", "tensor", "member", "sequence",
        "pipeline",
    ]  # fmt: skip
    assert meshes["replica"] is meshes["dense"]

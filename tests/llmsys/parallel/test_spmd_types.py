"""Sums over tensor ranks are where they must be: proven by types of shardings (spmd-types), in one
process.

Only what is written in plain operations can be typed so: the layers of a feed-forward, not the
kernels of attention, and no sum of gradients that FSDP or the end of a step makes.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmsys.parallel import sequence_sharding
from llmsys.parallel.sequence_sharding import SequenceSharding
from llmsys.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.helpers.fake_ranks import pretend_ranks

spmd: Any = pytest.importorskip("spmd_types")
checker: Any = pytest.importorskip("spmd_types.checker")
WIDTH, INNER, POSITIONS = 8, 16, 4
# Of the library's calls into torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with pretend_ranks(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))


@pytest.fixture(autouse=True)
def typed_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives with the types of their docstrings, by the library's own."""

    def all_gather(x: Tensor, group: Any, dim: int) -> Tensor:
        return cast(Tensor, spmd.all_gather(x, group, src=spmd.S(dim), dst=spmd.R))

    def reduce_scatter(x: Tensor, group: Any, dim: int) -> Tensor:
        return cast(Tensor, spmd.reduce_scatter(x, group, src=spmd.P, dst=spmd.S(dim)))

    def all_reduce(x: Tensor, group: Any) -> Tensor:
        return cast(Tensor, spmd.all_reduce(x, group, src=spmd.P, dst=spmd.R))

    for function in (all_gather, reduce_scatter, all_reduce):
        monkeypatch.setattr(sequence_sharding, function.__name__, function)


def build_sharding(mesh: DeviceMesh, *, training: bool) -> SequenceSharding:
    """The sharding of the first of two tensor ranks."""
    sharding = SequenceSharding.__new__(SequenceSharding)
    sharding._model = cast(Any, SimpleNamespace(training=training))
    sharding.tensor = sharding.sequence = cast(
        Any, SimpleNamespace(size=2, rank=0, group=mesh.get_group("tensor"))
    )
    return sharding


def check_feed_forward(mesh: DeviceMesh, *, training: bool, bias: bool) -> tuple[Any, Any]:
    """Type a norm, both products and the residual sum; return the type and the sharding of the
    result.
    """
    group, sharding = mesh.get_group("tensor"), build_sharding(mesh, training=training)
    up, down = nn.Linear(WIDTH, INNER // 2, bias=bias), nn.Linear(INNER // 2, WIDTH, bias=bias)
    with spmd.set_current_mesh(mesh), checker.typecheck(local=False):
        x, norm = torch.randn(POSITIONS, WIDTH), torch.ones(WIDTH)
        spmd.assert_type(x, {group: spmd.S(0) if training else spmd.R})
        spmd.assert_type(norm, {group: spmd.R})
        spmd.assert_type(up.weight, {group: spmd.S(0)})
        spmd.assert_type(down.weight, {group: spmd.S(1)})
        if bias:
            spmd.assert_type(up.bias, {group: spmd.S(0)})
            spmd.assert_type(down.bias, {group: spmd.R})
        inner = ColumnParallelLinear(up)(sharding.enter_column_parallel(x * norm, 0))
        y = x + RowParallelLinear(down, sharding, 0)(torch.relu(inner))
        return spmd.get_local_type(y)[spmd.MeshAxis.of(group)], spmd.get_partition_spec(y)


@pytest.mark.parametrize("bias", [True, False])
def test_a_feed_forward_of_tensor_ranks_sums_once_what_each_rank_has_a_part_of(
    mesh: DeviceMesh, bias: bool
) -> None:
    kind, places = check_feed_forward(mesh, training=True, bias=bias)
    assert kind is spmd.V
    assert places is not None
    assert places[1] is None
    # In evaluation every rank has all positions, and the same result.
    kind, _ = check_feed_forward(mesh, training=False, bias=bias)
    assert kind is spmd.R


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("exit_row_parallel", lambda self, y, dim: y.chunk(2, dim)[0]),
        ("enter_column_parallel", lambda self, x, dim: x),
    ],
)
def test_a_collective_that_is_left_out_has_no_type(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, method: str, wrong: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(SequenceSharding, method, wrong)
    with pytest.raises(spmd.SpmdTypeError):
        check_feed_forward(mesh, training=True, bias=True)

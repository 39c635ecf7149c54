"""A plan of a save: what the ranks hold together must fill every tensor."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmsys.errors import CheckpointError
from llmsys.parallel.control_group import ControlGroup
from llmsys.train.checkpoint_plan import RankPlanner
from tests.helpers.ranks import run_ranks


def plan_saves(rank: int, cases: list[tuple[int, ...]]) -> list[list[int] | str]:
    """For each case the numbers that this rank writes of 8 rows over two ranks, of which
    `holders` give theirs.
    """
    mesh, control_group = init_device_mesh("cpu", (2,)), ControlGroup()
    found: list[list[int] | str] = []
    for holders in cases:
        rows = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])
        tensors = {"parameter/rows": rows} if rank in holders else {}
        try:
            planner = RankPlanner(tensors | {"parameter/whole": torch.zeros(5)}, control_group)
        except CheckpointError as error:
            found.append(str(error))
        else:
            chunks = [item.tensor_data for item in planner.create_local_plan().items]
            found.append([data.chunk.sizes.numel() for data in chunks if data is not None])
    return found


@pytest.mark.distributed
def test_a_save_is_refused_on_every_rank_where_a_rank_lacks_its_part_of_a_tensor() -> None:
    by_rank = run_ranks(plan_saves, 2, [(0, 1), (0,), (1,)])
    assert sorted(by_rank[0][0] + by_rank[1][0]) == [5, 12, 12]
    for _, without_second, without_first in by_rank:
        # The first chunk of a tensor tells its size.
        assert without_second.startswith(
            "the ranks hold 17 numbers of tensors with 29. Report this with the layout"
        )
        assert without_first.startswith(
            "the ranks hold 17 numbers of tensors with 5. Report this with the layout"
        )

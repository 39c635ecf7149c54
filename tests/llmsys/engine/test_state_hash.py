"""The hash of a state: equal for equal bits in any layout, and another one for any change."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llmsys.engine.engine import EngineState
from llmsys.engine.state_hash import hash_state
from llmsys.errors import LlmsysError
from llmsys.parallel.dtensor_slices import to_dtensor_shard
from llmsys.parallel.process_group import init_process_group
from tests.helpers.ranks import run_ranks


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "parameter/w": (6, 4, 8),
        "first_moment/w": (6, 4, 8),
        "parameter/n": (5,),
        "buffer/b": (),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hash_after(change: str) -> str:
    state = EngineState(tensors(), 3)
    weight = state.tensors["parameter/w"]
    if change == "one bit":
        weight.view(torch.int32)[2, 1, 3] ^= 1
    elif change == "a swap":
        weight[0], weight[1] = weight[1].clone(), weight[0].clone()
    elif change == "a sign of zero":
        weight[0] = 0.0
        weight[0, 0, 0] = -0.0
    elif change == "zeros":
        weight[0] = 0.0
    elif change == "names":
        state.tensors = {
            name: state.tensors[other]
            for name, other in zip(tensors(), reversed(tensors()), strict=True)
        }
    elif change == "steps":
        state.steps = 4
    return hash_state(state)


def test_every_change_shows() -> None:
    changes = ["nothing", "one bit", "a swap", "zeros", "a sign of zero", "names", "steps"]
    assert len({hash_after(change) for change in changes}) == len(changes)
    assert hash_after("nothing") == hash_after("no change at all")


def shared_out(rank: int) -> list[str]:
    """The hashes of one state in several layouts, and what is said when replicas differ."""
    world = init_device_mesh("cpu", (2,))
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    plain, name = tensors(), "parameter/w"
    layouts = [
        plain,
        plain
        | {name: to_dtensor_shard(plain[name], world) for name in ("parameter/w", "parameter/n")},
        *(
            plain | {name: distribute_tensor(plain[name], world, [how])}
            for how in (Replicate(), Shard(1), Shard(2))
        ),
        # Copies that only the place of their ranks tells apart, as FSDP makes them where replicas
        # are none of its axes.
        plain
        | {name: DTensor.from_local(plain[name], copies["shard"], [Shard(0)], run_check=False)},
    ]
    found = [hash_state(EngineState(layout, 3)) for layout in layouts]
    broken = tensors()
    broken["parameter/n"][0] += float(rank == 1)
    with pytest.raises(LlmsysError) as failure:
        hash_state(EngineState(broken, 3))
    return [*found, str(failure.value)]


@pytest.mark.distributed
def test_one_hash_in_every_layout_and_copies_that_differ_are_named() -> None:
    *found, message = run_ranks(shared_out, 2)[0]
    assert set(found) == {hash_after("nothing")}
    assert message.startswith("parameter/n: ranks 0 and 1 hold the same shard with different bits")
    assert "Resume from the last checkpoint" in message


def test_a_group_of_one_gives_the_same() -> None:
    with init_process_group():
        assert hash_after("nothing") == hash_after("no change at all")

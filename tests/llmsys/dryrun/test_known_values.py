"""Laws of known numbers: integer operations on fake tensors agree with the same operations on
real ones.
"""

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode

from llmsys.dryrun.known_values import (
    attach_known,
    attach_outputs,
    compute_known,
    get_known,
)
from llmsys.dryrun.operation_watch import OperationWatch
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.parallel.collectives import collectives
from tests.helpers.fake_ranks import pretend_ranks


def count_and_sort(experts: Tensor) -> list[Tensor]:
    counts = torch.zeros(4, dtype=torch.int64).scatter_add_(0, experts, torch.ones_like(experts))
    order = experts.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    owners = torch.repeat_interleave(torch.arange(4), counts)
    # The number in `where` is a tensor to torch, made by a factory.
    chosen = torch.where(experts > 1, experts, 0).cummax(0).values
    return [
        counts,
        order,
        inverse,
        owners,
        experts[experts > 1],
        counts.cumsum(0).to(torch.int32),
        chosen,
    ]


def test_integers_are_known_and_sizes_follow_from_them() -> None:
    experts = torch.tensor([3, 1, 1, 0, 3])
    expected = count_and_sort(experts)
    with FakeTensorMode(allow_non_fake_inputs=True), OperationWatch(DryRunRecorder()):
        fake = torch.empty(5, dtype=torch.int64)
        attach_known(fake, experts)
        found = count_and_sort(fake)
        assert int(found[0].sum()) == 5
    for value, reference in zip(found, expected, strict=True):
        assert value.shape == reference.shape
        known = get_known(value)
        assert known is not None
        assert torch.equal(known, reference)


def test_what_an_unknown_tensor_is_written_into_becomes_unknown() -> None:
    with FakeTensorMode(), OperationWatch(DryRunRecorder()):
        counts = torch.zeros(4, dtype=torch.int64)
        assert get_known(counts) is not None
        unknown = torch.randn(4).long()
        counts += unknown
        assert get_known(unknown) is None
        assert get_known(counts) is None
        assert float(unknown.sum()) == 1  # a number that nothing depends on


def test_a_mask_without_numbers_keeps_every_row() -> None:
    with FakeTensorMode(), OperationWatch(DryRunRecorder()):
        x = torch.randn(6, 3)
        assert x[x[:, 0] > 0].shape == (6, 3)


def wait_for_rows() -> tuple[Tensor, Tensor]:
    pending = collectives.all_to_all_single(
        torch.zeros(2, 3), [1, 1], [1, 1], distributed.group.WORLD.group_name
    )
    return pending, collectives.wait_tensor(pending)


def test_rows_that_arrive_take_no_second_place_in_memory() -> None:
    with pretend_ranks(2):
        pending, arrived = wait_for_rows()
        assert arrived.data_ptr() == pending.data_ptr()
        with FakeTensorMode(), OperationWatch(DryRunRecorder()):
            pending, arrived = wait_for_rows()
            assert arrived.untyped_storage()._cdata == pending.untyped_storage()._cdata


def test_known_numbers_have_the_layout_of_their_fake_tensor() -> None:
    values = torch.arange(6.0).view(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty_strided((2, 3), (1, 2))
    attach_outputs(fake, values)
    known = get_known(fake)
    assert known is not None
    assert known.stride() == (1, 2)
    assert torch.equal(known, values)


def test_what_a_cpu_has_no_kernel_for_is_unknown() -> None:
    """Activations of a tiny model are known, and flash attention is a kernel of CUDA devices."""
    x_BTHK = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)
    seed = torch.zeros(2, dtype=torch.int64)
    operations = torch.ops.aten
    flash = (*[x_BTHK] * 5, torch.ones(1, 2, 4), None, None, 4, 4, 0.0, True, seed, seed)
    # the forward draws random numbers, which are unknown anyway
    assert compute_known(operations._flash_attention_backward.default, flash, {}, [x_BTHK]) is None
    total = compute_known(operations.add.Tensor, (x_BTHK, x_BTHK), {}, [x_BTHK])
    assert torch.equal(total, 2 * x_BTHK)

"""Check every collective that the engines use, on known numbers, and measure its bandwidth."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.calibrate.benchmarks import measure_median_seconds
from llmsys.doctor.check_row import CheckRow, build_row
from llmsys.parallel.process_group import (
    all_gather_object,
    all_gather_tensor,
    all_reduce_max,
    run_on_rank_zero,
)

# Bytes of a rank's tensor, by kind of device.
MEASURED_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


@dataclass(frozen=True)
class CollectiveCase:
    """A collective.

    Attributes:
        name: with the dtype.
        call: (this rank's tensor, of equal parts for each rank) → the result. Collective.
        expect: (tensors of all ranks, rank) → the right result, exactly.
        share: bytes that a rank sends over its tensor's, of N ranks, as a ring or an exchange does.
        dtype: of the tensor.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    expect: Callable[[list[Tensor], int], Tensor]
    share: Callable[[int], float]
    dtype: torch.dtype = torch.float32


def _reduce_scatter(x: Tensor) -> Tensor:
    part = x.new_empty(x.numel() // dist.get_world_size())
    dist.reduce_scatter_single(part, x)
    return part


def _exchange_evenly(x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def _count_sent(part: int, rank: int, ranks: int) -> list[int]:
    """Return the elements that a rank sends to each other one: more to later ranks, none to the
    first.
    """
    return [part * (to + rank) // (2 * ranks) for to in range(ranks)]


def _exchange_unevenly(x: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = x.numel() // ranks
    sent = _count_sent(part, rank, ranks)
    received = [_count_sent(part, source, ranks)[rank] for source in range(ranks)]
    pieces = torch.cat([whole[:count] for whole, count in zip(x.split(part), sent, strict=True)])
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, pieces, received, sent)
    return out


def _compute_uneven_parts(tensors: list[Tensor], rank: int) -> Tensor:
    ranks, part = len(tensors), tensors[0].numel() // len(tensors)
    pieces = [
        x.split(part)[rank][: _count_sent(part, source, ranks)[rank]]
        for source, x in enumerate(tensors)
    ]
    return torch.cat(pieces)


def _send_to_next_rank(x: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, op)
    return total


def _reduce_max(x: Tensor) -> Tensor:
    return _reduce(x, dist.ReduceOp.MAX)


CASES = (
    CollectiveCase(
        "all-reduce, fp32", _reduce, lambda xs, _: sum(xs[1:], xs[0]), lambda n: 2 * (n - 1) / n
    ),
    CollectiveCase(
        "all-reduce, bf16",
        _reduce,
        lambda xs, _: sum(xs[1:], xs[0]),
        lambda n: 2 * (n - 1) / n,
        torch.bfloat16,
    ),
    CollectiveCase(
        "all-reduce, maximum",
        _reduce_max,
        lambda xs, _: torch.stack(xs).amax(0),
        lambda n: 2 * (n - 1) / n,
    ),
    CollectiveCase(
        "all-gather, bf16",
        all_gather_tensor,
        lambda xs, _: torch.stack(xs),
        lambda n: n - 1,
        torch.bfloat16,
    ),
    CollectiveCase(
        "reduce-scatter, fp32",
        _reduce_scatter,
        lambda xs, rank: sum(xs[1:], xs[0]).chunk(len(xs))[rank],
        lambda n: (n - 1) / n,
    ),
    CollectiveCase(
        "all-to-all, bf16",
        _exchange_evenly,
        lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs]),
        lambda n: (n - 1) / n,
        torch.bfloat16,
    ),
    CollectiveCase(
        "all-to-all, uneven", _exchange_unevenly, _compute_uneven_parts, lambda n: (n - 1) / n / 2
    ),
    CollectiveCase(
        "send and receive", _send_to_next_rank, lambda xs, rank: xs[rank - 1], lambda n: 1.0
    ),
)


def check_collectives(device: torch.device) -> list[CheckRow]:
    """Check and measure every collective between all ranks. Collective.

    Args:
        device: device of this rank.

    Returns:
        A row for each collective; one row "not run" for a single rank.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return [
            CheckRow(
                "collectives", "all", "not run", "one rank has nobody to send to: use --processes"
            )
        ]
    rows = [_check_case(case, device, rank, ranks) for case in CASES]
    objects = all_gather_object({"rank": rank}) == [{"rank": one} for one in range(ranks)]
    text = run_on_rank_zero(lambda: "a text of rank 0") == "a text of rank 0"
    right = "right" if objects and text else "wrong"
    return [
        *rows,
        build_row(
            "collectives", "objects", objects and text, f"{right}: gathered and broadcast by gloo"
        ),
    ]


def _check_case(case: CollectiveCase, device: torch.device, rank: int, ranks: int) -> CheckRow:
    part = MEASURED_BYTES[device.type] // case.dtype.itemsize // ranks
    # Small integers: sums are exact in bf16, whatever their order.
    tensors = [(torch.arange(part * ranks) * (one + 3) % 7).to(case.dtype) for one in range(ranks)]
    mine = tensors[rank].to(device)
    try:
        is_right = torch.equal(case.call(mine).cpu(), case.expect(tensors, rank))
    except (RuntimeError, ValueError) as error:
        return build_row(
            "collectives", case.name, False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        )
    # Fixed repeats: a rank that stopped earlier would leave the others waiting.
    seconds = torch.tensor(
        [measure_median_seconds(lambda: case.call(mine), device, budget_seconds=0.0)], device=device
    )
    slowest = float(all_reduce_max(seconds))
    bandwidth = case.share(ranks) * mine.nbytes / slowest
    text = (
        f"{'right' if is_right else 'wrong numbers'}; {bandwidth / 1e9:.3g} GB/s sent by each rank"
    )
    return build_row(
        "collectives", case.name, is_right, text, bytes_per_second=bandwidth, seconds=slowest
    )

"""float32 masters in shards for weights that every rank holds whole (ZeRO-1).

Once a step the float32 sums of gradients are reduce-scattered, each rank steps its shards, and the
weights are all-gathered in their own dtype: six bytes of messages a parameter and step, however
many micro-batches there are (Rajbhandari 2019, arXiv:1910.02054, section 7).

Invariants:
- A master is cut as FSDP2 cuts it: checkpoints, matrix optimizers and hashes cannot tell them
  apart.
- A shard is summed over ranks in the order of FSDP2's reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.model.initialization import Initializer
from llmsys.parallel.collectives import CustomReduceScatter, PairwiseReduceScatter
from llmsys.parallel.dtensor_slices import get_local_region

# W ranks, K elements of a bucket that one rank keeps

# Elements of a message, over all ranks: 256 MiB of float32 and as much for what is kept.
BUCKET = 1 << 26


def build_sharded_master(
    name: str, weight: Tensor, mesh: DeviceMesh, dim: int, initial: Initializer
) -> nn.Parameter:
    """Build this rank's shard of the float32 master of a weight, with its initial values.

    Args:
        name: Name of the parameter.
        weight: The whole weight; only its shape and device are read.
        mesh: The ranks that share the master, one axis.
        dim: Dim along which it is cut, as by `Shard`.
        initial: Computes initial values.

    Returns:
        A DTensor parameter.
    """
    placements = [Shard(dim)]
    shape, _ = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    master = DTensor.from_local(
        torch.empty(tuple(shape), dtype=torch.float32, device=weight.device),
        mesh,
        placements,
        run_check=False,
        shape=weight.shape,
        stride=torch.empty(weight.shape, device="meta").stride(),
    )
    master.to_local().copy_(initial(name, weight.shape, get_local_region(master)))
    return nn.Parameter(master, requires_grad=weight.requires_grad)


@dataclass(frozen=True)
class _Slot:
    """The place of a parameter in a bucket: `size` elements of each rank from `begin` on."""

    number: int
    begin: int
    size: int
    dim: int

    def list_parts(self, whole: Tensor, bucket_WK: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the pieces of a whole tensor with their places in a bucket, one for each rank
        that has a piece.
        """
        pieces = whole.chunk(len(bucket_WK), dim=self.dim)
        return [
            (piece, row[self.begin : self.begin + piece.numel()].view(piece.shape))
            for piece, row in zip(pieces, bucket_WK, strict=False)
        ]

    def select_local(self, local: Tensor, own_K: Tensor) -> Tensor:
        """Return the place of this rank's shard in its part of a bucket."""
        return own_K[self.begin : self.begin + local.numel()].view(local.shape)


class MasterShards:
    """The exchanges between whole weights and the shards of their masters.

    Args:
        weights: Whole weights, in the order of the masters.
        masters: Shards, see `build_sharded_master`.
        dims: Dim along which each is cut.
        mesh: The ranks that share the masters, one axis.
        reduce: How gradients are reduced; None: the library's reduce-scatter, under gloo a pairwise
            exchange.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        masters: Sequence[nn.Parameter],
        dims: Sequence[int],
        mesh: DeviceMesh,
        *,
        reduce: CustomReduceScatter | None = None,
    ) -> None:
        self._weights = list(weights)
        self._masters = list(masters)
        self._ranks = mesh.size()
        self._group = mesh.get_group()
        if reduce is None and mesh.device_type == "cpu":
            # gloo's reduce-scatter is an all-reduce.
            reduce = PairwiseReduceScatter()
        self._reduce = reduce
        self._buckets = _fill_buckets(weights, dims, self._ranks)

    @torch.no_grad()
    def reduce_gradients(self, take_sum: Callable[[int], Tensor | None]) -> None:
        """Sum gradients over ranks, and add each rank's shard to the gradients of its masters.
        Collective.

        Args:
            take_sum: Takes a parameter's number and returns this rank's float32 gradient, whole,
                which nothing reads afterwards; None where it has none, which counts as zeros.
        """
        for bucket in self._buckets:
            device = self._weights[bucket[0].number].device
            size = bucket[-1].begin + bucket[-1].size
            # Ranks with a shorter shard send zeros behind it.
            sent_WK = torch.zeros(self._ranks, size, dtype=torch.float32, device=device)
            pairs = [
                part
                for slot in bucket
                if (whole := take_sum(slot.number)) is not None
                for part in slot.list_parts(whole, sent_WK)
            ]
            if pairs:
                torch._foreach_copy_([place for _, place in pairs], [piece for piece, _ in pairs])
            # The sums of this bucket are not needed any more.
            del pairs
            own_K = torch.empty(size, dtype=torch.float32, device=device)
            if self._reduce is None:
                dist.reduce_scatter_tensor(own_K, sent_WK.view(-1), group=self._group)
            else:
                self._reduce(own_K, sent_WK.view(-1), self._group, dist.ReduceOp.SUM)
            for slot in bucket:
                self._add_shard(self._masters[slot.number], slot, own_K)

    def _add_shard(self, master: nn.Parameter, slot: _Slot, own_K: Tensor) -> None:
        if not master.requires_grad:
            return
        assert isinstance(master, DTensor)
        shard = slot.select_local(master.to_local(), own_K)
        if master.grad is None:
            # A view: the bucket lives as long as the gradients.
            master.grad = DTensor.from_local(
                shard,
                master.device_mesh,
                master.placements,
                run_check=False,
                shape=master.shape,
                stride=master.stride(),
            )
        else:
            assert isinstance(master.grad, DTensor)
            master.grad.to_local().add_(shard)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Set the weights to the masters, rounded to the dtype of the weights. Collective."""
        for bucket in self._buckets:
            first = self._weights[bucket[0].number]
            size = bucket[-1].begin + bucket[-1].size
            # What lies behind a shorter shard is sent and read by nobody.
            own_K = torch.zeros(size, dtype=first.dtype, device=first.device)
            locals_ = [_get_local(self._masters[slot.number]) for slot in bucket]
            places = [
                slot.select_local(local, own_K) for slot, local in zip(bucket, locals_, strict=True)
            ]
            torch._foreach_copy_(places, locals_)
            all_WK = own_K.new_empty(self._ranks, size)
            dist.all_gather_into_tensor(all_WK.view(-1), own_K, group=self._group)
            pairs = [
                part
                for slot in bucket
                for part in slot.list_parts(self._weights[slot.number], all_WK)
            ]
            torch._foreach_copy_([piece for piece, _ in pairs], [place for _, place in pairs])


def _get_local(master: Tensor) -> Tensor:
    assert isinstance(master, DTensor)
    return master.to_local().detach()


def _fill_buckets(weights: Sequence[Tensor], dims: Sequence[int], ranks: int) -> list[list[_Slot]]:
    """Return the parameters in their order, in buckets of at most `BUCKET`, or of one
    parameter.
    """
    buckets: list[list[_Slot]] = []
    begin = 0
    for number, (weight, dim) in enumerate(zip(weights, dims, strict=True)):
        # As Shard cuts: equal shards rounded up, the last ones shorter or empty.
        longest = -(-weight.shape[dim] // ranks)
        size = weight.numel() // max(1, weight.shape[dim]) * longest
        if not buckets or (begin + size) * ranks > BUCKET:
            buckets.append([])
            begin = 0
        buckets[-1].append(_Slot(number, begin, size, dim))
        begin += size
    return buckets

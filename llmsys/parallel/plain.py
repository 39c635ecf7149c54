"""Data parallelism without a wrapper: whole weights in the compute dtype, and their float32 masters
and gradient sums next to them.

A forward reads the weights as they are, so no hook runs in it and no tensor is gathered. After each
micro-batch one multi-tensor kernel adds the gradients to their float32 sums; after each step
another one rounds the masters to the weights. One rank has whole masters. On several each rank has
a shard of them, and what the ranks exchange is exchanged once a step (master_shards.py).

Bytes of a parameter in 16 bits on N ranks: weight 2, gradient 2 during a backward, float32 sum 4,
master and moments 12 / N, where N > 1 also the reduced gradient, 4 / N. In float32 on one rank the
weights are the masters.

Invariants:
- On one rank all bits are those of FSDP2; on several, of FSDP2 with
  `engine.gradient_accumulation=whole`, but for sums that include parameters without a gradient.
- Weights are set from the masters before the first forward pass after anything may have changed
  those.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llmsys.model.initialization import Initializer
from llmsys.model.transformer import Transformer
from llmsys.parallel.collectives import CustomReduceScatter
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.master_shards import MasterShards, build_sharded_master
from llmsys.parallel.parallelize import build_expert_placement
from llmsys.parallel.sequence_sharding import SequenceSharding


class _GradientSum:
    """A gradient without a parameter."""

    grad: Tensor | None = None


class PlainModel:
    """A model from the meta device with whole weights, and its masters.

    Args:
        model: Changed in place.
        meshes: The sub-meshes; only the shard axis may have more than one rank.
        compute_dtype: Dtype of the weights.
        device: Device of this rank.
        initial: Computes initial values, see `build_initializer`.
        reduce: How gradients of several ranks are reduced, see `MasterShards`.
    """

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        initial: Initializer,
        reduce: CustomReduceScatter | None = None,
    ) -> None:
        self.forward: Callable[..., Tensor] = model
        self.sharding = SequenceSharding(model, meshes)
        mesh = meshes.replica
        place = build_expert_placement(model, meshes)
        cut = {name: place(parameter) for name, parameter in model.named_parameters()}
        _allocate_weights(model, device, compute_dtype)
        named = list(model.named_parameters())
        self._weights = [weight for _, weight in named]
        self._shards: MasterShards | None = None
        if mesh.size() > 1:
            found = [cut[name] for name, _ in named]
            dims = [0 if shard is None else shard.dim for shard in found]
            masters = [
                build_sharded_master(name, weight, mesh, dim, initial)
                for (name, weight), dim in zip(named, dims, strict=True)
            ]
            self._shards = MasterShards(self._weights, masters, dims, mesh, reduce=reduce)
        else:
            masters = [_build_whole_master(name, weight, initial) for name, weight in named]
        self.masters = {name: master for (name, _), master in zip(named, masters, strict=True)}
        self._by_weight = dict(zip(self._weights, masters, strict=True))
        # Where the gradients of micro-batches are summed, in float32.
        self._sums: list[Any] = [_GradientSum() for _ in masters]
        # Autograd itself adds in float32.
        self._sums_are_weights = compute_dtype == torch.float32
        if self._sums_are_weights:
            self._sums = list(self._weights)
        elif self._shards is None:
            self._sums = list(masters)
        self._reached = set[int]()
        self._is_stale = True
        # Whoever runs the model, an engine or a generation, gets the weights of the masters.
        model.register_forward_pre_hook(self._publish_masters)

    def prepare_weights(self) -> None:
        """Implement `DataParallelModel.prepare_weights`, so that no micro-batch gathers weights."""
        self._publish_masters()

    @contextlib.contextmanager
    def enter_micro_batch(self, *, last: bool, stage: int | None = None) -> Iterator[None]:
        """Implement `DataParallelModel.enter_micro_batch`. Collective for the `last` one.

        Args:
            last: It is the last micro-batch of the step: gradients are reduced after it.
            stage: Not used: the config rejects pipelines.
        """
        yield
        self._add_gradients()
        if last and self._shards is not None:
            self._shards.reduce_gradients(self._take_sum)

    def finish_gradients(self) -> None:
        """Expect a step of the optimizer, which changes masters. Gradients are reduced already."""
        self._is_stale = True

    def reshard_parameters(self) -> None:
        """Let the caller write to the masters: the next forward reads weights that are set from
        them.
        """
        self._is_stale = True

    def list_absent_gradients(self) -> tuple[str, ...]:
        """Implement `DataParallelModel.list_absent_gradients`.

        On several ranks every master has a gradient, which may be zero: one that this rank lacks
        may come from another.
        """
        absent = tuple(
            name for number, name in enumerate(self.masters) if number not in self._reached
        )
        self._reached.clear()
        return absent

    def get_master(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the master of a weight of the model."""
        return self._by_weight[weight]

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add the gradients of a micro-batch to their sums."""
        reached = [number for number, weight in enumerate(self._weights) if weight.grad is not None]
        self._reached.update(reached)
        if self._sums_are_weights:
            return
        found = [(self._weights[number], self._sums[number]) for number in reached]
        for weight, total in found:
            if total.grad is None and weight.grad is not None:
                # The first one is copied, as FSDP2 does: a sum with zeros would lose the sign of a
                # negative zero.
                total.grad = weight.grad.float()
                weight.grad = None
        rest = [(total.grad, weight.grad) for weight, total in found if weight.grad is not None]
        if rest:
            torch._foreach_add_([total for total, _ in rest], [added for _, added in rest])
        for weight, _ in found:
            weight.grad = None

    def _take_sum(self, number: int) -> Tensor | None:
        total = self._sums[number]
        gradient: Tensor | None = total.grad
        total.grad = None
        return gradient

    @torch.no_grad()
    def _publish_masters(self, *_: object) -> None:
        """Set the weights to the masters, if those may have changed. Collective then."""
        if not self._is_stale:
            return
        self._is_stale = False
        if self._shards is not None:
            self._shards.gather_weights()
        elif self._weights[0].dtype != torch.float32:
            torch._foreach_copy_([*self._weights], [*self.masters.values()])


def _allocate_weights(model: Transformer, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate weights in `dtype`, without values, and buffers with theirs. What modules share
    stays shared.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(
                    torch.empty_like(parameter, dtype=dtype, device=device),
                    requires_grad=parameter.requires_grad,
                )
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    # Until now the buffers have no values.
    model.reset_buffers()


@torch.no_grad()
def _build_whole_master(name: str, weight: nn.Parameter, initial: Initializer) -> nn.Parameter:
    """Return the master of a weight with its initial values: in float32 the weight itself."""
    master = weight
    if weight.dtype != torch.float32:
        master = nn.Parameter(
            torch.empty_like(weight, dtype=torch.float32), requires_grad=weight.requires_grad
        )
    master.copy_(initial(name, weight.shape, None))
    return master

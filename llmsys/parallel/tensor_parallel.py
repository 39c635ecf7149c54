"""Tensor parallel with sequence parallel: the matrices of a block split over ranks, positions split between them.

Megatron's split (Shoeybi 2019, arXiv:1909.08053, 3) with the residual stream divided by positions (Korthikanti 2022,
arXiv:2205.05198, 4.2.2): an all-gather before the maps split by columns, a reduce-scatter behind those split by rows.

What is split over the tensor axis, inside blocks and prediction modules' blocks:
* by outputs (dim 0): q_proj, k_proj, v_proj with their biases, of latent attention q_b_proj (or q_proj) and kv_b_proj;
  gate_proj and up_proj with their biases, of dense layers and shared experts. k_proj and v_proj stay whole where there
  are fewer key-value heads than tensor ranks: each rank then uses the rows of one head.
* by inputs (dim 1): o_proj and down_proj.
Whole on each tensor rank, sharded over shard · context only: norms, router, shared gate, biases of o_proj and
down_proj, sinks, and latent attention's maps into the latents. A rank's gradient of these comes from its positions or
heads alone, so they are summed over the axis, once per step. Routed experts are never split, but dealt and sharded over
all ranks of a copy. What stands outside of blocks (embeddings, head, final norm, learned positions, prediction modules)
is sharded over all ranks of a copy too, and gathered when it is used: the loss at the head then is that of this rank's
positions, without another collective. A head split by vocabulary would save memory for the gathered weight (V · D
numbers, and as many of its gradient, in the compute dtype), for three more exchanges per block of logits.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llmsys.model.feed_forward import FeedForward
from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.optim.parameter_groups import get_parameter_role
from llmsys.parallel.sequence_sharding import SequenceSharding, replace_forward

BY_OUTPUTS, BY_INPUTS = 0, 1


def split_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Leave each rank of the tensor axis its part of every matrix that is split. The model is on the meta device."""
    for linear, dim in _iter_split_projections(model, mesh.size()):
        _split_parameter(linear, "weight", dim, mesh)
        if linear.bias is not None and dim == BY_OUTPUTS:
            _split_parameter(linear, "bias", 0, mesh)


def _iter_split_projections(model: Transformer, ranks: int) -> Iterator[tuple[nn.Linear, int]]:
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            yield from ((linear, BY_OUTPUTS) for linear in list_head_projections(module.attention, ranks))
            yield module.attention.get_submodule("o_proj"), BY_INPUTS  # type: ignore[misc]
        elif isinstance(module, FeedForward):
            yield from ((linear, BY_OUTPUTS) for linear in _list_inner_projections(module))
            yield module.down_proj, BY_INPUTS


def list_head_projections(attention: nn.Module, ranks: int) -> list[nn.Linear]:
    """The maps of an attention whose outputs are heads and are dealt to `ranks` ranks."""
    names = ["q_proj", "k_proj", "v_proj"]
    if isinstance(attention, MultiHeadLatentAttention):
        names = ["q_b_proj" if attention.has_query_latent else "q_proj", "kv_b_proj"]
    elif attention.get_parameter("k_proj.weight").shape[0] // attention.head_dim % ranks:  # type: ignore[operator]
        names = ["q_proj"]
    return [attention.get_submodule(name) for name in names]  # type: ignore[misc]


def _list_inner_projections(feed_forward: FeedForward) -> list[nn.Linear]:
    maps = [feed_forward.up_proj]
    return [feed_forward.gate_proj, *maps] if hasattr(feed_forward, "gate_proj") else maps


def _split_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    part = module.get_parameter(name).data.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()]
    spread = DTensor.from_local(part.contiguous(), mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(spread))


def divide_feed_forwards(model: Transformer, sharding: SequenceSharding) -> None:
    """Every feed-forward: positions in, channels inside, positions out. Which positions stand where does not matter."""
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.register_forward_pre_hook(lambda _, inputs: sharding.enter_column_parallel(inputs[0], 0))
            for linear in _list_inner_projections(module):
                replace_forward(linear, ColumnParallelLinear(linear))
            replace_forward(module.down_proj, RowParallelLinear(module.down_proj, sharding, 0))


class ColumnParallelLinear:
    """The forward of a map of which this rank has some outputs."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """These outputs."""
        bias = self.linear.bias
        return F.linear(x, get_local_tensor(self.linear.weight), None if bias is None else get_local_tensor(bias))


class RowParallelLinear:
    """The forward of a map of which this rank has some inputs: a sum over ranks, and the bias once."""

    def __init__(self, linear: nn.Linear, sharding: SequenceSharding, dim: int) -> None:
        self.linear, self.sharding, self.dim = linear, sharding, dim

    def __call__(self, x: Tensor) -> Tensor:
        """All outputs, of this rank's positions where they are divided."""
        y = self.sharding.exit_row_parallel(F.linear(x, get_local_tensor(self.linear.weight)), self.dim)
        return y if self.linear.bias is None else y + self.linear.bias


class PartialGradientReducer:
    """Sums over the tensor axis the gradients of what is whole on each of its ranks. Made before anything is sharded.

    Not those outside of blocks and not those of experts: their shards span the axis, and FSDP adds them up.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh | None) -> None:
        self._model, self._group = model, None if mesh is None else mesh.get_group()
        self.names = [
            f"{prefix}.{name}"
            for prefix, block in model.named_modules()
            if isinstance(block, TransformerBlock) and mesh is not None
            for name, parameter in block.named_parameters()
            if not isinstance(parameter, DTensor) and get_parameter_role(f"{prefix}.{name}") != "experts"
        ]

    @torch.no_grad()
    def all_reduce(self) -> None:
        """One all-reduce of all of them. Collective, after the last backward of a step."""
        if self._group is None:
            return
        named = dict(self._model.named_parameters())
        found = [named[name].grad for name in self.names]
        gradients = [get_local_tensor(grad) for grad in found if grad is not None]
        flat = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(flat, group=self._group)
        pieces = flat.split([grad.numel() for grad in gradients])
        torch._foreach_copy_([grad.flatten() for grad in gradients], list(pieces))

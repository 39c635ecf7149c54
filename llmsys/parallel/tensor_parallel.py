"""Tensor parallel with sequence parallel: the matrices of a block split over ranks, positions split
between them.

Megatron's split (Shoeybi 2019, arXiv:1909.08053, 3) with a residual stream sharded by positions
(Korthikanti 2022, arXiv:2205.05198, 4.2.2): an all-gather before column-parallel layers, a
reduce-scatter after row-parallel ones.

Split over the tensor axis, in all blocks:

- By outputs (dim 0): q_proj, k_proj, v_proj, g_proj with their biases; of latent attention
  q_b_proj (or q_proj) and kv_b_proj; gate_proj and up_proj with their biases, of dense layers and
  shared experts. k_proj and v_proj are not split where there are fewer key-value heads than tensor
  ranks: each rank then uses the rows of one head.
- By inputs (dim 1): o_proj and down_proj.

Not split, sharded over shard · context only: norms, router, shared gate, biases of o_proj and
down_proj, sinks, and latent attention's projections into the latents. A rank's gradient of these
comes from its positions or heads alone, so they are summed over the axis, once per step.

Routed experts are never split, but assigned to and sharded over all ranks of a replica. Parameters
outside of blocks (embeddings, head, final norm, learned positions, prediction modules) are sharded
over all ranks of a replica and gathered when used, so the loss at the head is that of this rank's
positions without another collective. A head split by vocabulary would save the gathered weight (V ·
D elements, and as many of its gradient, in the compute dtype), for three more collectives per block
of logits.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from llmsys.model.feed_forward import FeedForward
from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.optim.parameter_groups import get_parameter_role
from llmsys.parallel.fp8 import apply_linear
from llmsys.parallel.sequence_sharding import SequenceSharding, replace_forward

BY_OUTPUTS = 0
BY_INPUTS = 1


def split_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Leave each rank of the tensor axis its shard of every split matrix.

    Args:
        model: The model on the meta device; parameters become DTensors.
        mesh: The tensor axis.
    """
    for linear, dim in _iter_split_projections(model, mesh.size()):
        _split_parameter(linear, "weight", dim, mesh)
        if linear.bias is not None and dim == BY_OUTPUTS:
            _split_parameter(linear, "bias", 0, mesh)


def _iter_split_projections(model: Transformer, ranks: int) -> Iterator[tuple[nn.Linear, int]]:
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            if module.attention is None:
                continue
            yield from (
                (linear, BY_OUTPUTS) for linear in list_head_projections(module.attention, ranks)
            )
            yield module.attention.get_submodule("o_proj"), BY_INPUTS  # type: ignore[misc]
        elif isinstance(module, FeedForward):
            yield from ((linear, BY_OUTPUTS) for linear in _list_inner_projections(module))
            yield module.down_proj, BY_INPUTS


def list_head_projections(attention: nn.Module, ranks: int) -> list[nn.Linear]:
    """List the projections of an attention whose outputs are heads that are divided over ranks.

    Args:
        attention: The attention module.
        ranks: Ranks of the tensor axis. Where they do not divide the key and value heads, only
            the projection of queries is divided.

    Returns:
        The linear layers.
    """
    names = ["q_proj", "k_proj", "v_proj"]
    if isinstance(attention, MultiHeadLatentAttention):
        names = ["q_b_proj" if attention.has_query_latent else "q_proj", "kv_b_proj"]
    elif attention.get_parameter("k_proj.weight").shape[0] // attention.head_dim % ranks:  # type: ignore[operator]
        names = ["q_proj"]
    if getattr(attention, "has_output_gate", False):
        names = [*names, "g_proj"]
    return [attention.get_submodule(name) for name in names]  # type: ignore[misc]


def _list_inner_projections(feed_forward: FeedForward) -> list[nn.Linear]:
    projections = [feed_forward.up_proj]
    return (
        [feed_forward.gate_proj, *projections]
        if hasattr(feed_forward, "gate_proj")
        else projections
    )


def _split_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    local = module.get_parameter(name).data.chunk(mesh.size(), dim=dim)[mesh.get_local_rank()]
    sharded = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(sharded))


def divide_feed_forwards(model: Transformer, sharding: SequenceSharding) -> None:
    """Shard every feed-forward: positions at its input and output, in any order, and channels
    inside.

    Args:
        model: The model, whose modules are changed.
        sharding: How positions are divided over tensor and context ranks.
    """
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.register_forward_pre_hook(
                lambda _, inputs: sharding.enter_column_parallel(inputs[0], 0)
            )
            for linear in _list_inner_projections(module):
                replace_forward(linear, ColumnParallelLinear(linear))
            replace_forward(module.down_proj, RowParallelLinear(module.down_proj, sharding, 0))


class ColumnParallelLinear:
    """Column-parallel linear layer: this rank holds some of its outputs."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs.

        Args:
            x: All inputs, (…, in).

        Returns:
            (…, out / tensor ranks).
        """
        bias = self.linear.bias
        local_bias = None if bias is None else get_local_tensor(bias)
        return apply_linear(self.linear, x, get_local_tensor(self.linear.weight), local_bias)


class RowParallelLinear:
    """The forward of a linear layer of which this rank has some inputs: a sum over ranks, with
    the bias added once.
    """

    def __init__(self, linear: nn.Linear, sharding: SequenceSharding, dim: int) -> None:
        self.linear = linear
        self.sharding = sharding
        self.dim = dim

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all outputs as a sum over the tensor ranks. Collective.

        Args:
            x: This rank's inputs, (…, in / tensor ranks).

        Returns:
            (…, out), of this rank's positions where they are sharded.
        """
        y = self.sharding.exit_row_parallel(
            apply_linear(self.linear, x, get_local_tensor(self.linear.weight), None), self.dim
        )
        return y if self.linear.bias is None else y + self.linear.bias


class PartialGradientReducer:
    """Sum over the tensor axis of the gradients of unsplit parameters. Built before FSDP is
    applied.

    Without parameters outside of blocks and without experts: their shards span the axis, and FSDP
    sums them.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh | None) -> None:
        self._model = model
        self._group = None if mesh is None else mesh.get_group()
        self.names = [
            f"{prefix}.{name}"
            for prefix, block in model.named_modules()
            if isinstance(block, TransformerBlock) and mesh is not None
            for name, parameter in block.named_parameters()
            if not isinstance(parameter, DTensor)
            and get_parameter_role(f"{prefix}.{name}") != "experts"
        ]

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Sum the gradients in one all-reduce, after the last backward of a step. Collective."""
        if self._group is None:
            return
        # Looked up again: FSDP has replaced the parameters since.
        named = dict(self._model.named_parameters())
        optional = [named[name].grad for name in self.names]
        gradients = [get_local_tensor(grad) for grad in optional if grad is not None]
        # One message: these are many small vectors, each of which would pay the latency of a
        # collective.
        flat = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(flat, group=self._group)
        pieces = flat.split([grad.numel() for grad in gradients])
        torch._foreach_copy_([grad.flatten() for grad in gradients], list(pieces))

"""The places of parameters in the flat shards of DeepSpeed's ZeRO, for optimizers of whole
matrices.
"""

from typing import Any

import torch
from torch import Tensor

from llmsys.parallel.flat_muon import FlatMatrices, ShardPiece


def list_flat_matrices(zero: Any, device: torch.device) -> dict[Tensor, FlatMatrices]:
    """List the parameters of each shard of this rank, in any stage with shards.

    Args:
        zero: DeepSpeed's optimizer of stage 1, 2 or 3, with its links from parameters to shards.
        device: Where matrices are put together.

    Returns:
        The parameters by the shard of their masters.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        shards = zero.fp32_partitioned_groups_flat
        members = zero.fp16_groups
        groups = zero.sub_group_process_groups
        find = _find_slice
    elif hasattr(zero, "bf16_groups"):  # stage 1 in bfloat16
        shards = zero.fp32_groups_flat_partition
        members = zero.bf16_groups
        groups = zero.real_dp_process_group
        find = _find_fragment
    else:
        shards = zero.single_partition_of_fp32_groups
        members = zero.bit16_groups
        groups = zero.real_dp_process_group
        find = _find_fragment
    return {
        shard: FlatMatrices(
            group, device, [find(zero, parameter, group) for parameter in parameters]
        )
        for shard, parameters, group in zip(shards, members, groups, strict=True)
    }


def _find_fragment(zero: Any, parameter: Any, group: Any) -> ShardPiece:
    """Return the elements of a parameter in the shard, which begins and ends anywhere in a
    parameter.
    """
    if parameter._hp_mapping is None:
        return ShardPiece(parameter.shape, slice(0), slice(0))
    own = parameter._hp_mapping.lp_fragment_address
    there = parameter._hp_mapping.hp_fragment_address
    ends = slice(own.start, own.start + own.numel), slice(there.start, there.start + there.numel)
    return ShardPiece(parameter.shape, *ends)


def _find_slice(zero: Any, parameter: Any, group: Any) -> ShardPiece:
    """Return the equal slice of a parameter that each rank has; the last one is padded."""
    _, first, size = zero.grad_position[zero.get_param_id(parameter)]
    start = min(torch.distributed.get_rank(group) * size, parameter.ds_numel)
    end = min(start + size, parameter.ds_numel)
    return ShardPiece(parameter.ds_shape, slice(start, end), slice(first, first + end - start))

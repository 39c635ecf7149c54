"""DistributedDataParallel as one way to train on many ranks: every rank keeps everything, gradients are summed.

Masters and gradients are fp32; a forward sees each parameter in the compute dtype (see cast.py). Ranks meet in the last
backward of a step only: before it, gradients of earlier micro-batches add up in fp32 where they are.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from llmsys.config.head import (
    ClassificationHeadConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.fsdp import Initial
from llmsys.parallel.mixed_precision import cast_parameters
from llmsys.parallel.parallelize import materialize_parameters
from llmsys.parallel.sequence_sharding import SequenceSharding


class DdpModel:
    """DDP. `model` comes from the meta device and gets its starting values, the same on all ranks, from `initial`."""

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        initial: Initial,
    ) -> None:
        materialize_parameters(model, device, initial)
        cast_parameters(model, compute_dtype)
        self.sharding = SequenceSharding(model, meshes)
        ignored = list_unused_parameters(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        self._ddp = DistributedDataParallel(model, forward_sync_buffers=False, init_sync=False)
        self._ddp.register_comm_hook(None, _all_reduce_bucket)
        self.forward: Callable[..., Tensor] = self._ddp

    def enter_micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See DataParallel."""
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def finish_gradients(self) -> None:
        """See DataParallel: the last backward has summed them."""

    def reshard_parameters(self) -> None:
        """See DataParallel: masters are always in their place."""


def list_unused_parameters(model: Transformer) -> list[str]:
    """Parameters that no loss looks at: BERT's pooler and its second task, where masks alone are learnt.

    DDP would wait for their gradients for ever.
    """
    match model.config.head:
        case MlmHeadConfig():
            return [name for name, _ in model.named_parameters() if name.startswith(("pooler.", "next_sentence."))]
        case LmHeadConfig() | ClassificationHeadConfig() | FeaturesHeadConfig() | PermutationHeadConfig():
            return []
        case unreachable:
            assert_never(unreachable)


def _all_reduce_bucket(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The sum over ranks, where DDP would take the mean: the loss is divided by the targets of all ranks already."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    summed: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed

"""DistributedDataParallel: every rank holds all parameters, and gradients are summed.

Masters and gradients are float32; a forward reads each parameter in the compute dtype
(mixed_precision.py). Ranks communicate in the last backward of a step only; before it, gradients of
micro-batches accumulate locally in float32.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from llmsys.config.head import (
    ClassificationHeadConfig,
    FeaturesHeadConfig,
    LmHeadConfig,
    MlmHeadConfig,
    PermutationHeadConfig,
)
from llmsys.model.initialization import Initializer
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import DeviceMeshes
from llmsys.parallel.gradient_clipping import list_absent_gradients
from llmsys.parallel.mixed_precision import cast_parameters
from llmsys.parallel.parallelize import materialize_parameters
from llmsys.parallel.sequence_sharding import SequenceSharding


class DdpModel:
    """DDP around a model from the meta device, with initial values from `initial`, equal on all
    ranks.
    """

    def __init__(
        self,
        model: Transformer,
        meshes: DeviceMeshes,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        initial: Initializer,
    ) -> None:
        """Allocate and fill the parameters, and wrap the model.

        Args:
            model: A model on the meta device; changed in place.
            meshes: Sub-meshes of the run's layout.
            compute_dtype: Dtype of the forward; masters and gradients are float32.
            device: Device of this rank.
            initial: Computes initial values, equal on all ranks: DDP broadcasts nothing.
        """
        materialize_parameters(model, device, initial)
        cast_parameters(model, compute_dtype)
        self.sharding = SequenceSharding(model, meshes)
        ignored = list_unused_parameters(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        # Initial values are equal on all ranks already, and expert counters differ between ranks on
        # purpose.
        self._ddp = DistributedDataParallel(model, forward_sync_buffers=False, init_sync=False)
        self._ddp.register_comm_hook(None, _all_reduce_bucket)
        self.forward: Callable[..., Tensor] = self._ddp
        self.masters: dict[str, nn.Parameter] = dict(model.named_parameters())

    def prepare_weights(self) -> None:
        """Do nothing: a forward casts the masters."""

    def enter_micro_batch(
        self, *, last: bool, stage: int | None = None
    ) -> AbstractContextManager[None]:
        """Implement `DataParallelModel.enter_micro_batch`. There are no stages: the config
        rejects them.
        """
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def finish_gradients(self) -> None:
        """Do nothing: the last backward has summed the gradients."""

    def reshard_parameters(self) -> None:
        """Do nothing: parameters are not sharded."""

    def list_absent_gradients(self) -> tuple[str, ...]:
        """Implement `DataParallelModel.list_absent_gradients`."""
        return list_absent_gradients(self.masters.items())

    def get_master(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the parameter itself."""
        return weight


def list_unused_parameters(model: Transformer) -> list[str]:
    """List the parameters without a gradient: BERT's pooler and next-sentence head, where only
    masks are trained.

    DDP would wait for their gradients forever.

    Args:
        model: The model before DDP.

    Returns:
        Parameter names.
    """
    match model.config.head:
        case MlmHeadConfig():
            if (head := getattr(model, "next_sentence", None)) is not None and head.is_trained:
                return []
            return [
                name
                for name, _ in model.named_parameters()
                if name.startswith(("pooler.", "next_sentence."))
            ]
        case (
            LmHeadConfig()
            | ClassificationHeadConfig()
            | FeaturesHeadConfig()
            | PermutationHeadConfig()
        ):
            return []
        case unreachable:
            assert_never(unreachable)


def _all_reduce_bucket(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum a bucket over ranks. DDP would average; the loss is already divided by the targets of
    all ranks.
    """
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    summed: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed

"""Fake tensors and a fake process group that llmsys's own code runs on.

Reads nothing. Replaces functions of torch in this process: mesh arithmetic is computed on real
numbers, attention and RMSNorm take the kernels that CUDA takes, and compiled blocks run eagerly
while their input signatures are counted.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives on fake tensors
import torch.distributed.tensor._utils as tensor_utils
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from llmsys.dryrun.memory_tracker import MemoryTracker
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.parallel import ddp, dtensor_slices

MESH_METHODS = (
    "_compute_coordinate_on_dim",
    "_compute_coordinates_from_mesh",
    "_flatten",
    "_init_process_groups",
    "_unflatten",
    "__eq__",
    "__getitem__",
    "__hash__",
    "get_all_groups",
)


def join_fake_group(rank: int, world_size: int) -> None:
    """Join a process group whose other ranks do not exist: collectives return at once.

    Args:
        rank: The rank that runs.
        world_size: Ranks of the cluster.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def build_fake_mode() -> FakeTensorMode:
    """Return the mode in which tensors have shapes and no storage."""
    # Otherwise fake tensors on CUDA would initialize a driver.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment,method-assign]
    return FakeTensorMode(allow_non_fake_inputs=True)


def compute_meshes_on_real_tensors() -> None:
    """Make meshes and shard offsets compute on real numbers, also inside of a fake mode."""
    for name in MESH_METHODS:
        found = DeviceMesh.__dict__.get(name)
        if isinstance(found, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(found)(_skip_fake_mode(found.__func__)))
        elif found is not None:
            setattr(DeviceMesh, name, _skip_fake_mode(found))
    # Computed for every parameter; equal layers have equal shards.
    shard = functools.cache(_skip_fake_mode(tensor_utils.compute_local_shape_and_global_offset))

    def compute_shard(shape: Any, mesh: DeviceMesh, placements: Any, *more: Any) -> Any:
        return shard(torch.Size(shape), mesh, tuple(placements), *more)

    tensor_utils.compute_local_shape_and_global_offset = compute_shard  # type: ignore[assignment]
    dtensor_slices.compute_local_shape_and_global_offset = compute_shard  # type: ignore[assignment,attr-defined]
    for name in ("_compute_local_shape_and_global_offset", "_get_first_offset"):
        if hasattr(tensor_utils, name):
            setattr(tensor_utils, name, _skip_fake_mode(getattr(tensor_utils, name)))


class ShardChunks:
    """Chunks of `torch.chunk`, each made when it is read: FSDP reads two, of as many as there are
    ranks.

    A fake tensor costs 0.1 ms, which is a minute for the 300 parameters of a stack on 2,048 ranks.
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._rows = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        start = number * self._rows
        length = self._tensor.shape[self._dim]
        if start >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._rows, length - start))


def replace_chunks() -> None:
    """Make FSDP chunk parameters by `ShardChunks`."""
    _fsdp_param._chunk_with_empty = ShardChunks  # type: ignore[assignment]


def _skip_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute_on_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return compute_on_real_tensors


def track_resizes(memory: MemoryTracker) -> None:
    """Record storages that FSDP resizes in place."""
    resize = torch.UntypedStorage.resize_

    def record_resized_storage(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        memory.record_resize(storage)
        return result

    torch.UntypedStorage.resize_ = record_resized_storage  # type: ignore[assignment,method-assign]


def reduce_buckets_at_once() -> None:
    """Give DDP a reduction whose future is complete, because that of a fake process group has no
    value.

    Buckets stay as they are first made: DDP would order them anew by numbers that rank 0
    broadcasts.
    """

    def reduce_bucket(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        dist.all_reduce(bucket.buffer())
        reduced: Future[Tensor] = Future()
        reduced.set_result(bucket.buffer())
        return reduced

    ddp._all_reduce_bucket = reduce_bucket
    dist.Reducer._rebuild_buckets = lambda reducer: False  # type: ignore[assignment,method-assign]
    # It reads a timer of the device.
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # type: ignore[assignment,method-assign]


def set_pipeline_shapes() -> None:
    """Spare the stages of a pipeline the messages in which they agree that their shapes are
    given.
    """

    def skip_vote(self: Any, stages: list[Any], *arguments: Any, **named: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    initialize = _PipelineSchedule._initialize_pp_stages

    def initialize_without_generators(*arguments: Any, **named: Any) -> Any:
        # torch would save the state of the device's random number generator.
        with patch.object(torch.random, "fork_rng", lambda **_: contextlib.nullcontext()):
            return initialize(*arguments, **named)

    _PipelineSchedule._warmup_p2p = skip_vote  # type: ignore[method-assign]
    _PipelineSchedule._initialize_pp_stages = initialize_without_generators  # type: ignore[method-assign]


def pause_for_sharding_rules(recorder: DryRunRecorder) -> None:
    """Do not record the full-size tensors that DTensor makes to find the shape of a result."""
    for name in ("_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
        setattr(
            ShardingPropagator, name, _pause_recorder(getattr(ShardingPropagator, name), recorder)
        )


def _pause_recorder(function: Callable[..., Any], recorder: DryRunRecorder) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute_unseen(*args: Any, **kwargs: Any) -> Any:
        was_paused = recorder.is_paused
        recorder.is_paused = True
        try:
            return function(*args, **kwargs)
        finally:
            recorder.is_paused = was_paused

    return compute_unseen


def choose_cuda_kernels() -> None:
    """Let composite operations dispatch as they do where torch was built with CUDA."""
    vars(F)["scaled_dot_product_attention"] = _compute_cuda_attention
    vars(F)["rms_norm"] = _compute_cuda_rms_norm
    vars(F)["silu"] = _compute_cuda_silu


def _compute_cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call flash attention, or memory-efficient attention where a table or unequal widths
    exclude it.
    """
    ops = torch.ops.aten
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    # FlashAttention-2 takes heads of at most 256 channels.
    if attn_mask is None and is_half and value.shape[-1] == query.shape[-1] <= 256:
        found: Tensor = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return found
    # The memory-efficient kernel knows no groups.
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                ~attn_mask, float("-inf")
            )
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found = ops._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return found


class _FusedRmsNorm(torch.autograd.Function):
    """RMSNorm in one kernel, which saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _compute_cuda_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _FusedSilu(torch.autograd.Function):
    """SiLU in one kernel each way; without CUDA torch composes the backward of seven operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _compute_cuda_silu(x: Tensor, inplace: bool = False) -> Tensor:
    result: Tensor = _FusedSilu.apply(x)  # type: ignore[no-untyped-call]
    return result


class CompiledSignatures:
    """Stand-in for `torch.compile` that runs eagerly and counts what the compiler would specialize
    on.

    Attributes:
        counts: calls by (function, signature of the tensors: number type, shape, strides,
            gradient).
        is_recording: whether calls are of a steady step; a signature first seen then is a
            recompilation.
        is_closed: whether calls are not counted any more.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, tuple[Any, ...]]] = Counter()
        self.recompiled: Counter[str] = Counter()
        self.is_recording = False
        self.is_closed = False

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `function` with its calls counted."""
        code = getattr(function, "__func__", function)
        name = f"{code.__module__}.{code.__qualname__}"

        def call_eagerly(*args: Any, **kwargs: Any) -> Any:
            if self.is_closed:
                return function(*args, **kwargs)
            key = name, _build_signature(args, kwargs)
            if self.is_recording and key not in self.counts:
                self.recompiled[name] += 1
            self.counts[key] += 1
            return function(*args, **kwargs)

        return call_eagerly

    def install(self) -> None:
        """Take the place of `torch.compile`."""
        torch.compile = self.compile  # type: ignore[assignment]


def _build_signature(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    flat = [*args, *(value for _, value in sorted(kwargs.items()))]
    return (torch.is_grad_enabled(), *(_describe_argument(one) for one in flat))


def _describe_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad
    return (
        repr(value)
        if isinstance(value, bool | int | float | str | None)
        else type(value).__qualname__
    )

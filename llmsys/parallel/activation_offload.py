"""Activations of a block in host memory between its forward and its backward.

Every tensor that autograd saves in a block is copied out as it is saved, on a separate stream,
and the device's memory is free once the block has ended. The backward of a block starts to fetch
the tensors of the block before it, so copies run next to computation in both directions. On a CPU
the same hooks copy within host memory.

Invariants:
- The same bits as without: copies only. Parameters, buffers and what all blocks share (masks,
  rotations) stay.
- A tensor that several operations save travels once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock

# Smaller tensors stay: a copy of them costs more than their memory.
MIN_BYTES = 1 << 10


class _HostCopy:
    """A saved tensor: on its device until the block ends, then in host memory, then on its
    device again.
    """

    def __init__(self, tensor: Tensor, streams: "_CopyStreams") -> None:
        self.original: Tensor | None = tensor
        self._device = tensor.device
        self._streams = streams
        self._fetched: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._host, self._is_copied = streams.copy_to_host(tensor)

    def start_fetch(self) -> None:
        """Start the copy back to the device."""
        if self._fetched is None:
            self._fetched = self._streams.copy_to_device(self._host, self._device, self._is_copied)

    def get(self) -> Tensor:
        """Return the tensor, on its device."""
        # the backward of a block that has not ended: a loss inside of it
        if self.original is not None:
            return self.original
        self.start_fetch()
        assert self._fetched is not None
        tensor, arrived = self._fetched
        self._streams.wait(tensor, arrived)
        return tensor


class _CopyStreams:
    """The streams that copies run on: one for each direction; none on a CPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy; the event is recorded after the copy."""
        if tensor.device.type != "cuda":
            return tensor.detach().clone(), None
        leaving, _ = self._get_streams(tensor.device)
        # Only pinned memory is copied without the host waiting.
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        # The computation that writes the tensor may still be queued.
        leaving.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(leaving):
            host.copy_(tensor.detach(), non_blocking=True)
        # Otherwise the allocator could give the memory away before the copy has read it.
        tensor.record_stream(leaving)
        return host, leaving.record_event()

    def copy_to_device(
        self, host: Tensor, device: torch.device, copied: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy back, after the copy to the host."""
        if copied is None:
            return host, None
        _, arriving = self._get_streams(device)
        # A backward that starts early must not fetch what has not left yet.
        arriving.wait_event(copied)
        with torch.cuda.stream(arriving):
            tensor = host.to(device, non_blocking=True)
        return tensor, arriving.record_event()

    def wait(self, tensor: Tensor, arrived: torch.cuda.Event | None) -> None:
        """Make the device, not the host, wait for a copy."""
        if arrived is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(arrived)
            # The memory belongs to the stream of copies; its next use must wait for this one.
            tensor.record_stream(stream)

    def _get_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]


class _BlockRecord:
    """The copies of one forward of a block, and the record of the block before it."""

    def __init__(
        self,
        block: nn.Module,
        shared: set[int],
        earlier: "_BlockRecord | None",
        streams: _CopyStreams,
    ) -> None:
        self._block = block
        self._shared = shared
        self._streams = streams
        # Weak: a chain of records would keep the copies of every earlier step.
        self._earlier = None if earlier is None else ref(earlier)
        self._copies: dict[Any, _HostCopy] = {}
        self._held: list[ref[_HostCopy]] = []

    def pack(self, tensor: Tensor) -> Any:
        """Implement the hook of a tensor that is saved."""
        if not self._must_offload(tensor):
            return tensor
        # Originals live until the block ends, so equal keys are equal tensors.
        place = _get_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = *place, tensor.dtype, tensor._version
        if key not in self._copies:
            self._copies[key] = _HostCopy(tensor, self._streams)
        return self, self._copies[key], tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Implement the hook of a tensor that is read."""
        if isinstance(packed, Tensor):
            return packed
        record, copy, strides = packed
        record.start_fetches()
        earlier = None if record._earlier is None else record._earlier()
        if earlier is not None:
            earlier.start_fetches()
        return _restore_strides(copy.get(), strides)

    def start_fetches(self) -> None:
        """Start to fetch what the backward of this block reads."""
        held = self._held
        self._held = []
        for copy in (one() for one in held):
            if copy is not None:
                copy.start_fetch()

    def release_originals(self) -> None:
        """Let go of the device's memory, at the end of the block's forward."""
        for copy in self._copies.values():
            copy.original = None
        # Weak: the graph owns the copies, and frees each as its backward has read it.
        self._held = [ref(copy) for copy in self._copies.values()]
        self._copies = {}

    def _must_offload(self, tensor: Tensor) -> bool:
        if tensor.numel() * tensor.element_size() < MIN_BYTES or isinstance(tensor, DTensor):
            return False
        return _get_storage(tensor) not in self._shared | {
            _get_storage(one) for one in _list_weights(self._block)
        }


def _restore_strides(copy: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy with the strides that its tensor was saved with.

    The copy of a slice has no gaps. A product of other strides may be summed in another order, and
    saves other tensors, which a recomputation from it refuses.
    """
    if copy.stride() == strides:
        return copy
    # Rows that repeat each other are one row in memory.
    distinct = copy[tuple(slice(1) if step == 0 else slice(None) for step in strides)]
    restored = torch.empty_strided(distinct.shape, strides, dtype=copy.dtype, device=copy.device)
    return restored.copy_(distinct).expand(copy.shape)


def _list_weights(block: nn.Module) -> list[Tensor]:
    """List parameters and buffers as they are now: FSDP replaces shards by gathered tensors and
    back.
    """
    return [get_local_tensor(one) for one in (*block.parameters(), *block.buffers())]


def _get_storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # data_ptr is 0 for fake tensors


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a context: in its attributes, sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for one in value.values() for tensor in _iter_tensors(one))
    elif isinstance(value, list | tuple):
        yield from (tensor for one in value for tensor in _iter_tensors(one))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from _iter_tensors(vars(value))


def apply_activation_offload(model: Transformer) -> None:
    """Wrap the forward of every block. Names of parameters and modules do not change.

    Args:
        model: A model before FSDP.
    """
    streams = _CopyStreams()
    last = list[ref[_BlockRecord]]()

    def wrap_forward(
        block: TransformerBlock, forward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def run_block(x_BTD: Tensor, context: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x_BTD, context)
            shared = {_get_storage(tensor) for tensor in _iter_tensors(context)}
            record = _BlockRecord(block, shared, last[0]() if last else None, streams)
            last[:] = [ref(record)]
            with saved_tensors_hooks(record.pack, record.unpack):
                y_BTD = forward(x_BTD, context)
            record.release_originals()
            return y_BTD

        return run_block

    for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
        block.forward = wrap_forward(block, block.forward)  # type: ignore[method-assign]

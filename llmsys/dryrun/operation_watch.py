"""A dispatch mode that records every operation of a dry run: memory, collectives, waits and
kernels.

It runs above FakeTensorMode. Operations whose result depends on numbers get them from
known_values.py; where those are unknown, a scalar is 1 and a selection keeps everything, which is
the most that it can keep.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from llmsys.dryrun.categories import BACKWARD, FORWARD, GATHERED, LOSS, REDUCED, SAVED
from llmsys.dryrun.collective_log import OPTIMIZER, exchange_known
from llmsys.dryrun.host_waits import HostWaitLog
from llmsys.dryrun.kernel_flops import count_attention_flops, count_kernel_flops
from llmsys.dryrun.known_values import (
    attach_outputs,
    compute_known,
    drop_mutated,
    get_known,
    leave_fake_mode,
)
from llmsys.dryrun.position_probe import PositionProbe
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.dryrun.table_makers import find_table_maker
from llmsys.parallel import ring_attention

DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
)
READ_SCALAR = "aten._local_scalar_dense.default"
WAIT = "_c10d_functional.wait_tensor.default"
GRADIENTS_COMPLETE = "gradients complete"
"""End of the name of the phase after the passes of a step."""


class OperationWatch(TorchDispatchMode):
    """The dispatch mode over one dry run.

    Args:
        recorder: gets what happens.
    """

    def __init__(self, recorder: DryRunRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._forward_start = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor then calls this mode again, with the shards
        kwargs = kwargs or {}
        if func in ring_attention.STEPS:
            with self:  # so that messages, buffers and products of each step are seen
                return ring_attention.STEPS[func](*args, **kwargs)
        if self.recorder.is_paused:
            return func(*args, **kwargs)
        name = str(func)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_on_device = any(one.device.type == "cuda" for one in tensors)
        self._track_backward()
        if name == READ_SCALAR:
            return self._read_scalar(args[0])
        if name == WAIT:
            return args[0]  # as on a device; torch's fake kernel makes a copy
        self._record_wait(func, name, args, kwargs, is_on_device)
        values = compute_known(func, args, kwargs, tensors)
        is_selection = DATA_DEPENDENT.intersection(func.tags) and not _has_static_shape(
            name, args, kwargs
        )
        if name == "aten._pin_memory.default":
            outputs = torch.empty_like(args[0])  # torch has no fake pinned memory
        else:
            outputs = (
                _select_rows(func, args, kwargs, values) if is_selection else func(*args, **kwargs)
            )
        if not exchange_known(func, args, kwargs, outputs):
            if values is None:
                drop_mutated(func, args, kwargs)
            else:
                attach_outputs(outputs, values)
        if self.recorder.probe is not None:
            self._record_tables(self.recorder.probe, name, outputs, tensors)
            return outputs
        self._record_outputs(func, name, outputs, is_on_device)
        if self.recorder.waits.is_recording:
            self._record_operation(func, name, args, kwargs, outputs, tensors, is_on_device)
        return outputs

    def _read_scalar(self, tensor: Tensor) -> Any:
        """Return a number of the host's: the known one, or 1."""
        if tensor.device.type == "cuda":
            self.recorder.waits.record("item")
        known = get_known(tensor)
        if known is not None:
            with leave_fake_mode():
                return known.item()
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _record_wait(
        self,
        func: OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_on_device: bool,
    ) -> None:
        waits = self.recorder.waits
        if not waits.is_recording:
            return
        if name in INDEXING:
            # Positions of a mask are counted on the device, and the host needs their number.
            if is_on_device and _has_mask_index(args):
                waits.record("index by a mask")
        elif name in ("aten._to_copy.default", "aten.copy_.default"):
            if cause := _find_copy_wait(name, args, kwargs):
                waits.record(cause)
        elif (
            is_on_device
            and DATA_DEPENDENT.intersection(func.tags)
            and not _has_static_shape(name, args, kwargs)
        ):
            waits.record(name.split(".")[1])

    def _track_backward(self) -> None:
        """Follow autograd in and out of the backward of a micro-batch."""
        phase = self.recorder.phase
        runs = torch._C._current_graph_task_id() != -1
        if runs and phase.category in (FORWARD, LOSS):
            self.recorder.memory.set_live_category(self._forward_start, FORWARD, SAVED)
            self.recorder.enter_phase(
                f"{phase.name.rpartition(':')[0]}: backward", BACKWARD, phase.repeated
            )
        elif not runs and phase.category == BACKWARD and phase.name.endswith("backward"):
            self.recorder.enter_phase(
                f"{phase.name.rpartition(':')[0]}: {GRADIENTS_COMPLETE}", BACKWARD
            )

    def begin_forward(self, name: str, repeated: str) -> None:
        """Begin the forward pass of a micro-batch."""
        self._forward_start = self.recorder.memory.num_events
        self.recorder.enter_phase(f"{name}: forward", FORWARD, repeated)

    def end_forward(self) -> None:
        """End a forward pass that others follow before its backward: what is left of it is
        saved.
        """
        if self.recorder.phase.category in (FORWARD, LOSS):
            self.recorder.memory.set_live_category(self._forward_start, FORWARD, SAVED)

    def enter_loss(self) -> None:
        """Enter the loss of the micro-batch whose forward runs."""
        phase = self.recorder.phase
        if phase.category == FORWARD:
            self.recorder.memory.set_live_category(self._forward_start, FORWARD, SAVED)
            self.recorder.enter_phase(phase.name.replace("forward", "loss"), LOSS, phase.repeated)

    def _record_outputs(
        self, func: OpOverload, name: str, outputs: Any, is_on_device: bool
    ) -> None:
        recorder = self.recorder
        for output in tree_leaves(outputs):
            if (
                isinstance(output, FakeTensor)
                and output.fake_device.type == "cuda"
                and not recorder.memory.is_known(output)
            ):
                category = _find_fsdp_category(name) or recorder.phase.category
                recorder.memory.record(output, category, self._get_owner(name))

    def _get_owner(self, name: str) -> str:
        """Return the module that runs, or an operation of the backward."""
        modules = self.recorder.modules
        return modules[-1] if modules else name.removeprefix("aten.").split(".")[0]

    def _record_tables(
        self, probe: PositionProbe, name: str, outputs: Any, tensors: list[Tensor]
    ) -> None:
        """Count the new storages of a probe that have two dimensions of positions."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        for output in tree_leaves(outputs):
            if (
                isinstance(output, FakeTensor)
                and output.fake_device.type == "cuda"
                and output.untyped_storage()._cdata not in given
                and probe.is_table(tuple(output.shape))
            ):
                given.add(output.untyped_storage()._cdata)
                shape = [*probe.scale_shape(tuple(output.shape))]
                dtype = str(output.dtype).removeprefix("torch.")
                key = self._get_owner(name), f"{dtype} {shape}", find_table_maker()
                self.recorder.squares[key] += 1

    def _record_operation(
        self,
        func: OpOverload,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        tensors: list[Tensor],
        is_on_device: bool,
    ) -> None:
        recorder = self.recorder
        repeated = self.recorder.phase.repeated
        sized = [*tensors, *(one for one in tree_leaves(outputs) if isinstance(one, Tensor))]
        is_update = recorder.phase.name.endswith(": optimizer")
        part = OPTIMIZER if is_update else repeated
        recorder.collectives.record(func, args, kwargs, sized, part)
        if not is_on_device or func.namespace == "prim":
            return
        recorder.count_operation(name, count_kernel_flops(func, args, kwargs, outputs))
        if computed := count_attention_flops(func, args):
            recorder.attention_flops[repeated, name] += computed


def _has_mask_index(args: tuple[Any, ...]) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _has_static_shape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation that is tagged as data dependent has a shape that the host
    knows.
    """
    if name in INDEXING:
        return name != "aten.index.Tensor" or not _has_mask_index(args)
    return kwargs.get("output_size") is not None


def _find_copy_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if name == "aten.copy_.default":
        target, source = args[0].device, args[1].device
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    else:
        device = kwargs.get("device")
        target, source = args[0].device if device is None else torch.device(device), args[0].device
        asynchronous = kwargs.get("non_blocking")
    if asynchronous or {target.type, source.type} != {"cpu", "cuda"}:
        return ""
    return "copy to the host" if target.type == "cpu" else "copy from pageable host memory"


def _select_rows(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], values: Any
) -> Any:
    """Return fake outputs of an operation whose shape depends on numbers."""
    source = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
    if values is not None:
        return tree_map(lambda one: source.new_empty(one.shape, dtype=one.dtype), values)
    match str(func):
        case "aten.index.Tensor":
            mask: Tensor = next(one for one in args[1] if one is not None)
            known = get_known(mask)
            rows = mask.numel()
            if known is not None:
                with leave_fake_mode():
                    rows = int(known.sum())
            place = next(number for number, one in enumerate(args[1]) if one is not None)
            return source.new_empty(
                (*source.shape[:place], rows, *source.shape[place + mask.dim() :])
            )
        case "aten.nonzero.default":
            return source.new_empty((source.numel(), source.dim()), dtype=torch.int64)
        case "aten.masked_select.default":
            return source.new_empty((args[1].numel(),))
        case _:
            return func(*args, **kwargs)


FSDP_FILES: dict[str, dict[str, str]] = {
    "_fsdp_collectives.py": {
        "foreach_all_gather": GATHERED,
        "foreach_all_gather_copy_out": GATHERED,
        "foreach_reduce": REDUCED,
        "foreach_reduce_scatter_copy_in": REDUCED,
    },
    "_fsdp_param.py": {
        "init_all_gather_outputs": GATHERED,
        "init_unsharded_param": GATHERED,
        "to_sharded_post_forward": GATHERED,
    },
}


def _find_fsdp_category(name: str) -> str:
    """Return the category of a storage that FSDP makes, by the function that asks for it."""
    frame: Any = sys._getframe(2)
    # FSDP's function is close, and this runs for every new storage.
    for _ in range(12):
        frame = frame.f_back
        if frame is None:
            return ""
        code = frame.f_code
        file = code.co_filename
        if "_fsdp_" in file:
            found = FSDP_FILES.get(file.rpartition("/")[2], {}).get(code.co_name)
            if found:
                return found
    return ""


def replace_tolist(waits: HostWaitLog) -> None:
    """Make `tolist` of fake tensors one wait, with the known numbers or ones."""

    def read_list(tensor: FakeTensor) -> Any:
        if tensor.device.type == "cuda":
            waits.record("tolist")
        known = get_known(tensor)
        with leave_fake_mode():
            return (
                torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
                if known is None
                else known
            ).tolist()

    FakeTensor.tolist = read_list  # type: ignore[assignment,method-assign]

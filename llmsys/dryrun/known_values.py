"""Numbers of fake tensors that the host can know: counts, lengths and routing tables.

A fake tensor has a shape and no numbers. Where the training program computes sizes from numbers
(rows for each expert, valid targets), those numbers come from the synthetic batch and a forced
routing. They are carried next to the fake tensors as real tensors on the CPU, and every operation
on known tensors is computed on them too.

Invariants:
- A tensor that cannot be computed from known tensors is unknown.
- Every other rank is taken to route as this rank does, so a collective gives what this rank would
  have sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

ATTRIBUTE = "_llmsys_known"
# Larger tensors are unknown: tables of positions by positions are, tokens by experts chosen are
# not.
MAX_INTEGERS = 1 << 22
MAX_FLOATS = 1 << 14

CPU = torch.device("cpu")
RANDOM = {torch.Tag.nondeterministic_seeded}
UNSET = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided")


def get_known(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor.

    Args:
        tensor: A real tensor, or a fake one.

    Returns:
        The tensor itself if it is real, else what was attached to it; None where that is
        unknown.
    """
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, ATTRIBUTE, None)
    return (
        tensor
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        else None
    )


def attach_known(tensor: Tensor, values: Tensor) -> None:
    """Attach numbers to a fake tensor.

    Args:
        tensor: The fake tensor.
        values: A real tensor of the same shape.
    """
    setattr(tensor, ATTRIBUTE, values)


def drop_known(tensor: Tensor) -> None:
    """Make a fake tensor unknown.

    Args:
        tensor: The fake tensor.
    """
    if hasattr(tensor, ATTRIBUTE):
        delattr(tensor, ATTRIBUTE)


@contextmanager
def leave_fake_mode() -> Iterator[None]:
    """Compute on real tensors inside of a fake mode."""
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        yield


def compute_known(
    func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
) -> Any:
    """Compute an operation on the numbers of its arguments.

    Args:
        func: the operation.
        args: its arguments, fake.
        kwargs: its named arguments.
        tensors: the tensors among both.

    Returns:
        The outputs as real tensors on the CPU; None where an argument is unknown, or the CPU has no
        such operation.
    """
    for tensor in tensors:
        if not _is_small(tensor) or get_known(tensor) is None:
            return None
    if not tensors and not _is_integer_factory(func, args, kwargs):
        return None
    if RANDOM.intersection(func.tags):
        return None

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return get_known(value)
        return CPU if isinstance(value, torch.device) else value

    own = {name: convert(value) for name, value in kwargs.items() if name != "pin_memory"}
    own = {name: tree_map(convert, value) for name, value in own.items()}
    with leave_fake_mode():
        try:
            values = func(*tree_map(convert, args), **own)
        except NotImplementedError:
            return None  # a kernel of CUDA devices alone, such as flash attention
        # Uninitialized numbers would differ from run to run.
        if str(func).startswith(UNSET):
            values.zero_()
    return values


def attach_outputs(outputs: Any, values: Any) -> None:
    """Attach computed numbers to the fake outputs of an operation.

    Args:
        outputs: Its fake outputs, nested as torch returns them.
        values: The real outputs, nested alike.
    """
    for output, value in zip(tree_leaves(outputs), tree_leaves(values), strict=True):
        if isinstance(output, FakeTensor) and isinstance(value, Tensor) and _is_small(value):
            attach_known(output, _copy_layout(value, output))


def _copy_layout(values: Tensor, output: FakeTensor) -> Tensor:
    """Return the numbers in the layout of a fake tensor: kernels of the CPU may choose another than
    those of its device, in which a later view would fail.
    """
    strides = output.stride()
    if values.stride() == strides or 0 in strides:
        return values
    with leave_fake_mode():
        return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)


def drop_mutated(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    """Make the tensors that an operation writes into unknown.

    Args:
        func: The operation; its schema says which arguments it changes.
        args: Its positional arguments.
        kwargs: Its named arguments.
    """
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(written):
                if isinstance(tensor, FakeTensor):
                    drop_known(tensor)


def _is_small(tensor: Tensor) -> bool:
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MAX_FLOATS if is_float else MAX_INTEGERS)


def _is_integer_factory(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a factory makes integers, booleans or a few floats; weights are not worth
    their memory.
    """
    if str(func).startswith("aten.arange"):
        return all(isinstance(one, int) and abs(one) <= MAX_INTEGERS for one in args)
    if str(func).startswith("aten.scalar_tensor"):
        return True  # torch makes one of the number in `torch.where(mask, x, 0)`
    size = args[0] if args and isinstance(args[0], list | tuple) else None
    if size is None or not all(isinstance(one, int) for one in size):
        return False
    dtype = kwargs.get("dtype")
    is_integer = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    numel = 1
    for one in size:
        numel *= one
    return numel <= (MAX_INTEGERS if is_integer else MAX_FLOATS)

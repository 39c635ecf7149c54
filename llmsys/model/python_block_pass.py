"""One pass of a module on the meta device, which shows its parameters, FLOPs and saved bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.block_measurement import BlockMeasurement, MeasuredParameter, MeasuredTensor
from llmsys.config.module_tensors import Producer

# B rows, T positions, D width

_ATEN = torch.ops.aten
# What selective checkpointing saves, see llmsys/parallel/activation_checkpoint.py.
_PRODUCTS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
    }
)
_ATTENTION = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


class _ProducerMode(TorchDispatchMode):
    """Records the storages that a pass has made, and by which kind of operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.producers: dict[int, tuple[Producer, int]] = {}
        # A storage that is freed would give its address to another one.
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        producer: Producer = "pointwise"
        if func in _PRODUCTS or func in _ATTENTION:
            producer = "product" if func in _PRODUCTS else "attention"
        # A view and an operation in place keep the storage that another one has made.
        given = {one.untyped_storage()._cdata for one in _list_tensors((args, kwargs))}
        for one in _list_tensors(found):
            storage = one.untyped_storage()
            if storage._cdata not in given:
                self.producers[storage._cdata] = producer, storage.nbytes()
                self.kept.append(storage)
        return found


def _list_tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def measure_pass(module: nn.Module, x_BTD: Tensor, run: Callable[[], Tensor]) -> BlockMeasurement:
    """Run a module once, and count.

    Args:
        module: the module, on the meta device.
        x_BTD: its input.
        run: runs it.

    Returns:
        Parameters, FLOPs as torch counts them, and the bytes that autograd saves.
    """
    vectors: dict[nn.Module, int] = {}

    def count_vectors(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        vectors[layer] = vectors.get(layer, 0) + inputs[0].numel() // inputs[0].shape[-1]

    linear = [one for one in module.modules() if isinstance(one, nn.Linear)]
    hooks = [one.register_forward_pre_hook(count_vectors) for one in linear]
    saved: set[int] = set()
    kept: list[Any] = []

    def count_saved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.add(storage._cdata)
        kept.append(storage)
        return tensor

    made = _ProducerMode()
    with (
        FlopCounterMode(display=False) as counter,
        made,
        torch.autograd.graph.saved_tensors_hooks(count_saved, lambda tensor: tensor),
    ):
        y_BTD = run()
    for hook in hooks:
        hook.remove()
    made.producers.pop(y_BTD.untyped_storage()._cdata, None)
    positions = x_BTD.shape[0] * x_BTD.shape[1]
    every_position = {id(layer.weight) for layer, count in vectors.items() if count == positions}
    # Others have made the input, parameters, and what all layers share.
    totals: dict[tuple[Producer, bool], int] = {}
    for storage, (producer, size) in made.producers.items():
        is_saved = storage in saved
        if is_saved or producer != "pointwise":
            totals[producer, is_saved] = totals.get((producer, is_saved), 0) + size
    flops = int(counter.get_total_flops())
    return BlockMeasurement(
        tuple(
            MeasuredParameter(name, tuple(one.shape), id(one) in every_position)
            for name, one in module.named_parameters()
        ),
        flops,
        flops,
        tuple(MeasuredTensor(one, size, is_saved) for (one, is_saved), size in totals.items()),
    )

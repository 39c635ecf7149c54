"""How many bytes a forward pass leaves in memory, whoever holds them: autograd, checkpoints, or the model itself."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Born(TorchDispatchMode):
    """Follows every storage that an operation makes for as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it gave."""
        given = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.sizes[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        return given


def kept_after(forward: Callable[[], Tensor], *known: Tensor) -> int:
    """Bytes of the storages made by `forward` that are alive when it is over, without those of `known`."""
    with Born() as born:
        given = forward()
    own = {one.untyped_storage()._cdata for one in known}
    total = 0
    for address, (weak, size) in born.sizes.items():
        alive = not UntypedStorage._expired(weak)
        total += size if alive and address not in own else 0
        UntypedStorage._free_weak_ref(weak)
    del given
    return total

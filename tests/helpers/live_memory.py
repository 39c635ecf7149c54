"""How many bytes tensors hold, whoever keeps them: autograd, checkpoints, FSDP, or the model
itself.

Every operation's outputs are followed by their storages, which are not kept alive by that.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Followed(TorchDispatchMode):
    """Follows the storages that operations make. `peak_bytes` is the most that was alive behind any
    operation.

    The storages of `apart`, which operations look at too, are not counted.
    """

    def __init__(self, *apart: Tensor) -> None:
        super().__init__()
        self._weak: dict[int, Any] = {}
        self._apart = {_local(one).untyped_storage()._cdata for one in apart}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it gave."""
        given = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                storage = _local(leaf).untyped_storage()
                known = self._weak.get(storage._cdata)
                if known is None or UntypedStorage._expired(known):
                    self._weak[storage._cdata] = storage._weak_ref()
        self.peak_bytes = max(self.peak_bytes, self.alive())
        return given

    def alive(self) -> int:
        """Bytes that are alive now. Sizes are those of now: FSDP empties storages."""
        storages = [
            UntypedStorage._new_with_weak_ptr(one)
            for key, one in self._weak.items()
            if key not in self._apart
        ]
        sizes: list[int] = [one.nbytes() for one in storages if one is not None]
        return sum(sizes)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def measure_kept_bytes(forward: Callable[[], Tensor], *known: Tensor) -> int:
    """Bytes of the storages made by `forward` that are alive when it is over, without those of
    `known`.
    """
    with Followed(*known) as followed:
        given = forward()
    kept: int = followed.alive()
    del given
    return kept

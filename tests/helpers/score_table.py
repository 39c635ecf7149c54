"""Find tensors of positions × positions: the tables that no kernel of an accelerator should
need.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ScoreTableFinder(TorchDispatchMode):
    """A mode that lists the operations whose results hold at least `length`² elements in memory."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            # Of a view, what it is a view of: an expanded row is no table.
            if (
                isinstance(x, Tensor)
                and x.untyped_storage().nbytes() // x.element_size() >= self.length**2
            ):
                self.found.append(f"{func} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}")
        return results

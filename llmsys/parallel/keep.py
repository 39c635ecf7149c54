"""What selective recomputation keeps between the two passes of a block, operation by operation.

torch's own contexts for this watch every operation of a block, those of FSDP's hooks inside of it too, and give up when
the second pass gathers weights that the first found gathered. These look at the operations that are kept and at no
others. Compiled blocks use torch's, which the compiler understands, and have no hooks inside.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


class _SavedOutputs(NamedTuple):
    """What an operation gave, the shapes of what it got, and how often each result had been changed in place."""

    outputs: Any
    shapes: list[torch.Size]
    versions: list[int]


Store = dict[Any, deque[_SavedOutputs]]


def build_eager_contexts(operations: Collection[Any]) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """For `checkpoint(context_fn=…)`: contexts of the first and of the second pass."""

    def build_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        store: Store = defaultdict(deque)
        return _SavingMode(operations, store), _RecomputingMode(operations, store)

    return build_contexts


def build_compiled_contexts(operations: Collection[Any]) -> Callable[[], Any]:
    """The same for blocks inside torch.compile."""

    def choose_policy(context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in operations else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(choose_policy)


class _SavingMode(TorchDispatchMode):
    """Computes everything, and stores what some operations give."""

    def __init__(self, operations: Collection[Any], store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.store = operations, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in self.operations:
            kept = tree_map_only(Tensor, _detach_alias, outputs)
            self.store[func].append(_SavedOutputs(kept, _list_shapes(args), _list_versions(kept)))
        return outputs


class _RecomputingMode(TorchDispatchMode):
    """Takes what is stored, in the order in which it was, and computes the rest."""

    def __init__(self, operations: Collection[Any], store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.store = operations, store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operations:
            return func(*args, **(kwargs or {}))
        if not self.store[func]:
            raise RuntimeError(f"the second pass of a block has more of {func} than the first. {_RULE}")
        outputs, shapes, versions = self.store[func].popleft()
        if shapes != _list_shapes(args):
            raise RuntimeError(f"{func} met {_list_shapes(args)}, and in the first pass {shapes}. {_RULE}")
        if versions != _list_versions(outputs):
            raise RuntimeError(f"what {func} gave was changed in place after it was kept. {_RULE}")
        return outputs


_RULE = "Both passes must run the same operations, one backward follows a forward, and products are not changed."


def _detach_alias(x: Tensor) -> Tensor:
    """The same memory and version counter, without the graph that will be hung onto `x`."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _list_shapes(inputs: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _list_versions(outputs: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

"""What selective recomputation keeps between the two passes of a block, operation by operation.

torch's own contexts for this watch every operation of a block, those of FSDP's hooks inside of it too, and give up when
the second pass gathers weights that the first found gathered. These look at the operations that are kept and at no
others. Compiled blocks use torch's, which the compiler understands, and have no hooks inside.

Activation recomputation, applied from outside to every block: of decoder, encoder and prediction modules alike.

A block is a function of what enters it, so its backward may compute again what its forward did not keep (Chen 2016,
arXiv:1604.06174). Same bits: random numbers are drawn again from the same state, routing and all-to-alls repeat, and
whatever a trainer counts is counted in the first pass only (see `llmsys.model.load_balancing.is_recomputation`).

What stays in memory from forward to backward, the policy that the estimate of memory follows:

* `none`: what autograd saves.
* `block`: what enters the block, and what all blocks share (masks, rotation tables, the encoder's output). In the
  backward of a block everything in it lives once, as with `none`.
* `selective`: that, and the outputs of `KEPT`: products with weights (of experts too; with fp8 weights too),
  attention in one kernel with its logsumexp (on the CPU in bfloat16: with its probabilities), and what collectives
  bring from other ranks (tokens of all-to-alls, partial sums of reduce-scatters). Computed again are norms,
  rotations, activations and their products, dropout, casts, sums with the residual stream, the sorting of tokens by
  expert, and attention whose scores are explicit because no kernel knows them (caps, sinks, distances, dropout on
  CPUs): its tensors of T × T are what Korthikanti 2022 (arXiv:2205.05198, 5) gives up too.

The last product of a block is not computed again where nothing behind it needs its result: torch stops as soon as
every saved tensor is there.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmsys.model import cpu_attention, cpu_kernels
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock


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


Recompute = Literal["none", "selective", "full"]

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    cpu_attention.OPERATION,
    cpu_kernels.OPERATION,
    collectives.all_to_all_single.default,
    collectives.reduce_scatter_tensor.default,
}
"""The operations whose outputs `selective` keeps."""


def apply_activation_checkpoint(model: Transformer, what: Recompute, *, compiled: bool = False) -> None:
    """Wrap the forward of every block. The wrapper is a function, so names of parameters and modules stay.

    With `compiled`, before `compile_blocks`: torch.compile then sees what is to be computed again, and decides with it.
    (Around a compiled block `selective` would see one opaque operation.)
    """
    if what == "none":
        return
    contexts = build_compiled_contexts if compiled else build_eager_contexts
    options: dict[str, Any] = {"context_fn": contexts(KEPT)} if what == "selective" else {}
    for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
        again = partial(checkpoint, block.forward, use_reentrant=False, **options)
        block.forward = _recompute_if_grad_enabled(again, block.forward)  # type: ignore[method-assign]


def _recompute_if_grad_enabled(again: Callable[..., Tensor], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without a backward there is nothing to keep, and a cache of keys must see its tokens once."""

    def call_block(*inputs: Any) -> Tensor:
        return again(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return call_block

"""Activation checkpointing of every block: of decoder, encoder and prediction modules (Chen 2016,
arXiv:1604.06174).

Invariants:
- The same bits with and without: random numbers are drawn again from the same state, routing and
  all-to-alls repeat, and counters are updated in the first pass only
  (`llmsys.model.load_balancing.is_recomputation`).
- The host reads the splits of all-to-alls in the first pass only (llmsys/model/host_read.py),
  except where blocks are compiled.

Saved from forward to backward, which llmsys/estimate restates:

- `none`: the tensors autograd saves.
- `offload`: nothing on the device; the tensors autograd saves are in host memory
  (activation_offload.py).
- `full`: the inputs of the block, and what all blocks share (masks, rotary tables, encoder output).
- `selective`: the same, and the outputs of `SAVED_OPERATIONS`: matmuls with weights (also of
  experts, also in fp8), fused attention with its logsumexp (on the CPU in bfloat16 its
  probabilities), and received data of collectives. Recomputed are norms, rotations, activations,
  dropout, casts, residual sums, the sorting of tokens by expert, flex_attention (compiled code,
  which no dispatch mode sees), and eager attention (soft caps, sinks, distances, dropout on CPUs),
  whose T × T tensors Korthikanti 2022 (arXiv:2205.05198, 5) recomputes too.

The last matmul of a block is not recomputed where no saved tensor depends on it: torch stops as
soon as it has all.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llmsys.model import cpu_attention, cpu_kernels, varlen_attention
from llmsys.model.host_read import RepeatedReads
from llmsys.model.transformer import Transformer
from llmsys.parallel import ring_attention
from llmsys.parallel.activation_offload import apply_activation_offload
from llmsys.parallel.block_compilation import Piece, list_blocks, list_branches, must_compile_pieces


class _SavedOutputs(NamedTuple):
    """Outputs of one call, the shapes of its inputs, and the version counter of each output."""

    outputs: Any
    shapes: list[torch.Size]
    versions: list[int]


Store = dict[Any, deque[_SavedOutputs]]


# Of the first pass, and of the pass that repeats it.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def build_read_contexts() -> Contexts:
    """Return the contexts in which the second pass reuses what the host has read in the first."""
    reads = RepeatedReads()
    return reads.record(), reads.replay()


def build_eager_contexts(operations: Collection[Any]) -> Callable[[], Contexts]:
    """Build the `context_fn` of `torch.utils.checkpoint.checkpoint` for eager blocks.

    torch's own contexts intercept every operation of a block, those of FSDP's hooks included,
    and fail when the second pass gathers weights that were already gathered in the first. These
    intercept the saved operations only.

    Args:
        operations: Operations whose outputs are saved; all others run again in the backward
            pass.

    Returns:
        A function that returns the contexts of the first and of the second pass.
    """

    def build_contexts() -> Contexts:
        store: Store = defaultdict(deque)
        record, replay = build_read_contexts()
        return _enter_both(record, _SavingMode(operations, store)), _enter_both(
            replay, _RecomputingMode(operations, store)
        )

    return build_contexts


@contextmanager
def _enter_both(
    one: AbstractContextManager[Any], other: AbstractContextManager[Any]
) -> Iterator[None]:
    with one, other:
        yield


def build_compiled_contexts(operations: Collection[Any]) -> Callable[[], Any]:
    """Build the `context_fn` for blocks inside torch.compile, which supports torch's own contexts
    only.

    Args:
        operations: Operations whose outputs are saved.

    Returns:
        A function that returns the contexts of the first and of the second pass.
    """

    def choose_policy(context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operation in operations
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return lambda: create_selective_checkpoint_contexts(choose_policy)


class _SavingMode(TorchDispatchMode):
    """Dispatch mode of the first pass: stores the outputs of some operations."""

    def __init__(self, operations: Collection[Any], store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.store = store

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled, and both passes compute them."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in self.operations:
            # An alias: the output itself would keep the graph that autograd attaches to it.
            saved = tree_map_only(Tensor, _detach_alias, outputs)
            # Shapes reveal a second pass that takes another branch, versions an output that was
            # overwritten.
            self.store[func].append(_SavedOutputs(saved, _list_shapes(args), _list_versions(saved)))
        return outputs


class _RecomputingMode(TorchDispatchMode):
    """Dispatch mode of the second pass: returns stored outputs in their order, and computes the
    rest.
    """

    def __init__(self, operations: Collection[Any], store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.store = store

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as in the first pass."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operations:
            return func(*args, **(kwargs or {}))
        if not self.store[func]:
            raise RuntimeError(
                f"the second pass of a block calls {func} more often than the first. {_RULE}"
            )
        outputs, shapes, versions = self.store[func].popleft()
        if shapes != _list_shapes(args):
            raise RuntimeError(
                f"{func} got shapes {_list_shapes(args)}, and {shapes} in the first pass. {_RULE}"
            )
        if versions != _list_versions(outputs):
            raise RuntimeError(
                f"an output of {func} was changed in place after it was saved. {_RULE}"
            )
        return outputs


_RULE = (
    "Both passes must run the same operations, with one backward per forward, and leave saved "
    "outputs unchanged."
)


def _detach_alias(x: Tensor) -> Tensor:
    """Return an alias with the same storage and version counter, without the graph that will be
    attached to `x`.
    """
    # Dispatch modes run with this key excluded, and an alias would then get a version counter of
    # its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _list_shapes(inputs: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _list_versions(outputs: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


ActivationCheckpointMode = Literal["none", "selective", "full", "offload"]

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
# Operations whose outputs `selective` saves.
SAVED_OPERATIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    cpu_attention.OPERATION,
    varlen_attention.OPERATION,
    ring_attention.OPERATION,
    cpu_kernels.OPERATION,
    collectives.all_to_all_single.default,
    collectives.reduce_scatter_tensor.default,
}


def apply_activation_checkpoint(
    model: Transformer,
    mode: ActivationCheckpointMode,
    *,
    compiled: bool = False,
    separates_experts: bool = False,
) -> None:
    """Wrap the forward of every block. Names of parameters and modules do not change.

    Args:
        model: A model before FSDP. Blocks that are compiled already are recomputed as they are.
        mode: See the module's docstring.
        compiled: Whether `compile_blocks` follows. torch.compile then partitions the recomputation
            itself; around a compiled block `selective` would see one opaque operation.
        separates_experts: See `must_compile_pieces`.
    """
    if mode == "offload":
        apply_activation_offload(model)
        return
    for block in list_blocks(model):
        in_pieces = compiled and must_compile_pieces(block, separates_experts=separates_experts)
        match mode:
            case "none":
                pass
            case "full" if compiled and not in_pieces:
                # A block that is compiled as one graph has no splits for the host to read, see
                # `must_compile_pieces`.
                _wrap_method((block, "forward"))
            case "full":
                _wrap_method((block, "forward"), build_read_contexts)
            case "selective" if in_pieces:
                # Apart: attention is compiled, and the experts are not.
                attention, experts = list_branches(block)
                _wrap_method(attention, build_compiled_contexts(SAVED_OPERATIONS))
                _wrap_method(experts, build_eager_contexts(SAVED_OPERATIONS))
            case "selective":
                build_contexts = build_compiled_contexts if compiled else build_eager_contexts
                _wrap_method((block, "forward"), build_contexts(SAVED_OPERATIONS))
            case unreachable:
                assert_never(unreachable)


def _wrap_method(piece: Piece, build_contexts: Callable[[], Any] | None = None) -> None:
    owner, name = piece
    forward = getattr(owner, name)
    options: dict[str, Any] = {} if build_contexts is None else {"context_fn": build_contexts}
    # The reentrant variant takes no contexts.
    checkpointed = partial(checkpoint, forward, use_reentrant=False, **options)
    setattr(owner, name, _apply_if_grad_enabled(checkpointed, forward))


def _apply_if_grad_enabled(
    checkpointed: Callable[..., Tensor], forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def call_block(*inputs: Any) -> Tensor:
        # Without a backward nothing is saved, and a key-value cache must see its tokens once.
        return checkpointed(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return call_block

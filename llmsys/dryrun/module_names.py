"""Names of the modules whose forward is running, for the owners of storages, waits and products."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")
_BLOCK = re.compile(r"^((encoder\.)?blocks\.\d+|prediction\.\d+\.block)$")
_INSIDE = re.compile(r"(^|\.)(blocks\.\*|block)(\.|$)")


def replace_layers(name: str) -> str:
    """Return the name of a module with `*` for each number of a layer.

    Args:
        name: As in `named_modules`.

    Returns:
        The name of all modules that are alike.
    """
    return _NUMBERS.sub(".*", name)


def is_inside_block(name: str) -> bool:
    """Return whether a module is a block or a part of one.

    Args:
        name: From `replace_layers`.

    Returns:
        False for embedding, final norm, head, and the empty name of the model.
    """
    return _INSIDE.search(name) is not None


def track_modules(model: nn.Module, running: list[str], count_block: Callable[[str], None]) -> None:
    """Keep the names of running modules in a list, innermost last; numbers of layers become `*`.

    Args:
        model: its modules are named; others keep the name of what runs around them.
        running: changed in place.
        count_block: called with the name of a block as its forward begins, such as `blocks.3`.
    """
    plain = {id(module): _WRAPPERS.sub("", name + ".") for name, module in model.named_modules()}
    names = {key: replace_layers(name.removesuffix(".")) for key, name in plain.items()}
    # A wrapper has the name of what it wraps; the last module of a name is the innermost.
    innermost = {name.removesuffix("."): key for key, name in plain.items()}
    blocks = {key: name for name, key in innermost.items() if _BLOCK.match(name)}

    def enter(module: nn.Module, arguments: Any) -> None:
        if (block := blocks.get(id(module))) is not None:
            count_block(block)
        running.append(names.get(id(module), running[-1] if running else ""))

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        running.pop()

    register_module_forward_pre_hook(enter)
    # Also after an exception: activation checkpointing ends a recomputed forward by one.
    register_module_forward_hook(leave, always_call=True)

"""Names of the modules whose forward is running, for the owners of storages."""

import re
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")


def track_modules(model: nn.Module, running: list[str]) -> None:
    """Keep the names of running modules in a list, innermost last; numbers of layers become `*`.

    Args:
        model: its modules are named; others keep the name of what runs around them.
        running: changed in place.
    """
    names = {
        id(module): _NUMBERS.sub(".*", _WRAPPERS.sub("", name))
        for name, module in model.named_modules()
    }

    def enter(module: nn.Module, arguments: Any) -> None:
        running.append(names.get(id(module), running[-1] if running else ""))

    def leave(module: nn.Module, arguments: Any, outputs: Any) -> None:
        running.pop()

    register_module_forward_pre_hook(enter)
    # Also after an exception: activation checkpointing ends a recomputed forward by one.
    register_module_forward_hook(leave, always_call=True)

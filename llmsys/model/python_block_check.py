"""Build the modules of the user's own attention and feed-forward, and test them once with numbers.

The test is of what a declaration cannot show: a mixer that reads later positions or other
documents, a feed-forward that mixes positions, a module with a state or with unused parameters.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from llmsys.config.loading.python_block import load_python_block
from llmsys.config.loading.python_object import describe_error
from llmsys.config.model import ModelConfig
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.errors import ConfigError
from llmsys.model.python_block import PythonBlock, PythonFeedForward, PythonMixer

# B rows, T positions, D width

# Positions of the row of the test; its second half is what earlier positions must not read.
_LENGTH = 8
# Relative to the largest value. Rounding is a thousand times smaller, a leak larger.
_TOLERANCE = 1e-3


def build_python_block(
    config: PythonAttentionConfig | PythonFeedForwardConfig, model: ModelConfig, layer: int
) -> nn.Module:
    """Build the module of a layer from the user's code.

    Args:
        config: the section.
        model: the model.
        layer: number of the layer.

    Returns:
        The module, on the current default device.

    Raises:
        ConfigError: the code is missing or fails, its declarations are wrong, its layers have
            different parameters, or it fails the test with numbers.
    """
    block = get_python_block(config)
    module = block.build_module(model, layer)
    first = _list_first_parameters(config, model)
    block.check_equal_parameters(module, layer, first, "layer 0 has")
    if not block.needs_accelerator:
        _check_once(config, model)
    return module


def get_python_block(config: PythonAttentionConfig | PythonFeedForwardConfig) -> PythonBlock:
    """Return the user's object of a section.

    Args:
        config: the section.

    Returns:
        The object, built once in a process.

    Raises:
        ConfigError: the class extends no class of `llmsys.model.python_block`.
    """
    block = load_python_block(config)
    if not isinstance(block, PythonBlock):
        raise ConfigError(
            f"{config.path}: the class does not extend PythonMixer or PythonFeedForward of "
            "llmsys.model.python_block. Import it from there."
        )
    return block


@lru_cache(maxsize=8)
def _list_first_parameters(
    config: PythonAttentionConfig | PythonFeedForwardConfig, model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of layer 0 by name."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = get_python_block(config).build_module(model, 0)
    return {name: tuple(one.shape) for name, one in module.named_parameters()}


@lru_cache(maxsize=8)
def _check_once(
    config: PythonAttentionConfig | PythonFeedForwardConfig, model: ModelConfig
) -> None:
    """Test the module of layer 0, once in a process."""
    check_python_block(get_python_block(config), model)


def check_python_block(block: PythonBlock, model: ModelConfig) -> None:
    """Test the module of layer 0 with numbers, on the CPU.

    Args:
        block: the user's object.
        model: the model that it is built for.

    Raises:
        ConfigError: it fails, returns numbers that are not finite or differ when it is called
            again, leaves a parameter without a gradient, or reads what it must not: later
            positions (a causal mixer), other documents (a mixer that masks them), or other
            positions (a feed-forward).
    """
    length = min(_LENGTH, model.max_position_embeddings)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        module = block.build_module(model, 0).eval()
        _draw_parameters(module)
        x_1TD = torch.randn(1, length, model.hidden_size)
        y_1TD = _run(block, module, model, x_1TD)
        _check_values(block, module, model, x_1TD, y_1TD)
        _check_gradients(block, module, y_1TD)
        _check_independence(block, module, model, x_1TD, y_1TD)


def _draw_parameters(module: nn.Module) -> None:
    """Draw values with which every position matters to those that read it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, max(1, parameter.shape[-1] if parameter.ndim else 1) ** -0.5)


def _run(
    block: PythonBlock,
    module: nn.Module,
    model: ModelConfig,
    x_1TD: Tensor,
    documents_1T: Tensor | None = None,
) -> Tensor:
    context = block.build_context(model, x_1TD, documents_1T)
    try:
        return block.run_module(module, x_1TD, context, model, 0)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{block.key}: {type(block).__name__} failed on an input of {tuple(x_1TD.shape)} on "
            f"the CPU: {describe_error(error, block.file)}. Correct forward; a class without a "
            "form for the CPU sets needs_accelerator = True."
        ) from error


def _check_values(
    block: PythonBlock, module: nn.Module, model: ModelConfig, x_1TD: Tensor, y_1TD: Tensor
) -> None:
    name = type(block).__name__
    if not bool(y_1TD.isfinite().all()):
        wrong = y_1TD[~y_1TD.isfinite()][0].item()
        raise ConfigError(
            f"{block.key}: {name} returned {wrong} for normal inputs. Correct forward; a division "
            "may need an epsilon, and a position of a mask at least one key."
        )
    if _are_apart(y_1TD, _run(block, module, model, x_1TD)):
        raise ConfigError(
            f"{block.key}: {name} returns other numbers when it is called again in evaluation. "
            "Keep no state between calls, and drop nothing unless self.training."
        )


def _check_gradients(block: PythonBlock, module: nn.Module, y_1TD: Tensor) -> None:
    named = dict(module.named_parameters())
    if not named:
        return
    gradients = torch.autograd.grad(y_1TD.square().sum(), list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise ConfigError(
                f"{block.key}: {type(block).__name__}: the parameter {name} gets no gradient, and "
                "data-parallel ranks would wait for it. Use it in forward, or leave it out."
            )


def _check_independence(
    block: PythonBlock, module: nn.Module, model: ModelConfig, x_1TD: Tensor, y_1TD: Tensor
) -> None:
    name = type(block).__name__
    half = x_1TD.shape[1] // 2
    changed_1TD = x_1TD.clone()
    changed_1TD[:, half:] += 3 * torch.randn_like(changed_1TD[:, half:])
    if isinstance(block, PythonFeedForward):
        if _are_apart(y_1TD[:, :half], _run(block, module, model, changed_1TD)[:, :half]):
            raise ConfigError(
                f"{block.key}: {name} returns other numbers for a position when others change. A "
                "feed-forward sees one position; a model.attention of kind python mixes them."
            )
        return
    assert isinstance(block, PythonMixer)
    later_1TD = _run(block, module, model, changed_1TD)
    if model.family != "encoder" and _are_apart(y_1TD[:, :half], later_1TD[:, :half]):
        raise ConfigError(
            f"{block.key}: {name} reads later positions, which model.family={model.family} "
            "predicts. Mask them, as context.build_mask() does."
        )
    if not block.masks_documents:
        return
    documents_1T = torch.zeros(x_1TD.shape[:2], dtype=torch.int64)
    documents_1T[:, half:] = 1
    first_1TD = _run(block, module, model, x_1TD, documents_1T)
    second_1TD = _run(block, module, model, changed_1TD, documents_1T)
    other_1TD = x_1TD.clone()
    other_1TD[:, :half] += 3 * torch.randn_like(other_1TD[:, :half])
    third_1TD = _run(block, module, model, other_1TD, documents_1T)
    if _are_apart(first_1TD[:, :half], second_1TD[:, :half]) or _are_apart(
        first_1TD[:, half:], third_1TD[:, half:]
    ):
        raise ConfigError(
            f"{block.key}: {name} sets masks_documents, and reads other documents. Mask pairs of "
            "unequal context.documents_BT, as context.build_mask() does."
        )


def _are_apart(one: Tensor, other: Tensor) -> bool:
    largest = float(one.detach().abs().max())
    return float((one - other).detach().abs().max()) > _TOLERANCE * largest

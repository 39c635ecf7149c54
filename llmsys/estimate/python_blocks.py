"""Parameters, FLOPs and saved tensors of attention and feed-forward of the user's own code
(`kind: python`), as one pass over the built module measures them.

The user's file imports torch, so an estimate of such a config does too; this module does not.
"""

from collections.abc import Iterator
from functools import lru_cache

from llmsys.config.block_measurement import BlockMeasurement, MeasuredRows
from llmsys.config.loading.python_block import load_python_block
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import (
    ActivationShape,
    Component,
    ParameterTensor,
    SavedTensor,
)
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig

PythonBlockConfig = PythonAttentionConfig | PythonFeedForwardConfig

# Positions of the row that parameters are read with; FLOPs and bytes have the row in question.
_SHORT = MeasuredRows(length=4)


@lru_cache(maxsize=512)  # a plan asks for the same layers again and again
def measure_block(
    config: PythonBlockConfig, model: ModelConfig, layer: int, rows: MeasuredRows
) -> BlockMeasurement:
    """Run the user's module on the meta device.

    Args:
        config: the section, `model.attention` or `model.feed_forward`.
        model: the model.
        layer: number of the layer.
        rows: its input.

    Returns:
        Its parameters, FLOPs and saved bytes.

    Raises:
        ConfigError: the code is missing or fails, or declares something else than it does.
    """
    return load_python_block(config).measure_on_meta_device(model, layer, rows)


def iter_measured_parameters(
    config: PythonBlockConfig, model: ModelConfig, name: str, component: Component
) -> Iterator[ParameterTensor]:
    """Yield the parameters of a block, which are the same in every layer.

    Args:
        config: the section.
        model: the model.
        name: prefix of the names, such as `attention`.
        component: component that they are counted in; weights of norms are in `norms`.

    Yields:
        One row for each parameter. Weights of linear layers are multiplied with every token.
    """
    for one in measure_block(config, model, 0, _SHORT).parameters:
        is_norm = one.name.rpartition(".")[0].endswith("norm")
        yield ParameterTensor(
            f"{name}.{one.name}",
            one.shape,
            "norms" if is_norm else component,
            input="token" if one.is_linear else None,
        )


def count_measured_products(
    config: PythonBlockConfig,
    model: ModelConfig,
    layer: int,
    length: int,
    documents: list[int] | None,
) -> int:
    """Return the multiplications of a layer for one row that are not those of its linear layers,
    which `iter_measured_parameters` counts.

    Args:
        config: the section.
        model: the model.
        layer: number of the layer.
        length: positions of the row.
        documents: lengths of its documents, to count visible pairs where the class declares them;
            None: all that is computed.

    Returns:
        Multiplications, each with its addition.
    """
    rows = MeasuredRows(length, documents=tuple(documents or ()))
    found = measure_block(config, model, layer, rows)
    flops = found.flops if documents is None else found.visible_flops
    return (flops - length * found.linear_flops_per_position) // 2


def count_feed_forward_products(model: ModelConfig, length: int) -> int:
    """Return the multiplications of all dense feed-forwards for one row that no linear layer has.

    Args:
        model: the model.
        length: positions of the row.

    Returns:
        Multiplications; 0 for a built-in kind.
    """
    config = model.feed_forward
    if not isinstance(config, PythonFeedForwardConfig) or model.rnn is not None:
        return 0
    layers = [layer for layer in range(model.num_hidden_layers) if not model.is_moe_layer(layer)]
    return sum(count_measured_products(config, model, layer, length, None) for layer in layers)


def iter_measured_tensors(
    config: PythonBlockConfig, model: ModelConfig, layer: int, shape: ActivationShape
) -> Iterator[SavedTensor]:
    """Yield the tensors that a block saves between its input and its output.

    Args:
        config: the section.
        model: the model.
        layer: number of the layer.
        shape: the micro-batch of one rank.
    """
    rows = MeasuredRows(shape.length, shape.sequences, shape.value_bytes, shape.has_documents)
    for one in measure_block(config, model, layer, rows).saved:
        yield SavedTensor(
            f"{one.producer} outputs in {config.class_name}",
            one.bytes,
            one.producer,
            is_saved=one.is_saved,
        )

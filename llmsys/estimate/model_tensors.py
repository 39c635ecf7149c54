"""List every parameter tensor of a model by name and shape, without building it.

The kinds in llmsys/config list their own tensors; this file assembles them in the order of the module.

Invariants:
- Names and shapes are those of the Transformer (a test compares them with the built module).
- Tied weights come once; buffers never come (balancing bias, fixed logits bias, rotation tables, sinusoids).
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.feed_forward import iter_feed_forward_parameters
from llmsys.config.model import ModelConfig
from llmsys.config.parameter_tensor import Input, ParameterTensor

Rows = Iterator[ParameterTensor]


def list_model_tensors(model: ModelConfig) -> list[ParameterTensor]:
    """Return all parameters of the model, tied ones once."""
    rows = [ParameterTensor("embed.weight", (model.vocab_size, model.hidden_size), "embedding")]
    if (source := model.embedding.source_vocab_size) is not None:
        rows.append(ParameterTensor("source_embed.weight", (source, model.hidden_size), "embedding"))
    if model.family == "encoder_decoder":
        rows += (_to_encoder_tensor(row) for row in _iter_stack_tensors(model.encoder_model))
    rows += _iter_stack_tensors(model)
    rows += model.head.iter_parameters(model)
    rows += _iter_prediction_tensors(model)
    return rows


def is_head_tied(model: ModelConfig) -> bool:
    """Return whether the embedding matrix is the head's matrix too."""
    return model.tie_word_embeddings and model.head.has_logits


def _to_encoder_tensor(row: ParameterTensor) -> ParameterTensor:
    inputs: dict[Input | None, Input] = {"token": "source", "distance": "encoder_distance"}
    return replace(row, name=f"encoder.{row.name}", input=inputs.get(row.input))


def _iter_stack_tensors(model: ModelConfig) -> Rows:
    """Yield one stack of blocks, with the layers before and after it."""
    yield from model.position.iter_embedding_parameters(model)
    # The encoder of an encoder-decoder has the decoder's head, which is no encoder's, and no token types.
    if model.embedding.token_types and model.family == "encoder" and model.family in model.head.families:
        yield ParameterTensor("token_types.weight", (model.embedding.token_types, model.hidden_size), "positions")
    yield from model.position.iter_stack_parameters(model)
    if model.embedding.norm:
        yield from model.norm.iter_parameters("embedding_norm", model.hidden_size)
    dense = tuple(layer for layer in range(model.num_hidden_layers) if not model.is_moe_layer(layer))
    for layers in filter(None, (dense, tuple(model.moe_layers))):
        yield from _iter_block_tensors(model, "blocks.{i}", layers)
    if model.residual.has_final_norm:
        yield from model.norm.iter_parameters("norm", model.hidden_size)


def _iter_block_tensors(model: ModelConfig, name: str, layers: tuple[int, ...]) -> Rows:
    """Yield the rows of blocks, which are all dense or all have experts; `name` is the prefix of their parameters.

    Blocks that differ in windows or rotation only have the same tensors, so a few rows describe a stack.
    """
    rows = [*_iter_branch_tensors(model, "attention", _iter_attention_tensors(model))]
    if model.family == "encoder_decoder":
        cross = model.attention.cross_attention.iter_projection_parameters(
            model, "cross_attention", keys_input="source"
        )
        rows += _iter_branch_tensors(model, "cross_attention", cross)
    rows += _iter_branch_tensors(model, "feed_forward", _iter_feed_forward_tensors(model, layers[0]))
    for row in rows:
        yield replace(row, name=f"{name}.{row.name}", layers=layers)


def _iter_branch_tensors(model: ModelConfig, name: str, rows: Rows) -> Rows:
    """Yield one branch of the residual stream with the norms around it."""
    residual = model.residual
    is_shared = residual.shares_input_norm and name == "feed_forward"
    if (residual.normalizes_input or residual.normalizes_sum) and not is_shared:
        yield from model.norm.iter_parameters(f"{name}_norm", model.hidden_size)
    yield from rows
    if residual.normalizes_output:
        yield from model.norm.iter_parameters(f"{name}_output_norm", model.hidden_size)


def _iter_attention_tensors(model: ModelConfig) -> Rows:
    yield from model.attention.iter_parameters(model)
    yield from model.position.iter_attention_parameters(model)


def _iter_feed_forward_tensors(model: ModelConfig, layer: int) -> Rows:
    if model.moe is not None and model.is_moe_layer(layer):
        return model.moe.iter_parameters("feed_forward", model.hidden_size)
    return iter_feed_forward_parameters(model.feed_forward, "feed_forward", model.hidden_size, model.intermediate_size)


def _iter_prediction_tensors(model: ModelConfig) -> Rows:
    """Yield DeepSeek-V3's modules: embedding and head are the model's, the block is one more like the last."""
    if model.multi_token_prediction is None:
        return
    modules, hidden = tuple(range(model.multi_token_prediction.depth)), model.hidden_size
    last = model.num_hidden_layers - 1
    rows = [
        *model.norm.iter_parameters("embedding_norm", hidden),
        *model.norm.iter_parameters("hidden_norm", hidden),
        ParameterTensor("projection.weight", (hidden, 2 * hidden), "multi_token_prediction", input="token"),
        *_iter_block_tensors(model, "block", (last,)),
        *model.norm.iter_parameters("norm", hidden),
    ]
    for row in rows:
        yield replace(row, name=f"prediction.{{i}}.{row.name}", component="multi_token_prediction", layers=modules)

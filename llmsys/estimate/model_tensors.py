"""Every parameter tensor of a model, by name and shape, without building it.

Reads a ModelConfig; gives rows in the order of the module. Promises that names and shapes are those of the Transformer
(a test compares them with the built module), so whatever is counted from here is exact. Tied weights come once.
Buffers never come: balancing bias, fixed logits bias, rotation tables, sinusoids.
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.model import ModelConfig
from llmsys.estimate.block_tensors import iter_block_tensors, iter_norm_tensors
from llmsys.estimate.parameter_tensor import Input, ParameterTensor

VOCABULARY_HEADS = frozenset({"lm", "mlm", "permutation"})


def list_model_tensors(model: ModelConfig) -> list[ParameterTensor]:
    """All parameters of the model, each tied one once."""
    rows = [ParameterTensor("embed.weight", (model.vocab_size, model.hidden_size), "embedding")]
    if (source := model.embedding.source_vocab_size) is not None:
        rows.append(ParameterTensor("source_embed.weight", (source, model.hidden_size), "embedding"))
    if model.family == "encoder_decoder":
        rows += (_to_encoder_tensor(row) for row in _iter_stack_tensors(model.encoder_model))
    rows += _iter_stack_tensors(model)
    rows += _iter_head_tensors(model)
    rows += _iter_prediction_tensors(model)
    return rows


def has_logits(model: ModelConfig) -> bool:
    """Whether the head gives logits over the vocabulary."""
    return model.head.kind in VOCABULARY_HEADS


def has_own_head(model: ModelConfig) -> bool:
    """Whether this is a whole model; the encoder of an encoder-decoder, taken as a model, has no head for itself."""
    return not (model.family == "encoder" and model.head.kind == "lm")


def is_head_tied(model: ModelConfig) -> bool:
    """Whether the embedding matrix works as the head too."""
    return model.tie_word_embeddings and has_logits(model)


def _to_encoder_tensor(row: ParameterTensor) -> ParameterTensor:
    inputs: dict[Input | None, Input] = {"token": "source", "distance": "encoder_distance"}
    return replace(row, name=f"encoder.{row.name}", input=inputs.get(row.input))


def _iter_stack_tensors(model: ModelConfig) -> Iterator[ParameterTensor]:
    """One stack of blocks, and what stands in front of and behind it."""
    yield from _iter_position_tensors(model)
    if model.embedding.norm:
        yield from iter_norm_tensors(model, "embedding_norm")
    dense = tuple(layer for layer in range(model.num_hidden_layers) if not model.is_moe_layer(layer))
    for layers in filter(None, (dense, tuple(model.moe_layers))):
        yield from iter_block_tensors(model, "blocks.{i}", layers)
    if model.residual.kind not in ("post", "deepnorm") or model.residual.final_norm:
        yield from iter_norm_tensors(model, "norm")


def _iter_position_tensors(model: ModelConfig) -> Iterator[ParameterTensor]:
    position, hidden = model.position, model.hidden_size
    if position.kind == "learned":
        yield ParameterTensor(
            "positions.weight", (model.max_position_embeddings + position.offset, hidden), "positions"
        )
    encoder_only = model.family == "encoder" and has_own_head(model)
    if encoder_only and model.embedding.token_types:
        yield ParameterTensor("token_types.weight", (model.embedding.token_types, hidden), "positions")
    if position.kind == "relative_bias":
        yield ParameterTensor("relative_bias.weight", (position.buckets, model.num_attention_heads), "positions")


def _iter_head_tensors(model: ModelConfig) -> Iterator[ParameterTensor]:
    head, hidden, vocabulary = model.head, model.hidden_size, model.vocab_size
    if head.kind == "mlm":
        yield ParameterTensor("head.dense.weight", (hidden, hidden), "head_other", input="token")
        yield ParameterTensor("head.dense.bias", (hidden,), "head_other")
        yield from iter_norm_tensors(model, "head.norm")
    if has_logits(model) and not model.tie_word_embeddings:
        yield ParameterTensor("head.weight", (vocabulary, hidden), "head", input="token")
    if head.kind in ("mlm", "permutation") or (head.kind == "lm" and head.bias == "trained"):
        yield ParameterTensor("head.bias", (vocabulary,), "head_bias")
    if head.kind == "permutation":
        yield ParameterTensor("mask_embedding", (1, 1, hidden), "head_other")
    if head.kind == "classification" or (head.kind in ("mlm", "features") and head.pooler):
        yield from _iter_first_token_linear("pooler", hidden, hidden)
    if head.kind == "mlm" and head.next_sentence:
        yield from _iter_first_token_linear("next_sentence", hidden, 2)
    if head.kind == "classification":
        yield from _iter_first_token_linear("classifier", hidden, head.num_labels)


def _iter_first_token_linear(name: str, hidden: int, outputs: int) -> Iterator[ParameterTensor]:
    yield ParameterTensor(f"{name}.weight", (outputs, hidden), "head_other", input="sequence")
    yield ParameterTensor(f"{name}.bias", (outputs,), "head_other")


def _iter_prediction_tensors(model: ModelConfig) -> Iterator[ParameterTensor]:
    """DeepSeek-V3's modules: embedding and head are the model's, the block is one more like the last."""
    if model.multi_token_prediction is None:
        return
    modules, hidden = tuple(range(model.multi_token_prediction.depth)), model.hidden_size
    last = model.num_hidden_layers - 1
    rows = [
        *iter_norm_tensors(model, "embedding_norm"),
        *iter_norm_tensors(model, "hidden_norm"),
        ParameterTensor("projection.weight", (hidden, 2 * hidden), "multi_token_prediction", input="token"),
        *iter_block_tensors(model, "block", (last,)),
        *iter_norm_tensors(model, "norm"),
    ]
    for row in rows:
        yield replace(row, name=f"prediction.{{i}}.{row.name}", component="multi_token_prediction", layers=modules)

"""Every parameter tensor of a model, by name and shape, without building it.

Reads a ModelConfig; gives rows in the order of the module. Promises that names and shapes are those of the Transformer
(a test compares them with the built module), so whatever is counted from here is exact. Tied weights come once.
Buffers never come: balancing bias, fixed logits bias, rotation tables, sinusoids.
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.model import ModelConfig
from llmsys.estimate.block_tensors import block_tensors, norm_tensors
from llmsys.estimate.rows import Input, TensorRow

VOCABULARY_HEADS = frozenset({"lm", "mlm", "permutation"})


def model_tensors(model: ModelConfig) -> list[TensorRow]:
    """All parameters of the model, each tied one once."""
    rows = [TensorRow("embed.weight", (model.vocab_size, model.hidden_size), "embedding")]
    if (source := model.embedding.source_vocab_size) is not None:
        rows.append(TensorRow("source_embed.weight", (source, model.hidden_size), "embedding"))
    if model.family == "encoder_decoder":
        rows += (_of_encoder(row) for row in _stack(model.encoder_shape))
    rows += _stack(model)
    rows += _head(model)
    rows += _prediction(model)
    return rows


def has_logits(model: ModelConfig) -> bool:
    """Whether the head gives logits over the vocabulary."""
    return model.head.kind in VOCABULARY_HEADS


def has_own_head(model: ModelConfig) -> bool:
    """Whether this is a whole model; the encoder of an encoder-decoder, taken as a model, has no head for itself."""
    return not (model.family == "encoder" and model.head.kind == "lm")


def head_is_tied(model: ModelConfig) -> bool:
    """Whether the embedding matrix works as the head too."""
    return model.tie_word_embeddings and has_logits(model)


def _of_encoder(row: TensorRow) -> TensorRow:
    inputs: dict[Input | None, Input] = {"token": "source", "distance": "encoder_distance"}
    return replace(row, name=f"encoder.{row.name}", input=inputs.get(row.input))


def _stack(model: ModelConfig) -> Iterator[TensorRow]:
    """One stack of blocks, and what stands in front of and behind it."""
    yield from _positions(model)
    if model.embedding.norm:
        yield from norm_tensors(model, "embedding_norm")
    dense = tuple(layer for layer in range(model.num_hidden_layers) if not model.is_moe_layer(layer))
    for layers in filter(None, (dense, tuple(model.moe_layers))):
        yield from block_tensors(model, "blocks.{i}", layers)
    if model.residual.kind not in ("post", "deepnorm") or model.residual.final_norm:
        yield from norm_tensors(model, "norm")


def _positions(model: ModelConfig) -> Iterator[TensorRow]:
    position, hidden = model.position, model.hidden_size
    if position.kind == "learned":
        yield TensorRow("positions.weight", (model.max_position_embeddings + position.offset, hidden), "positions")
    encoder_only = model.family == "encoder" and has_own_head(model)
    if encoder_only and model.embedding.token_types:
        yield TensorRow("token_types.weight", (model.embedding.token_types, hidden), "positions")
    if position.kind == "relative_bias":
        yield TensorRow("relative_bias.weight", (position.buckets, model.num_attention_heads), "positions")


def _head(model: ModelConfig) -> Iterator[TensorRow]:
    head, hidden, vocabulary = model.head, model.hidden_size, model.vocab_size
    if head.kind == "mlm":
        yield TensorRow("head.dense.weight", (hidden, hidden), "head_other", input="token")
        yield TensorRow("head.dense.bias", (hidden,), "head_other")
        yield from norm_tensors(model, "head.norm")
    if has_logits(model) and not model.tie_word_embeddings:
        yield TensorRow("head.weight", (vocabulary, hidden), "head", input="token")
    if head.kind in ("mlm", "permutation") or (head.kind == "lm" and head.bias == "trained"):
        yield TensorRow("head.bias", (vocabulary,), "head_bias")
    if head.kind == "permutation":
        yield TensorRow("mask_embedding", (1, 1, hidden), "head_other")
    if head.kind == "classification" or (head.kind in ("mlm", "features") and head.pooler):
        yield from _on_first_token("pooler", hidden, hidden)
    if head.kind == "mlm" and head.next_sentence:
        yield from _on_first_token("next_sentence", hidden, 2)
    if head.kind == "classification":
        yield from _on_first_token("classifier", hidden, head.num_labels)


def _on_first_token(name: str, hidden: int, outputs: int) -> Iterator[TensorRow]:
    yield TensorRow(f"{name}.weight", (outputs, hidden), "head_other", input="sequence")
    yield TensorRow(f"{name}.bias", (outputs,), "head_other")


def _prediction(model: ModelConfig) -> Iterator[TensorRow]:
    """DeepSeek-V3's modules: embedding and head are the model's, the block is one more like the last."""
    if model.multi_token_prediction is None:
        return
    modules, hidden = tuple(range(model.multi_token_prediction.depth)), model.hidden_size
    last = model.num_hidden_layers - 1
    rows = [
        *norm_tensors(model, "embedding_norm"),
        *norm_tensors(model, "hidden_norm"),
        TensorRow("projection.weight", (hidden, 2 * hidden), "multi_token_prediction", input="token"),
        *block_tensors(model, "block", (last,)),
        *norm_tensors(model, "norm"),
    ]
    for row in rows:
        yield replace(row, name=f"prediction.{{i}}.{row.name}", component="multi_token_prediction", layers=modules)

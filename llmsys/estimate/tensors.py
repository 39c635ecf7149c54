"""Every parameter tensor of a model, by name and shape, without building it.

Reads a ModelConfig; gives rows in the order of the module. Promises that names and shapes are those of the Transformer
(a test compares them with the built module), so whatever is counted from here is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from llmsys.config.model import ModelConfig

Component = Literal["embedding", "attention", "feed_forward", "router", "experts", "shared_experts", "norms", "head"]


@dataclass(frozen=True)
class TensorRow:
    """One tensor, or the same tensor of several blocks: `{i}` in the name runs over `layers`."""

    name: str
    shape: tuple[int, ...]
    component: Component
    layers: range | None = None

    @property
    def copies(self) -> int:
        """How many blocks have this tensor; 1 outside blocks."""
        return 1 if self.layers is None else len(self.layers)

    @property
    def each(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    @property
    def count(self) -> int:
        """Elements of all copies."""
        return self.each * self.copies

    def names(self) -> Iterator[str]:
        """The full name of every copy."""
        if self.layers is None:
            yield self.name
        else:
            yield from (self.name.replace("{i}", str(layer)) for layer in self.layers)

    @property
    def title(self) -> str:
        """The name with the range of blocks in it: `blocks.{0..31}.attention.q_proj.weight`."""
        if self.layers is None:
            return self.name
        first, last = self.layers[0], self.layers[-1]
        return self.name.replace("{i}", f"{{{first}..{last}}}" if first != last else str(first))


def model_tensors(model: ModelConfig) -> list[TensorRow]:
    """All parameters, each tied one once. Buffers (balancing bias, rotation tables) are not parameters."""
    rows = [TensorRow("embed.weight", (model.vocab_size, model.hidden_size), "embedding")]
    dense, total = model.num_dense_layers, model.num_hidden_layers
    for layers, is_moe in ((range(dense), False), (range(dense, total), True)):
        if layers:
            rows += _block(model, layers, is_moe)
    rows += _norm(model, "norm", None)
    if not model.tie_word_embeddings:
        rows.append(TensorRow("head.weight", (model.vocab_size, model.hidden_size), "head"))
    return rows


def _block(model: ModelConfig, layers: range, is_moe: bool) -> Iterator[TensorRow]:
    yield from _norm(model, "blocks.{i}.attention_norm", layers)
    yield from _attention(model, layers)
    yield from _norm(model, "blocks.{i}.feed_forward_norm", layers)
    yield from _mixture(model, layers) if is_moe else _dense(model, layers)


def _norm(model: ModelConfig, name: str, layers: range | None) -> Iterator[TensorRow]:
    yield TensorRow(f"{name}.weight", (model.hidden_size,), "norms", layers)
    if model.norm.kind == "layernorm":
        yield TensorRow(f"{name}.bias", (model.hidden_size,), "norms", layers)


def _attention(model: ModelConfig, layers: range) -> Iterator[TensorRow]:
    hidden = model.hidden_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for letter, shape in shapes.items():
        yield TensorRow(f"blocks.{{i}}.attention.{letter}_proj.weight", shape, "attention", layers)


def _dense(model: ModelConfig, layers: range) -> Iterator[TensorRow]:
    maps = ("gate", "up", "down") if model.feed_forward.kind == "swiglu" else ("up", "down")
    for one in maps:
        shape = _linear(one, model.hidden_size, model.intermediate_size)
        yield TensorRow(f"blocks.{{i}}.feed_forward.{one}_proj.weight", shape, "feed_forward", layers)


def _mixture(model: ModelConfig, layers: range) -> Iterator[TensorRow]:
    moe, place = model.moe, "blocks.{i}.feed_forward"
    if moe is None:
        return
    hidden, width, shared = model.hidden_size, moe.moe_intermediate_size, moe.num_shared_experts
    yield TensorRow(f"{place}.router.weight", (moe.num_experts, hidden), "router", layers)
    for one in ("gate", "up", "down"):  # stacked experts are (experts, in, out), the transpose of a linear map
        shape = (moe.num_experts, *reversed(_linear(one, hidden, width)))
        yield TensorRow(f"{place}.experts.{one}_proj", shape, "experts", layers)
    for one in ("gate", "up", "down") if shared else ():
        shape = _linear(one, hidden, shared * width)
        yield TensorRow(f"{place}.shared.{one}_proj.weight", shape, "shared_experts", layers)


def _linear(which: str, hidden: int, width: int) -> tuple[int, ...]:
    """(out, in) of one map of a feed-forward layer."""
    return (hidden, width) if which == "down" else (width, hidden)

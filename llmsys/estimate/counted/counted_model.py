"""A model as its parameter tensors, its attention and its state-space scans, which is all that
counts need.

Invariants:
- Parameters are those that transformers' class of the model type has; tied weights once, buffers
  not at all.
- Operations of matmuls are those of PyTorch's FlopCounterMode in eager attention, where attention
  is over all of s².
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llmsys.config.module_tensors import ParameterTensor

# Tables that are looked up, and what makes logits, as in llmsys/estimate/model_tensors.py.
TABLES = frozenset({"embedding", "head", "head_bias"})


@dataclass(frozen=True)
class AttentionTerm:
    """Scores and weighted sums of equal layers.

    Attributes:
        layers: number of such layers.
        width: heads times the channels of a key and of a value.
        keys: `causal` and `source` are self-attention, in an encoder for `source`.
        window: positions that a query sees, itself included, or for `source` those on either side;
            None: all.
        chunk: positions of a chunk, beyond which a query sees nothing; None: there are none.
    """

    layers: int
    width: int
    keys: Literal["causal", "source", "cross"] = "causal"
    window: int | None = None
    chunk: int | None = None

    def count_products(self, length: int, source: int, *, full: bool) -> int:
        """Return the multiplications for one sequence: over all pairs, or over those that are
        visible.
        """
        if self.keys == "cross":
            return self.layers * self.width * length * source
        if self.keys == "source":
            side = source - 1 if full or self.window is None else min(self.window, source - 1)
            return self.layers * self.width * (source * (2 * side + 1) - side * (side + 1))
        if full:
            return self.layers * self.width * length * length
        if self.chunk is not None:
            chunks, rest = divmod(length, self.chunk)
            pairs = chunks * self.chunk * (self.chunk + 1) + rest * (rest + 1)
            return self.layers * self.width * pairs // 2
        reach = length if self.window is None else min(self.window, length)
        return self.layers * self.width * (reach * (reach + 1) // 2 + (length - reach) * reach)


@dataclass(frozen=True)
class CountedModel:
    """One model of a type that is counted and not trained.

    Attributes:
        model_type: as in config.json.
        rows: parameter tensors, tied ones once.
        attention: what grows with the square of the length.
        tied_head: elements of the embedding that multiply as the head; 0 where the head has a
            matrix of its own.
        experts: routed experts of a layer.
        visits: routed experts that a token uses.
        scan: operations of the recurrence for one token, over all layers; see `count_scan`.
        longest: largest position.
        is_encoder_decoder: `source` tokens have a separate stack.
    """

    model_type: str
    rows: tuple[ParameterTensor, ...]
    attention: tuple[AttentionTerm, ...]
    tied_head: int
    experts: int = 1
    visits: int = 1
    scan: int = 0
    longest: int | None = None
    is_encoder_decoder: bool = False

    def count_linear_flops(self, tokens: int, source_tokens: int) -> int:
        """Return the operations of the forward pass in matrices and convolutions.

        Args:
            tokens: tokens of the decoder, or of the model.
            source_tokens: tokens of the encoder.
        """
        vectors = {"token": tokens, "source": source_tokens, "visit": tokens * self.visits}
        matrices = sum(
            row.elements_per_vector * vectors[row.input]
            for row in self.rows
            if row.input is not None
        )
        return 2 * (matrices + tokens * self.tied_head)

    def count_attention_flops(self, length: int, source: int, *, full: bool) -> int:
        """Return the operations of the forward pass in scores and weighted sums of one sequence."""
        return sum(2 * term.count_products(length, source, full=full) for term in self.attention)


def count_scan(elements: int) -> int:
    """Return the operations of Mamba's recurrence for one token, in its recurrent form, which no
    kernel undercuts.

    Args:
        elements: numbers in the state of one layer.

    Returns:
        Operations of the forward pass: 9 for each number, for the decay, the input, the sum and
        the read-out.
    """
    return 9 * elements


def place_rows(rows: Iterable[ParameterTensor], layers: Iterable[int]) -> Iterator[ParameterTensor]:
    """Yield rows as those of `layers`; nothing for no layers."""
    found = tuple(layers)
    if found:
        yield from (replace(row, layers=found) for row in rows)


def count_active_elements(model: CountedModel, row: ParameterTensor) -> int:
    """Return the elements of a row that one token meets."""
    return row.num_elements // model.experts * model.visits if row.is_routed else row.num_elements

"""Exact floating-point operations of matrix products, forward and backward, in three named conventions.

A product of an (m, k) with a (k, n) matrix is 2·m·k·n operations; a backward pass does two such products for each of
the forward. Look-ups, norms, activations and rotations count nothing; the router counts. PyTorch's FlopCounterMode
over eager attention counts the same as `full`, to the last operation.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from llmsys.config.model import ModelConfig
from llmsys.estimate.parameters import active_count
from llmsys.estimate.tensors import model_tensors

Convention = Literal["causal", "full", "hardware"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)


@dataclass(frozen=True)
class Flops:
    """Operations of one batch. `attention` is the part of `forward` in scores and weighted sums; it grows with s²."""

    convention: Convention
    tokens: int
    forward: int
    forward_backward: int
    attention: int

    @property
    def attention_share(self) -> float:
        """Share of attention's scores and weighted sums in the forward pass."""
        return self.attention / self.forward

    @property
    def per_token(self) -> float:
        """Operations of forward and backward for one token, on average over the window."""
        return self.forward_backward / self.tokens


def count_flops(model: ModelConfig, sequence_length: int, sequences: int, convention: Convention = "causal") -> Flops:
    """Operations for `sequences` windows of `sequence_length` tokens.

    `causal` counts the positions a token may see, s·(s+1)/2 of a window, as if it held a single document (with several,
    that is an upper bound). `full` counts s² (PaLM, Chowdhery 2022, appendix B). `hardware` is `full` and whatever is
    computed again in the backward pass; nothing is recomputed today, so both are equal.
    """
    tokens = sequences * sequence_length
    visible = sequence_length * (sequence_length + 1) // 2 if convention == "causal" else sequence_length**2
    width = model.num_attention_heads * model.head_dim
    attention = 4 * width * visible * sequences * model.num_hidden_layers  # scores, then the weighted sum: 2 each
    forward = 2 * _active_matrix_elements(model) * tokens + attention
    return Flops(convention, tokens, forward, 3 * forward, attention)


def _active_matrix_elements(model: ModelConfig) -> int:
    """Elements of the matrices that one token is multiplied with; a tied head multiplies, the look-up does not."""
    rows = [row for row in model_tensors(model) if row.component not in ("embedding", "head", "norms")]
    head = model.vocab_size * model.hidden_size
    return sum(active_count(model, row) for row in rows) + head

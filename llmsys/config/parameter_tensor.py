"""One parameter tensor of a model as data: its name, its shape, where it stands and what it is multiplied with.

Everything the estimate counts is a sum over such rows; `tensors` makes them from a ModelConfig.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

Component = Literal[
    "embedding",
    "positions",
    "attention",
    "feed_forward",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "head",
    "head_bias",
    "head_other",
    "multi_token_prediction",
]
Input = Literal["token", "source", "sequence", "distance", "encoder_distance", "visit"]


@dataclass(frozen=True)
class ParameterTensor:
    """One tensor, or the same tensor of several blocks: `{i}` in the name runs over `layers` (empty outside blocks).

    `input` says with how many vectors a matrix is multiplied: one for each token, each source token, each sequence,
    each distance between two tokens, or each visit of a token to an expert; None for what is looked up or added.
    """

    name: str
    shape: tuple[int, ...]
    component: Component
    layers: tuple[int, ...] = ()
    input: Input | None = None

    @property
    def num_copies(self) -> int:
        """Blocks that have this tensor; 1 outside blocks."""
        return len(self.layers) or 1

    @property
    def elements_per_copy(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    @property
    def num_elements(self) -> int:
        """Elements of all copies."""
        return self.elements_per_copy * self.num_copies

    @property
    def elements_per_vector(self) -> int:
        """Elements, over all copies, that one vector is multiplied with: of experts, those of a single one."""
        return self.num_elements // self.shape[0] if self.input == "visit" else self.num_elements

    @property
    def is_routed(self) -> bool:
        """True for routed experts, of which a token visits a few."""
        return ".experts." in self.name

    def iter_names(self) -> Iterator[str]:
        """The full name of every copy."""
        if not self.layers:
            yield self.name
        else:
            yield from (self.name.replace("{i}", str(layer)) for layer in self.layers)

    @property
    def display_name(self) -> str:
        """The name with its blocks: `blocks.{0..31}.attention.q_proj.weight`, every second one `{1..31..2}`."""
        return self.name.replace("{i}", _format_layers(self.layers)) if self.layers else self.name


def _format_layers(layers: tuple[int, ...]) -> str:
    if len(layers) == 1:
        return str(layers[0])
    steps = {later - earlier for earlier, later in pairwise(layers)}
    if len(steps) == 1:
        step = steps.pop()
        return f"{{{layers[0]}..{layers[-1]}}}" if step == 1 else f"{{{layers[0]}..{layers[-1]}..{step}}}"
    return "{" + ",".join(_iter_layer_ranges(layers)) + "}"


def _iter_layer_ranges(layers: tuple[int, ...]) -> Iterator[str]:
    """Neighbouring numbers together: 0, 2..5, 9."""
    first = last = layers[0]
    for layer in (*layers[1:], -1):
        if layer == last + 1:
            last = layer
            continue
        yield str(first) if first == last else f"{first}..{last}"
        first = last = layer

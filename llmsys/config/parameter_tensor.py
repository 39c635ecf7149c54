"""Description of one parameter tensor: name, shape, component, layers and the input it is multiplied with.

Every count of the estimate is a sum over these descriptions.
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

    `input` names the vectors that a matrix is multiplied with: one per token, source token, sequence, distance between
    two tokens, or assignment of a token to an expert. None: the tensor is looked up or added.
    """

    name: str
    shape: tuple[int, ...]
    component: Component
    layers: tuple[int, ...] = ()
    input: Input | None = None

    @property
    def num_copies(self) -> int:
        """Number of blocks that have this tensor; 1 outside blocks."""
        return len(self.layers) or 1

    @property
    def elements_per_copy(self) -> int:
        """Number of elements of one copy."""
        return prod(self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements of all copies."""
        return self.elements_per_copy * self.num_copies

    @property
    def elements_per_vector(self) -> int:
        """Elements that one vector is multiplied with, over all copies; a single expert's elements for experts."""
        return self.num_elements // self.shape[0] if self.input == "visit" else self.num_elements

    @property
    def is_routed(self) -> bool:
        """True for routed experts, of which each token uses a few."""
        return ".experts." in self.name

    def iter_names(self) -> Iterator[str]:
        """Yield the full name of every copy."""
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
    """Yield ranges of consecutive layers: 0, 2..5, 9."""
    first = last = layers[0]
    # -1 follows no layer, so it closes the last range
    for layer in (*layers[1:], -1):
        if layer == last + 1:
            last = layer
            continue
        yield str(first) if first == last else f"{first}..{last}"
        first = last = layer

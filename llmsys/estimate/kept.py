"""One tensor of a block that may stay in memory from its forward to its backward, and which policy keeps which.

The files beside this one list the tensors of attention and of feed-forward layers in the order in which they are made;
`kept_block` puts norms and the residual stream around them. Bytes are those of one micro-batch on one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llmsys.estimate.system import System

Maker = Literal["input", "product", "attention", "collective", "gather", "sum", "pointwise", "fused"]


@dataclass(frozen=True)
class Tensor:
    """What makes it, and who reads it later.

    A compiler makes what is fused only in registers, and computes what is pointwise again. `saved`: autograd keeps it
    in eager mode. `needed`: of a product, whether a compiled backward reads its output.
    """

    name: str
    bytes: int
    maker: Maker
    saved: bool = True
    needed: bool = True


@dataclass(frozen=True)
class Extent:
    """How large one micro-batch is on one rank.

    `sequences` of `length` positions with `source` positions behind cross-attention; `parts` ranks share a sequence
    (context), `tensor` ranks the channels inside a layer and the positions between layers. `value` are the bytes of
    one number. `table` is what attention gets to know what is visible beyond "all" and "causal": yes and no for windows
    or documents, or numbers by distance. `dealt`: experts are on other ranks too.
    """

    sequences: int
    length: int
    source: int
    parts: int
    tensor: int
    value: int
    table: Literal["none", "windows", "documents", "numbers"]
    dealt: bool
    system: System

    @property
    def on_cpu(self) -> bool:
        """Whether kernels are those of a CPU."""
        return self.system.device == "cpu"

    @property
    def tokens(self) -> int:
        """Positions that meet a product on this rank."""
        return self.sequences * self.length // self.parts

    def stream(self, channels: float, size: int | None = None) -> int:
        """Bytes between layers, where every tensor rank has positions of its own."""
        ranks = self.tensor if self.system.stream == "divided" else 1
        return int(self.tokens / ranks * channels * (size or self.value))

    def inner(self, channels: float, size: int | None = None) -> int:
        """Bytes inside a layer, where every tensor rank has channels of its own."""
        return int(self.tokens * channels / self.tensor * (size or self.value))

    def gathered(self, channels: float, size: int | None = None) -> int:
        """Bytes of all positions and all channels: what a column-parallel product reads, a row-parallel one makes."""
        return int(self.tokens * channels * (size or self.value))

    def read(self, channels: float) -> int:
        """What is kept of the input of a column-parallel product."""
        return self.stream(channels) if self.system.gathered == "again" else self.gathered(channels)

    def pairs(self, heads: int, size: int | None = None, *, keys: int | None = None) -> int:
        """Bytes of one number for each head, query and key."""
        count = self.sequences * heads * self.length * (keys or self.length)
        return int(count / self.parts / self.tensor * (size or self.value))


def kept_bytes(tensors: Iterable[Tensor], policy: str, compiled: bool, system: System) -> int:
    """Bytes that a block keeps under a recompute policy: none, selective or block."""
    return sum(one.bytes for one in kept(tensors, policy, compiled, system))


def kept(tensors: Iterable[Tensor], policy: str, compiled: bool, system: System) -> list[Tensor]:
    """The tensors that a block keeps."""
    tensors = list(tensors)
    if policy == "block":
        return [one for one in tensors if one.maker == "input"]
    if policy == "selective":
        return _selected(tensors, compiled, system)
    if compiled:  # whatever is pointwise is fused into what reads it, and computed again (min-cut partitioner)
        return [
            one
            for one in tensors
            if one.maker not in ("pointwise", "fused") and (one.saved or one.maker == "product") and one.needed
        ]
    return [one for one in tensors if one.saved]


def _selected(tensors: list[Tensor], compiled: bool, system: System) -> list[Tensor]:
    if system.selective == "attention":
        return [one for one in tensors if one.saved and not one.name.startswith("scores")]
    products = [one for one in tensors if one.maker == "product"]
    if system.selective == "alternate":
        products = products[::2]
    wanted = [*products, *(one for one in tensors if one.maker in ("input", "attention", "collective"))]
    return [one for one in wanted if one.needed or not compiled]

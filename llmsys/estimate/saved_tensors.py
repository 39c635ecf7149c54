"""One tensor of a block that may stay in memory from its forward to its backward, and which policy keeps which.

The files beside this one list the tensors of attention and of feed-forward layers in the order in which they are made;
`kept_block` puts norms and the residual stream around them. Bytes are those of one micro-batch on one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llmsys.estimate.software_profile import MemoryProfile

Maker = Literal["input", "product", "attention", "collective", "gather", "sum", "pointwise", "fused"]


@dataclass(frozen=True)
class SavedTensor:
    """What makes it, and who reads it later.

    A compiler makes what is fused only in registers, and computes what is pointwise again. `saved`: autograd keeps it
    in eager mode. `is_needed`: of a product, whether a compiled backward reads its output.
    """

    name: str
    bytes: int
    producer: Maker
    saved: bool = True
    is_needed: bool = True


@dataclass(frozen=True)
class ActivationShape:
    """How large one micro-batch is on one rank.

    `sequences` of `length` positions with `source` positions behind cross-attention; `parts` ranks share a sequence
    (context), `tensor` ranks the channels inside a layer and the positions between layers. `value` are the bytes of
    one number. `table` is what attention gets to know what is visible beyond "all" and "causal": yes and no for windows
    or documents, or numbers by distance. `is_sharded`: experts are on other ranks too.
    """

    sequences: int
    length: int
    source: int
    parts: int
    tensor: int
    value: int
    table: Literal["none", "windows", "documents", "numbers"]
    is_sharded: bool
    system: MemoryProfile

    @property
    def is_on_cpu(self) -> bool:
        """Whether kernels are those of a CPU."""
        return self.system.device == "cpu"

    @property
    def num_tokens(self) -> int:
        """Positions that meet a product on this rank."""
        return self.sequences * self.length // self.parts

    def compute_residual_bytes(self, channels: float, size: int | None = None) -> int:
        """Bytes between layers, where every tensor rank has positions of its own."""
        ranks = self.tensor if self.system.residual_dtype == "divided" else 1
        return int(self.num_tokens / ranks * channels * (size or self.value))

    def compute_sharded_bytes(self, channels: float, size: int | None = None) -> int:
        """Bytes inside a layer, where every tensor rank has channels of its own."""
        return int(self.num_tokens * channels / self.tensor * (size or self.value))

    def compute_gathered_bytes(self, channels: float, size: int | None = None) -> int:
        """Bytes of all positions and all channels: what a column-parallel product reads, a row-parallel one makes."""
        return int(self.num_tokens * channels * (size or self.value))

    def compute_input_bytes(self, channels: float) -> int:
        """What is kept of the input of a column-parallel product."""
        return (
            self.compute_residual_bytes(channels)
            if self.system.gathered == "again"
            else self.compute_gathered_bytes(channels)
        )

    def compute_score_bytes(self, heads: int, size: int | None = None, *, keys: int | None = None) -> int:
        """Bytes of one number for each head, query and key."""
        count = self.sequences * heads * self.length * (keys or self.length)
        return int(count / self.parts / self.tensor * (size or self.value))


def compute_saved_bytes(tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile) -> int:
    """Bytes that a block keeps under a recompute policy: none, selective or block."""
    return sum(one.bytes for one in select_saved_tensors(tensors, policy, compiled, system))


def select_saved_tensors(
    tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> list[SavedTensor]:
    """The tensors that a block keeps."""
    tensors = list(tensors)
    if policy == "full":
        return [one for one in tensors if one.producer == "input"]
    if policy == "selective":
        return _apply_selective_policy(tensors, compiled, system)
    if compiled:  # whatever is pointwise is fused into what reads it, and computed again (min-cut partitioner)
        return [
            one
            for one in tensors
            if one.producer not in ("pointwise", "fused") and (one.saved or one.producer == "product") and one.is_needed
        ]
    return [one for one in tensors if one.saved]


def _apply_selective_policy(tensors: list[SavedTensor], compiled: bool, system: MemoryProfile) -> list[SavedTensor]:
    if system.selective == "attention":
        return [one for one in tensors if one.saved and not one.name.startswith("scores")]
    products = [one for one in tensors if one.producer == "product"]
    if system.selective == "alternate":
        products = products[::2]
    wanted = [*products, *(one for one in tensors if one.producer in ("input", "attention", "collective"))]
    return [one for one in wanted if one.is_needed or not compiled]

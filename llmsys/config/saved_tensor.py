"""Tensors that a block saves for backward, and the micro-batch shape that determines their bytes.

Config kinds list their tensors; llmsys/estimate selects those that an activation-checkpoint policy saves.
Bytes are those of one micro-batch on one rank. No torch.
"""

from dataclasses import dataclass
from typing import Literal

FP32_BYTES = 4
Producer = Literal["input", "product", "attention", "collective", "gather", "sum", "pointwise", "fused"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that may stay in memory from the forward to the backward.

    Attributes:
        name: text for the memory timeline; names that start with `scores` are T × S.
        bytes: size on one rank.
        producer: kind of the op that makes it. A compiler keeps `fused` ones in registers, and recomputes
            `pointwise` ones.
        is_saved: autograd saves it in eager mode.
        is_needed: a compiled backward reads it (matmul outputs only).
    """

    name: str
    bytes: int
    producer: Producer
    is_saved: bool = True
    is_needed: bool = True


@dataclass(frozen=True)
class ActivationShape:
    """Size of one micro-batch on one rank, and the settings that change the set of saved tensors.

    Attributes:
        sequences: sequences of one forward pass.
        length: positions of each.
        source: positions of the encoder output that cross-attention reads.
        context: ranks that share a sequence.
        tensor: ranks that share the channels inside a layer, and the positions between layers.
        value_bytes: bytes of one activation.
        mask_table: table that attention gets for more than "all" and "causal": booleans for windows or documents,
            or numbers by distance.
        are_experts_sharded: other ranks hold experts too.
        is_on_cpu: kernels are those of a CPU.
        uses_mask_tables: windows and documents reach attention as a table.
        has_explicit_scores: attention writes its scores, as Megatron did before fused kernels.
        is_stream_sharded: with `tensor`, positions between layers are sharded (sequence parallelism).
        saves_gathered_inputs: with `tensor`, inputs of column-parallel matmuls stay gathered for the backward.
    """

    sequences: int
    length: int
    source: int
    context: int
    tensor: int
    value_bytes: int
    mask_table: Literal["none", "windows", "documents", "numbers"]
    are_experts_sharded: bool
    is_on_cpu: bool
    uses_mask_tables: bool
    has_explicit_scores: bool
    is_stream_sharded: bool
    saves_gathered_inputs: bool

    @property
    def num_tokens(self) -> int:
        """Positions that enter a matmul on this rank."""
        return self.sequences * self.length // self.context

    def compute_residual_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of a tensor between layers, where every tensor rank has its own positions."""
        ranks = self.tensor if self.is_stream_sharded else 1
        return int(self.num_tokens / ranks * channels * (value_bytes or self.value_bytes))

    def compute_sharded_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of a tensor inside a layer, where every tensor rank has its own channels."""
        return int(self.num_tokens * channels / self.tensor * (value_bytes or self.value_bytes))

    def compute_gathered_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of all positions and channels: input of column-, output of row-parallel matmuls."""
        return int(self.num_tokens * channels * (value_bytes or self.value_bytes))

    def compute_input_bytes(self, channels: float) -> int:
        """Return the bytes that a column-parallel matmul saves of its input."""
        saved = self.compute_gathered_bytes if self.saves_gathered_inputs else self.compute_residual_bytes
        return saved(channels)

    def compute_score_bytes(self, heads: int, value_bytes: int | None = None, *, keys: int | None = None) -> int:
        """Return the bytes of one number for each head, query and key."""
        count = self.sequences * heads * self.length * (keys or self.length)
        return int(count / self.context / self.tensor * (value_bytes or self.value_bytes))


@dataclass(frozen=True)
class ScoreShape:
    """Shape of the attention computation of one layer, for kernel selection and FLOPs.

    Attributes:
        heads: query heads.
        key_value_heads: heads of keys and values.
        key_channels: channels of a query and of a key, per head.
        value_channels: channels of a value, per head.
        keys: keys that a query can see.
        is_causal: keys after the query are masked.
        has_softcap: scores are capped, which no fused kernel does.
        has_sinks: each head has a trained score that takes weight.
        scale: factor on the scores; None: 1 / sqrt(key_channels).
    """

    heads: int
    key_value_heads: int
    key_channels: int
    value_channels: int
    keys: int
    is_causal: bool
    has_softcap: bool = False
    has_sinks: bool = False
    scale: float | None = None

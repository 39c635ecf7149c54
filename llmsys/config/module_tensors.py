"""Tensors of a module: its parameters, and what it saves for backward.

Config kinds list both; llmsys/estimate selects those that an activation-checkpoint policy saves.
Bytes of saved tensors are those of one micro-batch on one rank. No torch.

Every count of the estimate is a sum over the descriptions of parameter tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

from llmsys.config.attention_device import AttentionDevice, AttentionDtype

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
    "halting",
    "recurrent",
]
Input = Literal[
    "token", "source", "sequence", "distance", "encoder_distance", "visit", "patch", "predicted"
]


@dataclass(frozen=True)
class ParameterTensor:
    """One tensor, or the same tensor of several blocks: `{i}` in the name runs over `layers` (empty
    outside blocks).

    `input` names the vectors that a matrix is multiplied with: one per token, source token,
    sequence, distance between two tokens, assignment of a token to an expert, image patch, or token
    that XLNet predicts. None: the tensor is looked up or added. Weights of a block that repeats are
    multiplied in each of its `steps`; the inputs of `cut_steps` of them get no gradient.
    """

    name: str
    shape: tuple[int, ...]
    component: Component
    layers: tuple[int, ...] = ()
    input: Input | None = None
    steps: int = 1
    cut_steps: int = 0

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
        """Elements that one vector is multiplied with, over all copies and steps; a single
        expert's for experts.
        """
        return self.steps * (
            self.num_elements // self.shape[0] if self.input == "visit" else self.num_elements
        )

    @property
    def is_routed(self) -> bool:
        """True for routed experts, of which each token uses a few."""
        return ".experts." in self.name

    @property
    def display_name(self) -> str:
        """The name with its blocks: `blocks.{0..31}.attention.q_proj.weight`, every second one
        `{1..31..2}`.
        """
        return self.name.replace("{i}", _format_layers(self.layers)) if self.layers else self.name


def _format_layers(layers: tuple[int, ...]) -> str:
    if len(layers) == 1:
        return str(layers[0])
    steps = {later - earlier for earlier, later in pairwise(layers)}
    if len(steps) == 1:
        step = steps.pop()
        return (
            f"{{{layers[0]}..{layers[-1]}}}"
            if step == 1
            else f"{{{layers[0]}..{layers[-1]}..{step}}}"
        )
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


FP32_BYTES = 4
Producer = Literal[
    "input", "product", "attention", "flex", "collective", "gather", "sum", "pointwise", "fused"
]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that may stay in memory from the forward to the backward.

    Attributes:
        name: text for the memory timeline; names that start with `scores` are T × S.
        bytes: size on one rank.
        producer: kind of the op that makes it. A compiler keeps `fused` ones in registers, and
            recomputes `pointwise` ones. `flex`: flex_attention, which selective checkpointing
            recomputes.
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
        has_documents: several documents in one row, or padding.
        are_experts_sharded: other ranks hold experts too.
        device: the device by which kernels are chosen.
        has_mask_rules: documents and windows are part of that choice; False: they cost nothing
            (other programs).
        has_explicit_scores: attention writes its scores, as Megatron did before fused kernels.
        is_stream_sharded: with `tensor`, positions between layers are sharded (sequence
            parallelism).
        saves_gathered_inputs: with `tensor`, inputs of column-parallel matmuls stay gathered for
            the backward.
        has_ring: keys and values come round a ring of ranks.
        expert_load: tokens of this rank's experts over the mean of the ranks.
    """

    sequences: int
    length: int
    source: int
    context: int
    tensor: int
    value_bytes: int
    has_documents: bool
    are_experts_sharded: bool
    device: AttentionDevice
    has_mask_rules: bool
    has_explicit_scores: bool
    is_stream_sharded: bool
    saves_gathered_inputs: bool
    has_ring: bool = False
    expert_load: float = 1.0

    @property
    def is_on_cpu(self) -> bool:
        """True where kernels are those of a CPU."""
        return self.device.kind == "cpu"

    @property
    def dtype(self) -> AttentionDtype:
        """Dtype of queries, keys and values; fp16 counts as bf16, which takes the same kernels."""
        return "fp32" if self.value_bytes == FP32_BYTES else "bf16"

    @property
    def num_tokens(self) -> int:
        """Positions that enter a matmul on this rank."""
        return self.sequences * self.length // self.context

    def compute_residual_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of a tensor between layers, where every tensor rank has its own
        positions.

        Args:
            channels: values of each position.
            value_bytes: bytes of a value; None: of the compute dtype.
        """
        ranks = self.tensor if self.is_stream_sharded else 1
        return int(self.num_tokens / ranks * channels * (value_bytes or self.value_bytes))

    def compute_sharded_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of a tensor inside a layer, where every tensor rank has its own
        channels.

        Args:
            channels: values of each position, over all tensor ranks.
            value_bytes: bytes of a value; None: of the compute dtype.
        """
        return int(self.num_tokens * channels / self.tensor * (value_bytes or self.value_bytes))

    def compute_gathered_bytes(self, channels: float, value_bytes: int | None = None) -> int:
        """Return the bytes of all positions and channels: the input of column-parallel matmuls, the
        output
        of row-parallel ones.

        Args:
            channels: values of each position.
            value_bytes: bytes of a value; None: of the compute dtype.
        """
        return int(self.num_tokens * channels * (value_bytes or self.value_bytes))

    def compute_input_bytes(self, channels: float) -> int:
        """Return the bytes that a column-parallel matmul saves of its input.

        Args:
            channels: values of each position.
        """
        saved = (
            self.compute_gathered_bytes
            if self.saves_gathered_inputs
            else self.compute_residual_bytes
        )
        return saved(channels)

    def compute_score_bytes(
        self, heads: int, value_bytes: int | None = None, *, keys: int | None = None
    ) -> int:
        """Return the bytes of one number for each head, query and key.

        Args:
            heads: heads over all tensor ranks.
            value_bytes: bytes of a number; None: of the compute dtype.
            keys: keys of each query; None: as many as positions.
        """
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

    def iter_ring_tensors(self, shape: ActivationShape) -> Iterator[SavedTensor]:
        """Yield what a ring makes and does not save: the keys of two other ranks at a time, and
        sums in float32.

        Args:
            shape: the micro-batch; without a ring there is nothing.
        """
        if not shape.has_ring:
            return
        arriving = 2 * self.key_value_heads * (self.key_channels + self.value_channels)
        found = {
            "keys and values of other ranks": shape.compute_sharded_bytes(arriving),
            "merged outputs of a ring": shape.compute_sharded_bytes(
                2 * self.heads * self.value_channels, FP32_BYTES
            ),
        }
        for name, size in found.items():
            yield SavedTensor(name, size, "gather", is_saved=False, is_needed=False)


def iter_linear_parameters(
    name: str,
    outputs: int,
    inputs: int,
    bias: bool,
    component: Component,
    input_kind: Input = "token",
) -> Iterator[ParameterTensor]:
    """Yield the weight of shape (outputs, inputs) of a linear map, and its bias of shape (outputs,)
    if any.

    Args:
        name: prefix of both names.
        outputs: channels of the result.
        inputs: channels of the operand.
        bias: the map has a bias.
        component: part of the model that both belong to.
        input_kind: vectors that the weight is multiplied with.

    Yields:
        The tensors.
    """
    yield ParameterTensor(f"{name}.weight", (outputs, inputs), component, input=input_kind)
    if bias:
        yield ParameterTensor(f"{name}.bias", (outputs,), component)

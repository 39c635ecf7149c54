"""Answers of a block of the user's own code to the estimate: its parameters, FLOPs and saved bytes.

The classes that a user extends are in llmsys/model/python_block.py, which needs torch. This is as
much of them as can be named without it: the user's file imports torch, the estimate does not.
"""

from abc import abstractmethod
from dataclasses import dataclass

from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import Producer
from llmsys.config.section import Section


@dataclass(frozen=True)
class BlockShape:
    """Widths of a model, and the layer that a module is built for.

    Attributes:
        hidden_size: channels of input and output.
        intermediate_size: `model.intermediate_size`, the width of a feed-forward.
        num_attention_heads: query heads.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
        num_hidden_layers: layers of the model.
        max_position_embeddings: positions of the longest sequence.
        layer: number of the layer, from 0.
        is_causal: a position may read itself and earlier ones only.
        window: positions that a position may read, itself included; None: no limit.
        dropout: probability that training drops an attention weight
            (`model.dropout.attention`), or of a feed-forward an inner channel
            (`model.dropout.activation`).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    max_position_embeddings: int
    layer: int
    is_causal: bool
    window: int | None
    dropout: float


@dataclass(frozen=True)
class MeasuredParameter:
    """One parameter of a module.

    Attributes:
        name: its name in the module.
        shape: its shape.
        is_linear: the weight of a `torch.nn.Linear` that every position goes through once.
    """

    name: str
    shape: tuple[int, ...]
    is_linear: bool


@dataclass(frozen=True)
class MeasuredTensor:
    """Tensors of a pass that one kind of operation makes, and that a policy may save.

    Attributes:
        producer: kind of the operation.
        bytes: size for all rows of the pass.
        is_saved: autograd saves them; otherwise selective checkpointing alone may.
    """

    producer: Producer
    bytes: int
    is_saved: bool


@dataclass(frozen=True)
class BlockMeasurement:
    """Findings of one pass on the meta device.

    Attributes:
        parameters: in the order of the module.
        flops: FLOPs of the forward pass over all rows; a multiplication with its addition counts 2.
        visible_flops: FLOPs of the pairs that masks show, where the class declares them; else as
            `flops`.
        saved: saved tensors, without input, output and parameters.
    """

    parameters: tuple[MeasuredParameter, ...]
    flops: int
    visible_flops: int
    saved: tuple[MeasuredTensor, ...]

    @property
    def linear_flops_per_position(self) -> int:
        """FLOPs of the linear layers that every position goes through once."""
        return sum(2 * one.shape[0] * one.shape[1] for one in self.parameters if one.is_linear)


@dataclass(frozen=True)
class MeasuredRows:
    """The rows that a block is measured with.

    Attributes:
        length: positions of each.
        count: number of rows; FLOPs and declarations are of one.
        value_bytes: bytes of an activation: 4 in float32, 2 in 16 bits.
        has_documents: a row holds several documents, or padding.
        documents: lengths of the documents whose pairs are counted; empty: one document.
    """

    length: int
    count: int = 1
    value_bytes: int = 4
    has_documents: bool = False
    documents: tuple[int, ...] = ()


class MeasuredBlock(Section):
    """Base class of the user's classes, without torch."""

    @abstractmethod
    def measure_on_meta_device(
        self, model: ModelConfig, layer: int, rows: MeasuredRows
    ) -> BlockMeasurement:
        """Build the module of a layer on the meta device and run it.

        Args:
            model: the model.
            layer: number of the layer.
            rows: its input.

        Returns:
            Its parameters, FLOPs and saved bytes.

        Raises:
            ConfigError: the module fails, or a declaration of the class is wrong.
        """


class PythonMixer(MeasuredBlock):
    """The class of `model.attention.kind=python`."""


class PythonFeedForward(MeasuredBlock):
    """The class of `model.feed_forward.kind=python`."""

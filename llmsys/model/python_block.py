"""Attention and feed-forward of the user's own code: the classes to extend, and what they are
given.

    class Average(PythonMixer):
        masks_documents = True

        def build(self, shape):
            return AverageModule(shape)  # a torch.nn.Module with forward(x_BTD, context)

Invariants:
- A module is a function of its input and context: equal on every rank and without state between
  calls, so any engine that shards parameters over data-parallel ranks runs it.
- What a class declares is compared with what its module does. What it does not declare is
  measured on the meta device.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llmsys.config import block_measurement
from llmsys.config.block_measurement import BlockMeasurement, BlockShape, MeasuredRows
from llmsys.config.loading.python_object import describe_error
from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.python_block_pass import measure_pass

# B rows, T positions, D width, H heads, K width of a head

# A declared number of saved bytes may be this far from the measured one.
_BYTES_TOLERANCE = 0.05


@dataclass(frozen=True)
class MixerContext:
    """Knowledge of a mixer about its positions. These fields and methods are promised.

    Attributes:
        positions_BT: position of each token in its document, int64, (B, T), or (1, T) where all
            rows are alike.
        documents_BT: number of the document of each token, (B, T). Tokens of a document are
            neighbours; padding is negative. None: every row is one document.
        is_causal: a position may read itself and earlier ones only.
        window: positions that a position may read, itself included; None: no limit.
    """

    positions_BT: Tensor
    documents_BT: Tensor | None
    is_causal: bool
    window: int | None
    _rotation: Callable[[Tensor], Tensor] | None = None

    def rotate(self, x_BTHK: Tensor) -> Tensor:
        """Rotate heads of queries or keys by their positions (RoPE), as `model.position` has it
        for this layer.

        Args:
            x_BTHK: heads, (B, T, H, K).

        Returns:
            The same shape; the input where the layer has no rotation.
        """
        return x_BTHK if self._rotation is None else self._rotation(x_BTHK)

    def build_mask(self) -> Tensor:
        """Build the table of the keys that each query may read: by causality, window and
        documents.

        Returns:
            Booleans, (B, 1, T, T) with documents, else (1, 1, T, T). True: may be read.
        """
        places_T = torch.arange(self.positions_BT.shape[1], device=self.positions_BT.device)
        distances_TS = places_T[:, None] - places_T
        visible_TS = torch.ones_like(distances_TS, dtype=torch.bool)
        if self.is_causal:
            visible_TS = distances_TS >= 0
        if self.window is not None:
            visible_TS = visible_TS & (distances_TS.abs() < self.window)
        visible_BTS = visible_TS[None]
        if self.documents_BT is not None:
            same_BTS = self.documents_BT[:, :, None] == self.documents_BT[:, None]
            visible_BTS = visible_BTS & same_BTS
        return visible_BTS[:, None]


class PythonBlock(block_measurement.MeasuredBlock):
    """Declarations that a mixer and a feed-forward share. Fields of a class are its options."""

    # Section of the class, for messages.
    key: ClassVar[str]
    # The module has no form for a CPU, so it is not tested with numbers before a run.
    needs_accelerator: ClassVar[bool] = False

    @abstractmethod
    def build(self, shape: BlockShape) -> nn.Module:
        """Build the module of one layer, on the current default device, which may be meta.

        Parameters are float32, and have the same names and shapes in every layer. Their values do
        not matter, see `compute_initial_value`. Buffers are refused.

        Args:
            shape: widths of the model, and the layer.
        """

    def compute_initial_value(
        self, shape: BlockShape, name: str, size: tuple[int, ...]
    ) -> Tensor | float | None:
        """Return the initial value of a parameter, the same in every process.

        Args:
            shape: widths of the model, and the layer.
            name: name of the parameter in the module.
            size: shape of the whole parameter.

        Returns:
            A float32 tensor of that shape on the CPU, a number for all elements, or None: as the
            model's own parameters. Then weights of modules whose name ends in `norm` are 1,
            parameters whose name ends in `bias` 0, and all others normal with the standard
            deviation `model.initializer_range`, which is divided by sqrt(2 · layers) for
            `o_proj` of a mixer and `down_proj`, the outputs of branches.
        """
        return None

    def list_parameters(self, shape: BlockShape) -> Mapping[str, tuple[int, ...]] | None:
        """Return names and shapes of the parameters, which are compared with the module's.

        Args:
            shape: widths of the model, and the layer.

        Returns:
            Shapes by name; None: not declared.
        """
        return None

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int | None:
        """Return the FLOPs of the forward pass over one row; a product with its addition counts 2.

        Args:
            shape: widths of the model, and the layer.
            length: positions of the row.
            documents: empty: all that the module computes, which is compared with torch's counter.
                Otherwise lengths of documents, to count the pairs alone that masks show.

        Returns:
            FLOPs; None: not declared, and both are what the module computes.
        """
        return None

    def count_saved_bytes(self, shape: BlockShape, length: int, value_bytes: int) -> int | None:
        """Return the bytes that the module saves of one row for the backward pass, without input,
        output and parameters. They are compared with those measured, within 5 %.

        Args:
            shape: widths of the model, and the layer.
            length: positions of the row.
            value_bytes: bytes of an activation: 4 in float32, 2 in 16 bits.

        Returns:
            Bytes; None: not declared.
        """
        return None

    @abstractmethod
    def run_module(
        self,
        module: nn.Module,
        x_BTD: Tensor,
        context: ForwardContext,
        model: ModelConfig,
        layer: int,
    ) -> Tensor:
        """Run a module of `build`, and check its output.

        Args:
            module: the module.
            x_BTD: its input.
            context: what all layers share.
            model: the model.
            layer: number of the layer.

        Returns:
            (B, T, D) in the dtype of the input.
        """

    @abstractmethod
    def build_context(
        self, model: ModelConfig, x_BTD: Tensor, documents_BT: Tensor | None
    ) -> ForwardContext:
        """Build the context of some rows, as the stack of the model would.

        Args:
            model: the model.
            x_BTD: states of all positions.
            documents_BT: document numbers; None: each row is one document.
        """

    @property
    def file(self) -> Path:
        """File of the class."""
        return Path(inspect.getfile(type(self)))

    @property
    def can_read_documents(self) -> bool:
        """Rows of several documents are no mistake."""
        return True

    def build_module(self, model: ModelConfig, layer: int) -> nn.Module:
        """Build the module of a layer, and check its parameters.

        Args:
            model: the model.
            layer: number of the layer.

        Returns:
            The module, on the current default device.

        Raises:
            ConfigError: `build` fails, or returns no module, or one with buffers, with parameters
                that are not float32, or with other parameters than the class declares.
        """
        shape = build_block_shape(self, model, layer)
        name = type(self).__name__
        try:
            module = self.build(shape)
        except Exception as error:
            raise ConfigError(
                f"{self.key}: {name}.build failed for layer {layer}: "
                f"{describe_error(error, self.file)}. Correct build."
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self.key}: {name}.build returned {type(module).__name__}. Return a "
                "torch.nn.Module."
            )
        self._check_parameters(module)
        declared = self.list_parameters(shape)
        if declared is not None:
            source = f"{name}.list_parameters declares"
            self.check_equal_parameters(module, layer, dict(declared), source)
        return module

    def _check_parameters(self, module: nn.Module) -> None:
        name = type(self).__name__
        if buffers := [one for one, _ in module.named_buffers()]:
            raise ConfigError(
                f"{self.key}: {name} has the buffer {buffers[0]}, which would be empty: models are "
                "built on the meta device. Compute it in forward, or make it a parameter with "
                "compute_initial_value."
            )
        for one, parameter in module.named_parameters():
            if parameter.dtype != torch.float32 or not parameter.requires_grad:
                frozen = "" if parameter.requires_grad else " without a gradient"
                raise ConfigError(
                    f"{self.key}: {name}: the parameter {one} is {parameter.dtype}{frozen}. Use a "
                    "trained torch.float32 parameter; train.precision casts it."
                )
            if "experts" in one.split("."):
                raise ConfigError(
                    f"{self.key}: {name}: the parameter {one} has the name of routed experts. "
                    "Rename it."
                )

    def check_equal_parameters(
        self, module: nn.Module, layer: int, wanted: Mapping[str, tuple[int, ...]], source: str
    ) -> None:
        """Compare names and shapes of the parameters of a module.

        Args:
            module: the module.
            layer: its layer.
            wanted: shapes by name.
            source: what says so, for the message.

        Raises:
            ConfigError: they differ.
        """
        found = {one: tuple(parameter.shape) for one, parameter in module.named_parameters()}
        for one in [*wanted, *found]:
            shape = tuple(wanted[one]) if one in wanted else "no parameter"
            built = found.get(one, "no parameter")
            if shape != built:
                raise ConfigError(
                    f"{self.key}: {source} {one} as {shape}, and the module of layer {layer} has "
                    f"it as {built}. Correct one of them."
                )

    def call_checked(self, x_BTD: Tensor, call: Callable[[], Any]) -> Tensor:
        """Return what a module returns for an input, checked.

        Args:
            x_BTD: the input.
            call: runs the module.

        Returns:
            Its output.

        Raises:
            ConfigError: the module fails on the meta device, or returns another shape or dtype
                than its input.
        """
        name = type(self).__name__
        try:
            y_BTD = call()
        except Exception as error:
            # On devices a run has its own errors, such as those of memory and of lost ranks.
            if not x_BTD.is_meta:
                raise
            raise ConfigError(
                f"{self.key}: {name} failed on an input of {tuple(x_BTD.shape)} on the meta "
                f"device, which measures it: {describe_error(error, self.file)}. Correct forward. "
                "It may read no values of tensors in Python, and a kernel of your own needs "
                "torch.library.register_fake."
            ) from error
        wanted = _describe_output(x_BTD)
        found = _describe_output(y_BTD)
        if found != wanted:
            raise ConfigError(
                f"{self.key}: {name} returned {found} for an input of {wanted}. Return the shape "
                "and dtype of the input."
            )
        checked: Tensor = y_BTD
        return checked

    def measure_on_meta_device(
        self, model: ModelConfig, layer: int, rows: MeasuredRows
    ) -> BlockMeasurement:
        """Implement `MeasuredBlock.measure_on_meta_device`."""
        shape = build_block_shape(self, model, layer)
        dtype = torch.float32 if rows.value_bytes == torch.float32.itemsize else torch.bfloat16
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = self.build_module(model, layer).to(dtype)
            size = rows.count, rows.length, shape.hidden_size
            x_BTD = torch.empty(size, dtype=dtype, requires_grad=True)
            documents_BT = None
            if rows.has_documents and self.can_read_documents:
                documents_BT = torch.zeros(size[:2], dtype=torch.int64)
            context = self.build_context(model, x_BTD, documents_BT)
            found = measure_pass(
                module, x_BTD, lambda: self.run_module(module, x_BTD, context, model, layer)
            )
        saved = sum(one.bytes for one in found.saved if one.is_saved)
        if rows.count == 1:
            self._check_declared_counts(shape, rows, found.flops, saved)
        visible = self.count_flops(shape, rows.length, rows.documents or (rows.length,))
        return BlockMeasurement(
            found.parameters, found.flops, found.flops if visible is None else visible, found.saved
        )

    def _check_declared_counts(
        self, shape: BlockShape, rows: MeasuredRows, flops: int, saved: int
    ) -> None:
        name = type(self).__name__
        declared = self.count_flops(shape, rows.length, ())
        if declared is not None and declared != flops:
            raise ConfigError(
                f"{self.key}: {name}.count_flops declares {declared:,} FLOPs for a row of "
                f"{rows.length} positions, and torch counts {flops:,}. Correct it; a kernel of "
                "your own is counted after torch.utils.flop_counter.register_flop_formula."
            )
        wanted = self.count_saved_bytes(shape, rows.length, rows.value_bytes)
        if wanted is not None and abs(wanted - saved) > _BYTES_TOLERANCE * max(wanted, saved):
            raise ConfigError(
                f"{self.key}: {name}.count_saved_bytes declares {wanted:,} bytes for a row of "
                f"{rows.length} positions of {rows.value_bytes} bytes, and {saved:,} are saved. "
                "Correct it."
            )


class PythonMixer(PythonBlock, block_measurement.PythonMixer):
    """Base class of an attention, or of another mixer of positions."""

    key: ClassVar[str] = "model.attention"
    # The module reads `context.documents_BT`: no position depends on another document.
    masks_documents: ClassVar[bool] = False

    def build_context(
        self, model: ModelConfig, x_BTD: Tensor, documents_BT: Tensor | None
    ) -> ForwardContext:
        """Implement `PythonBlock.build_context`."""
        # An estimate may ask for longer rows than the model takes.
        longest = max(model.max_position_embeddings, x_BTD.shape[1])
        longer = model.model_copy(update={"max_position_embeddings": longest})
        return ContextBuilder(longer)(x_BTD.shape[1], x_BTD, documents_BT=documents_BT)

    @property
    def can_read_documents(self) -> bool:
        """Rows of several documents are no mistake."""
        return self.masks_documents

    def run_module(
        self,
        module: nn.Module,
        x_BTD: Tensor,
        context: ForwardContext,
        model: ModelConfig,
        layer: int,
    ) -> Tensor:
        """Implement `PythonBlock.run_module`. With a cache the inputs of all earlier positions are
        kept, and the module runs on the whole prefix.
        """
        new = x_BTD.shape[1]
        documents_BT = context.documents_BT
        positions_BT = context.positions_BT
        if context.cache is not None:
            (x_BTD,) = context.cache.append_layer(layer + context.step, x_BTD)
            documents_BT = context.cache.build_documents(x_BTD.shape[1], x_BTD.device)
            positions_BT = context.cache.get_positions(0, x_BTD.shape[1]).to(x_BTD.device)
        if documents_BT is not None and not self.masks_documents:
            raise ConfigError(
                f"{self.key}: {type(self).__name__} does not mask documents (masks_documents), and "
                "a row holds several, or padding, which would be read. Mask "
                "context.documents_BT, or use batch.attention_scope=window, or prompts of one "
                "length."
            )
        kind = model.get_layer_type(layer)
        own = MixerContext(
            positions_BT,
            documents_BT,
            model.family != "encoder",
            model.get_attention_window(layer),
            context.rotations.get(kind) if model.uses_rope(layer) else None,
        )
        return self.call_checked(x_BTD, lambda: module(x_BTD, own))[:, -new:]


class PythonFeedForward(PythonBlock, block_measurement.PythonFeedForward):
    """Base class of a feed-forward: a function of each position by itself. Its module has
    `forward(x_BTD)`.
    """

    key: ClassVar[str] = "model.feed_forward"

    def build_context(
        self, model: ModelConfig, x_BTD: Tensor, documents_BT: Tensor | None
    ) -> ForwardContext:
        """Return an empty context: a feed-forward reads none."""
        return ForwardContext(masks={}, positions_BT=x_BTD.new_empty(0))

    def run_module(
        self,
        module: nn.Module,
        x_BTD: Tensor,
        context: ForwardContext,
        model: ModelConfig,
        layer: int,
    ) -> Tensor:
        """Implement `PythonBlock.run_module`."""
        return self.call_checked(x_BTD, lambda: module(x_BTD))


def build_block_shape(block: PythonBlock, model: ModelConfig, layer: int) -> BlockShape:
    """Build the shape that `PythonBlock.build` gets.

    Args:
        block: the user's object.
        model: the model.
        layer: number of the layer.

    Returns:
        Widths of the model, and the layer.
    """
    is_mixer = isinstance(block, PythonMixer)
    return BlockShape(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_hidden_layers=model.num_hidden_layers,
        max_position_embeddings=model.max_position_embeddings,
        layer=layer,
        is_causal=model.family != "encoder",
        window=model.get_attention_window(layer),
        dropout=model.dropout.attention if is_mixer else model.dropout.activation,
    )


def _describe_output(found: Any) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"{tuple(found.shape)} in {found.dtype}"

"""Measure norms by layer in chosen steps: of activations, gradients, weights and their updates.

A layer is a block, or the embedding, norm or head outside of blocks. Gradients are those of the
whole step before clipping. An activation is the root mean square of a block's output over real
tokens and channels.

Invariants:
- Each element counts once, whatever the layout: sums of squares over all ranks are divided by the
  copies that exist.
- A step that is not measured costs one look at its number; measuring changes no weight.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmsys.engine.engine import Engine
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.process_group import all_gather_object, all_reduce_sum

# (sum of squares, number of values)
Sums = tuple[Tensor, Tensor]
PARAMETER = "parameter/"


class NormMeter:
    """A meter of every `every_steps`-th step.

    Args:
        every_steps: `train.norms_every_steps`.
        engine: The engine of the run.
    """

    def __init__(self, every_steps: int, engine: Engine) -> None:
        self._every_steps = every_steps
        self._engine = engine
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}
        self._activations: dict[str, Sums] = {}
        self._gradients: dict[str, float] = {}

    def begin_step(self, number: int) -> None:
        """Watch a step, if it is measured. Collective then.

        The weights before the step are copied, because its update is their change.

        Args:
            number: The step, counted from 1.
        """
        if number % self._every_steps:
            return
        self._before = {name: tensor.clone() for name, tensor in self._get_weights().items()}
        self._activations = {}
        self._gradients = {}
        self._engine.observe_gradients = self._record_gradients
        for name, module in self._engine.module.named_modules():
            if isinstance(module, TransformerBlock):
                record = partial(self._record_activation, get_layer_name(f"{name}."))
                self._handles.append(module.register_forward_hook(record))

    def end_step(self) -> dict[str, Any] | None:
        """End the measurement of a step. Collective in a step that is measured.

        Returns:
            The fields of a `norms` event: norms by layer of activations, gradients, updates and
            weights. None in a step that is not measured.
        """
        if self._engine.observe_gradients is None:
            return None
        self._engine.observe_gradients = None
        while self._handles:
            self._handles.pop().remove()
        weights = self._get_weights()
        changes = {name: weights[name] - before for name, before in self._before.items()}
        self._before = {}
        return {
            "activation": _reduce_mean_squares(self._activations, self._engine.device),
            "gradient": self._gradients,
            "update": reduce_layer_norms(changes, self._engine.device),
            "weight": reduce_layer_norms(weights, self._engine.device),
        }

    def _get_weights(self) -> dict[str, Tensor]:
        tensors = self._engine.get_state().tensors
        return {
            name.removeprefix(PARAMETER): t
            for name, t in tensors.items()
            if name.startswith(PARAMETER)
        }

    def _record_gradients(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        norms = reduce_layer_norms(gradients, self._engine.device)
        self._gradients = {layer: norm / scale for layer, norm in norms.items()}

    @torch.no_grad()
    def _record_activation(
        self, layer: str, module: nn.Module, arguments: tuple[Any, ...], output: Tensor
    ) -> None:
        real_BT, queries = arguments[1].real_BT, arguments[1].num_predicted
        squares_BT = get_local_tensor(output).detach().double().square().sum(-1)
        # The query stream of a permutation follows the tokens, and has no padding.
        squares_BT = squares_BT[:, : squares_BT.shape[1] - queries]
        real_BT = torch.ones_like(squares_BT, dtype=torch.bool) if real_BT is None else real_BT
        before = self._activations.get(layer, (squares_BT.new_zeros(()), squares_BT.new_zeros(())))
        counted = real_BT.sum() * output.shape[-1]
        # where, not a product: padding may be infinite
        self._activations[layer] = (
            before[0] + squares_BT.where(real_BT, 0).sum(),
            before[1] + counted,
        )


def get_layer_name(parameter: str) -> str:
    """Return the layer of a parameter: `blocks.3` of `blocks.3.attention.q_proj.weight`, `embed` of
    `embed.weight`.

    Args:
        parameter: Name of the parameter.

    Returns:
        The block with what it is in, such as `encoder.blocks.0`, else the first part of the name.
    """
    found = re.match(r".*?\bblocks\.\d+(?=\.)", parameter)
    return found.group() if found else parameter.split(".")[0]


def reduce_layer_norms(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Return the norm of the tensors of each layer over all ranks. Collective.

    Args:
        tensors: DTensors and plain tensors by parameter; of a plain one each rank has the whole.
            Ranks of a pipeline have others.
        device: Device of the reduction.

    Returns:
        Norms by layer, the same on every rank.
    """
    sums = {
        name: (
            get_local_tensor(t).double().square().sum(),
            get_local_tensor(t).numel(),
            t.numel(),
            1,
        )
        for name, t in tensors.items()
    }
    layers: dict[str, float] = {}
    for name, (squares, held, whole, holders) in _sum_over_ranks(sums, 4, device).items():
        # Ranks hold `copies` of every element.
        copies = held / (whole / holders) if whole else 1.0
        layer = get_layer_name(name)
        layers[layer] = layers.get(layer, 0.0) + squares / copies
    return {layer: squares**0.5 for layer, squares in layers.items()}


def _reduce_mean_squares(sums: Mapping[str, Sums], device: torch.device) -> dict[str, float]:
    """Return the root mean square by layer. Ranks that have the same rows count them equally
    often in both sums.
    """
    reduced = _sum_over_ranks(sums, 2, device)
    return {
        layer: (squares / max(count, 1.0)) ** 0.5 for layer, (squares, count) in reduced.items()
    }


def _sum_over_ranks(
    sums: Mapping[str, Iterable[Any]], width: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the sums over ranks of `width` numbers by name, in float64; a rank may lack names.
    Collective.
    """
    names = list(dict.fromkeys(name for own in all_gather_object(list(sums)) for name in own))
    rows = [
        torch.stack(
            [
                torch.as_tensor(x, dtype=torch.float64, device=device)
                for x in sums.get(name, [0.0] * width)
            ]
        )
        for name in names
    ]
    return dict(zip(names, all_reduce_sum(torch.stack(rows)).tolist(), strict=True)) if rows else {}

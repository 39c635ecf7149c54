"""Measure how activations change in the first steps at several widths (the coordinate check of Yang
2022, D.1).

Under µP they change by as much at every width; under the standard parametrization by more in a
wider model, until its learning rate is too high. Every model trains on one batch of random tokens
with the optimizer of the config.

Invariants:
- One process, float32, no files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import OptimizerConfig
from llmsys.config.parametrization import StandardParametrizationConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.lr_schedule import set_rates

# Rows and positions of the batch; the loss and its gradients do not depend on the width.
ROWS, LENGTH = 4, 64
# A change that grows by less than width to this power is flat: 4 steps of a tiny model vary by
# about half of it.
MAX_EXPONENT = 0.25

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class CoordinateRow:
    """Root mean squares of one kind of activation, by width, under one parametrization.

    Attributes:
        parametrization: Its kind.
        part: embedding, attention or feed_forward (mean over blocks), logits.
        sizes: After the steps.
        changes: Of the difference between the activations before and after the steps.
        exponent: Slope of log change over log width.
    """

    parametrization: str
    part: str
    sizes: dict[int, float]
    changes: dict[int, float]
    exponent: float

    @property
    def is_flat(self) -> bool:
        """True where wider models do not change by more."""
        return self.exponent <= MAX_EXPONENT


def widen_model(model: ModelConfig, width: int) -> ModelConfig:
    """Return a model of another width, with heads of the same size and other widths in proportion.

    Args:
        model: The model.
        width: New hidden_size.

    Returns:
        The model, with its parametrization.

    Raises:
        ConfigError: A width would not be an integer.
    """

    def scale(value: int, key: str) -> int:
        if value * width % model.hidden_size:
            unit = model.hidden_size // math.gcd(value, model.hidden_size)
            raise ConfigError(
                f"width {width}: model.{key}={value} cannot grow by {width}/{model.hidden_size}. "
                f"Use a multiple of {unit}."
            )
        return value * width // model.hidden_size

    keys = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    changes: dict[str, Any] = {key: scale(getattr(model, key), key) for key in keys}
    if model.moe is not None:
        widths = {
            key: getattr(model.moe, key)
            for key in ("moe_intermediate_size", "shared_intermediate_size")
        }
        scaled = {
            key: scale(value, f"moe.{key}") for key, value in widths.items() if value is not None
        }
        changes["moe"] = model.moe.model_dump() | scaled
    return ModelConfig.model_validate(
        model.model_dump() | changes | {"hidden_size": width, "head_dim": model.head_dim}
    )


def check_coordinates(
    config: RunConfig, widths: Sequence[int], steps: int, on_model: Callable[[str], None]
) -> list[CoordinateRow]:
    """Train models of each width under the config's parametrization and under the standard one.

    Args:
        config: The run; its learning rate is used without schedule.
        widths: Values of hidden_size, rising.
        steps: Steps of each model.
        on_model: Called with the name of each model after its steps.

    Returns:
        A row for each kind of activation, the config's parametrization first.

    Raises:
        ConfigError: The model is no decoder, or a width does not fit it.
    """
    if config.model.family != "decoder":
        raise ConfigError(
            f"doctor coordinates trains decoders, not model.family={config.model.family}."
        )
    standard = config.model.model_copy(update={"parametrization": StandardParametrizationConfig()})
    rows: list[CoordinateRow] = []
    for model in [config.model, *([] if config.model == standard else [standard])]:
        kind, measured = model.parametrization.kind, {}
        for width in widths:
            measured[width] = _measure_changes(
                widen_model(model, width), config.optimizer, steps, config.run.seed
            )
            on_model(f"{kind}, width {width}")
        for part in measured[widths[0]]:
            sizes = {width: found[part][0] for width, found in measured.items()}
            changes = {width: found[part][1] for width, found in measured.items()}
            rows.append(CoordinateRow(kind, part, sizes, changes, _fit_exponent(changes)))
    return rows


def _measure_changes(
    model: ModelConfig, optimizer_config: OptimizerConfig, steps: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Return size and change of each kind of activation after some steps."""
    transformer = Transformer(model)
    initialize_parameters(transformer, seed)
    named = dict(transformer.named_parameters())
    optimizer = build_optimizer(named, optimizer_config, compute_dtype=torch.float32, model=model)
    length = min(LENGTH, model.max_position_embeddings)
    tokens_BT = torch.randint(
        0, model.vocab_size, (ROWS, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    before = _record_activations(transformer, tokens_BT[:, :-1])
    for _ in range(steps):
        transformer.train()
        logits_BTV = transformer(tokens_BT[:, :-1])
        nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        set_rates(optimizer.param_groups, optimizer_config.learning_rate)
        optimizer.step()
        optimizer.zero_grad()
    after = _record_activations(transformer, tokens_BT[:, :-1])
    parts = {part for part, _ in before}
    return {
        part: (
            _compute_mean_size([value for (kind, _), value in after.items() if kind == part]),
            _compute_mean_size(
                [value - before[key] for key, value in after.items() if key[0] == part]
            ),
        )
        for part in ("embedding", "attention", "feed_forward", "logits")
        if part in parts
    }


@torch.no_grad()
def _record_activations(model: Transformer, tokens_BT: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the activations of a forward pass without dropout, by part and block."""
    found: dict[tuple[str, int], Tensor] = {}

    def record_output(part: str, layer: int) -> Callable[..., None]:
        return lambda module, inputs, output: found.__setitem__((part, layer), output)

    handles = [model.embed.register_forward_hook(record_output("embedding", 0))]
    for layer, block in enumerate(model.blocks):
        for part in ("attention", "feed_forward"):
            branch = getattr(block, part)
            if branch is not None:
                handles.append(branch.register_forward_hook(record_output(part, layer)))
    model.eval()
    found["logits", 0] = model(tokens_BT)
    for handle in handles:
        handle.remove()
    return found


def _compute_mean_size(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.square().mean().sqrt()) for tensor in tensors) / len(tensors)


def _fit_exponent(values: dict[int, float]) -> float:
    """Return the least-squares slope of log value over log width; inf where a model has
    diverged.
    """
    if not all(0 < value < math.inf for value in values.values()):
        return math.inf
    x, y = [math.log(width) for width in values], [math.log(value) for value in values.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - mean_x) ** 2 for one in x)
    return sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True)) / spread


def format_coordinates(rows: Sequence[CoordinateRow]) -> str:
    """Return the changes as a table with a column for each width.

    Args:
        rows: From `check_coordinates`.

    Returns:
        Lines without a last newline.
    """
    widths = list(rows[0].changes)
    head = (
        f"{'parametrization':<16}{'change of':<14}"
        + "".join(f"{width:>10}" for width in widths)
        + f"{'exponent':>10}"
    )
    lines = [head]
    for row in rows:
        cells = "".join(f"{row.changes[width]:>10.3g}" for width in widths)
        lines.append(f"{row.parametrization:<16}{row.part:<14}{cells}{row.exponent:>+10.2f}")
    return "\n".join(lines)

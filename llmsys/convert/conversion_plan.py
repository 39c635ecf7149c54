"""Plan a conversion: match tensors of a Hugging Face folder with ours before a byte of them is
read.

Reads a ModelConfig, a family's mapping, and the names and shapes in a folder. Old name endings and
a missing prefix are understood; copies of tied tensors and buffers that can be computed are
ignored.

Invariants:
- Every parameter of ours is in exactly one group.
- Every tensor that is missing, extra or of another shape is named in one error.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.convert.name_mapping import FamilyMapping, NameMapping, TensorTransform
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.errors import CheckpointError, ConfigError
from llmsys.model.transformer import Transformer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """One tensor of ours, or one expert of a stack. `name` is as in a checkpoint; `shape` is of
    the full tensor.
    """

    name: str
    shape: Shape
    expert: int | None = None

    @property
    def part_shape(self) -> Shape:
        """The shape of the part: without the experts' axis where this is one expert."""
        return self.shape if self.expert is None else self.shape[1:]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are converted together: `ours` and `theirs` hold the same numbers."""

    ours: tuple[TensorPart, ...]
    theirs: tuple[str, ...]
    their_shapes: tuple[Shape, ...]
    form: TensorTransform


@dataclass(frozen=True)
class ConversionPlan:
    """All groups of a model, and our buffers that a Hugging Face folder does not have."""

    model: ModelConfig
    table: FamilyMapping
    groups: tuple[TensorGroup, ...]
    unknown_there: tuple[TensorPart, ...]

    @property
    def their_shapes(self) -> dict[str, Shape]:
        """Name → shape of every tensor that a folder must have."""
        return {
            name: shape
            for one in self.groups
            for name, shape in zip(one.theirs, one.their_shapes, strict=True)
        }

    @property
    def copies(self) -> dict[str, str]:
        """The mapping's copies, with block numbers filled in."""
        if self.model.multi_token_prediction is None:
            return {ours: theirs for ours, theirs in self.table.copies.items() if "{" not in ours}
        first, depth = self.model.num_hidden_layers, self.model.multi_token_prediction.depth
        layers = range(first, first + depth)
        return {
            copy.replace("{n}", str(n)): one
            for copy, one in self.table.copies.items()
            for n in layers
        }


def build_conversion_plan(model: ModelConfig, table: FamilyMapping) -> ConversionPlan:
    """Return the plan for every tensor of a model.

    Raises ConfigError when a parameter of ours has no name in the family.
    """
    parameters, buffers = list_parameters_and_buffers(model)
    targets = {name: TensorPart(f"parameter/{name}", shape) for name, shape in parameters.items()}
    targets |= {name: TensorPart(f"buffer/{name}", shape) for name, shape in buffers.items()}
    groups = [group for rule in table.rules for group in _iter_groups(rule, targets, model)]
    covered = {part.name for group in groups for part in group.ours}
    left = [part for part in targets.values() if part.name not in covered]
    nameless = [
        part.name.removeprefix("parameter/") for part in left if part.name.startswith("parameter/")
    ]
    if nameless:
        raise ConfigError(
            f"{nameless[0]} of this model has no name in the Hugging Face format of its model "
            f"type ({len(nameless)} such tensors). Convert a model without it, or keep it in "
            "llmsys format."
        )
    return ConversionPlan(model, table, tuple(groups), tuple(left))


def list_parameters_and_buffers(model: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return names and shapes of the parameters, each tied one once, and of the saved buffers."""
    # only names and shapes are needed, and the model may be larger than memory
    with torch.device("meta"):
        module = Transformer(model)
    parameters = {name: tuple(value.shape) for name, value in module.named_parameters()}
    return parameters, {name: tuple(value.shape) for name, value in iter_persistent_buffers(module)}


def _iter_groups(
    rule: NameMapping, targets: Mapping[str, TensorPart], model: ModelConfig
) -> Iterator[TensorGroup]:
    """Yield the groups of one mapping: one per block in which our model has its tensors."""
    for i in _list_blocks(rule, model):
        ours = [targets.get(name.replace("{i}", str(i))) for name in rule.ours]
        parts = tuple(part for part in ours if part is not None)
        # The config decides: a mapping may name more than a model has.
        if len(parts) < len(ours):
            continue
        theirs = tuple(_fill_numbers(name, i, model) for name in rule.theirs)
        if "{e}" not in rule.theirs[0]:
            yield _build_group(parts, theirs, rule.form, model)
            continue
        for e in range(parts[0].shape[0]):
            experts = tuple(TensorPart(part.name, part.shape, e) for part in parts)
            yield _build_group(
                experts, tuple(name.replace("{e}", str(e)) for name in theirs), rule.form, model
            )


def _list_blocks(rule: NameMapping, model: ModelConfig) -> Iterable[int]:
    if "{i}" not in rule.ours[0]:
        return range(1)
    return range(max(model.num_hidden_layers, model.encoder_model.num_hidden_layers))


def _fill_numbers(name: str, i: int, model: ModelConfig) -> str:
    return name.replace("{i}", str(i)).replace("{n}", str(i + model.num_hidden_layers))


def _build_group(
    ours: tuple[TensorPart, ...], theirs: tuple[str, ...], form: TensorTransform, model: ModelConfig
) -> TensorGroup:
    # The meta device gives shapes without any numbers.
    empty: list[Tensor] = [torch.empty(part.part_shape, device="meta") for part in ours]
    shapes = tuple(tuple(one.shape) for one in form.to_hugging_face(empty, model))
    return TensorGroup(ours, theirs, shapes, form)


# Differences that a message lists; the rest is counted.
NAMED = 5


@dataclass(frozen=True)
class TensorMatch:
    """Names in a folder's files for the tensors of a plan.

    Attributes:
        names: the plan's name → the name in the file.
        copies: name in the file → the plan's name of the tensor that it must equal.
        unused: names in the file that nothing reads.
    """

    names: dict[str, str]
    copies: dict[str, str]
    unused: tuple[str, ...]


def match_tensors(plan: ConversionPlan, found: Mapping[str, Shape], source: Path) -> TensorMatch:
    """Match the names in a folder with the plan's.

    Raises CheckpointError with each differing tensor, its shape and the expected shape.
    """
    needed, copies = plan.their_shapes, plan.copies
    names: dict[str, str] = {}
    same: dict[str, str] = {}
    unused, extra = [], []
    for name in found:
        today = _to_current_name(name, plan.table, needed.keys() | copies.keys())
        if today in needed and today not in names:
            names[today] = name
        elif today in copies:
            same[name] = copies[today]
        elif any(re.search(pattern, name) for pattern in plan.table.ignored):
            unused.append(name)
        else:
            extra.append(name)
    same = {copy: same.get(original, original) for copy, original in same.items()}
    _require_no_differences(source, plan, found, names, same, extra)
    return TensorMatch(names, same, tuple(unused))


def _to_current_name(name: str, table: FamilyMapping, known: set[str]) -> str:
    """Return the name as the mapping spells it."""
    for old, new in table.aliases.items():
        name = f"{name.removesuffix(old)}{new}" if name.endswith(old) else name
    for outer, inner in table.outer.items():
        name = f"{inner}{name.removeprefix(outer)}" if name.startswith(outer) else name
    return (
        name if name in known or f"{table.prefix}{name}" not in known else f"{table.prefix}{name}"
    )


def _require_no_differences(
    source: Path,
    plan: ConversionPlan,
    found: Mapping[str, Shape],
    names: Mapping[str, str],
    copies: Mapping[str, str],
    extra: list[str],
) -> None:
    needed = plan.their_shapes
    lines = [f"{name} {shape} is missing" for name, shape in needed.items() if name not in names]
    lines += [f"{name} {found[name]} is not part of the model" for name in extra]
    wanted = {name: needed[today] for today, name in names.items()}
    wanted |= {copy: needed[original] for copy, original in copies.items() if original in needed}
    lines += [
        f"{name} has shape {found[name]}, the config needs {shape}"
        for name, shape in wanted.items()
        if tuple(found[name]) != shape
    ]
    if lines:
        more = f"\n  … and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        listed = "".join(f"\n  {line}" for line in lines[:NAMED])
        raise CheckpointError(
            f"the tensors of {source} do not match its config.json:{listed}{more}\nUse the "
            "config.json of these weights, or the weights of this config.json."
        )

"""Convert a ModelConfig to the config.json of a model type, and find what the type cannot say.

Its writer produces a config.json, its reader converts it back, and the result is compared with the
model.

Invariants:
- A candidate without differences reads back as the same model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.config.section import Section
from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.families import FAMILIES
from llmsys.hugging_face.shared_fields import Values, compute_yarn_score_scale

# Fields that only training uses. A model type that cannot express them is still equivalent.
TRAINING_ONLY = (
    "dropout.", "initializer", "initializer_range", "embedding.initializer_range",
    "moe.z_loss_weight",
    "attention.sparse.loss_weight",
    "linear_attention.max_initial_decay",
    "moe.balance.rate", "moe.balance.weight", "moe.balance.scope", "moe.balance.sequence_weight",
)  # fmt: skip

_ABSENT: Any = object()


@dataclass(frozen=True)
class Difference:
    """A field that a model type cannot express.

    Attributes:
        key: dotted key of the model; of a section of another kind, that of its kind.
        value: that of the model.
        possible: the value that the type would express; of another kind with more fields than
            their defaults, a mapping.
    """

    key: str
    value: Any
    possible: Any

    @property
    def is_of_model(self) -> bool:
        """The trained model computes otherwise without it."""
        return not self.key.startswith(TRAINING_ONLY)


@dataclass(frozen=True)
class Candidate:
    """A model type, its config.json, and what that cannot express."""

    model_type: str
    values: dict[str, Any]
    differences: tuple[Difference, ...]

    @property
    def obstacles(self) -> tuple[Difference, ...]:
        """The differences without which the trained model computes otherwise."""
        return tuple(one for one in self.differences if one.is_of_model)


def iter_candidates(model: ModelConfig, model_types: Iterable[str]) -> Iterator[Candidate]:
    """Yield the types that can be written and read back as a legal model.

    Args:
        model: the architecture, in the standard parametrization.
        model_types: names in `FAMILIES`.

    Yields:
        A candidate, perhaps with differences.
    """
    for name in model_types:
        values = _try_build_values(name, model)
        differences = None if values is None else _find_differences(model, name, values)
        if values is not None and differences is not None:
            yield Candidate(name, values, tuple(differences))


def _try_build_values(name: str, model: ModelConfig) -> dict[str, Any] | None:
    """Return the config.json of this model type; None if the model lacks a field that its writer
    needs.
    """
    family = FAMILIES[name]
    try:
        values = family.write(model.model_dump() | {"encoder": _build_encoder_section(model)})
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    if model.family == "decoder":  # the classes' own defaults are ids of other vocabularies
        values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **values}
    return {"model_type": name, "architectures": [family.architecture], **values}


def _build_encoder_section(model: ModelConfig) -> Values | None:
    """Return the encoder section, filled in if the encoder has the sizes of the decoder."""
    if model.family != "encoder_decoder" or model.encoder is not None:
        return None if model.encoder is None else model.encoder.model_dump()
    twin = {"num_hidden_layers": model.num_hidden_layers, "decoder_start_token_id": 0}
    return twin | {"intermediate_size": None, "num_attention_heads": None}


def _find_differences(
    model: ModelConfig, name: str, values: dict[str, Any]
) -> list[Difference] | None:
    """Return the fields that differ after reading `values` back; None if they are not a legal
    model.
    """
    family = FAMILIES[name]
    fields = ConfigJsonReader(values, family.defaults)
    read = family.read(fields)
    if fields.problems or fields.find_unknown_keys():
        return None
    try:
        back = ModelConfig.model_validate(read)
    except ValidationError:
        return None
    ours, theirs = _to_normalized_values(model), _to_normalized_values(back)
    return list(_iter_differences(ours, theirs, back, ()))


def _to_normalized_values(model: ModelConfig) -> Values:
    """Return the model as values, with one canonical form for equivalent settings."""
    values = model.model_dump()
    kinds = [model.get_layer_type(layer) for layer in range(model.num_hidden_layers)]
    values["layer_types"] = kinds
    values["feed_forward_layers"] = [
        model.has_feed_forward(layer) for layer in range(model.num_hidden_layers)
    ]
    values["sliding_window"] = model.sliding_window if "sliding_attention" in kinds else None
    if model.position.kind == "rope":
        values["position"]["layers"] = [
            model.uses_rope(layer) for layer in range(model.num_hidden_layers)
        ]
        if "sliding_attention" not in kinds:
            values["position"]["sliding_theta"] = None
    if model.attention.kind == "latent":
        values["head_dim"] = None
        if model.attention.scale is None and model.position.kind == "rope":
            # as the model computes it, and as a config.json is read
            values["attention"]["scale"] = compute_yarn_score_scale(
                values["position"],
                values["position"]["scaling"],
                model.attention.qk_nope_head_dim + model.attention.qk_rope_head_dim,
            )
    if not model.num_attention_layers and model.position.kind in ("none", "rope"):
        names = ("attention", "position", "num_attention_heads", "num_key_value_heads", "head_dim")
        values |= dict.fromkeys(names)
    if model.linear_attention is not None:
        # Chunks compute the same, whatever their length.
        values["linear_attention"]["chunk_length"] = None
    if model.moe is not None:
        dense = [one for one in range(model.num_hidden_layers) if not model.is_moe_layer(one)]
        values["moe"] |= {"first_dense_layers": 0, "every": 1, "dense_layers": dense}
        number, rest = divmod(model.moe.shared_expert_size, model.moe.moe_intermediate_size)
        values["moe"] |= {"num_shared_experts": 0 if rest else number}
        values["moe"]["shared_intermediate_size"] = model.moe.shared_expert_size if rest else None
    if not model.num_dense_layers:
        values |= {"intermediate_size": 0, "feed_forward": None}
    if model.family == "encoder_decoder":
        shape = model.encoder_model
        sizes = ("num_hidden_layers", "intermediate_size", "num_attention_heads")
        start = 0 if model.encoder is None else model.encoder.decoder_start_token_id
        values["encoder"] = {name: getattr(shape, name) for name in sizes} | {
            "decoder_start_token_id": start
        }
    return values


def _iter_differences(
    ours: Values, theirs: Values, back: Section, keys: tuple[str, ...]
) -> Iterator[Difference]:
    """Yield the unequal fields of a section and of the sections in it; `back` is `theirs` before
    it was normalized.
    """
    for key in dict.fromkeys((*ours, *theirs)):
        value, other = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        path = ".".join((*keys, key))
        if not (isinstance(value, dict) and isinstance(other, dict)):
            if value != other:
                yield Difference(path, _get_kind(value), _get_kind(other))
        elif value.get("kind") == other.get("kind"):
            yield from _iter_differences(value, other, getattr(back, key), (*keys, key))
        else:
            possible = _select_changed(getattr(back, key))
            yield Difference(f"{path}.kind", value["kind"], possible)


def _select_changed(section: Section) -> Any:
    """Return the kind of a section, with the fields that do not have their default."""
    fields = type(section).model_fields
    changed = {
        name: value
        for name, value in section.model_dump(mode="json").items()
        if name != "kind" and getattr(section, name) != fields[name].default
    }
    kind = getattr(section, "kind", None)
    return {"kind": kind, **changed} if changed else kind


def _get_kind(value: Any) -> Any:
    """Return a value as a message shows it; of a section that the other model lacks, its kind."""
    if isinstance(value, dict):
        return value.get("kind", "a section")
    return None if value is _ABSENT else value

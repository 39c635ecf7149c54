"""Convert a ModelConfig to the equivalent config.json.

Every model type is tried: its writer produces a config.json, its reader converts it back, and the
result is compared with the model.

Invariants:
- Reading the result gives the same model, except for fields that only training uses.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError, format_choices
from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.families import FAMILIES
from llmsys.hugging_face.shared_fields import Values
from llmsys.log import get_logger

# Fields that only training uses. A model type that cannot express them is still equivalent.
TRAINING_ONLY = (
    "dropout.", "initializer", "initializer_range", "embedding.initializer_range",
    "moe.z_loss_weight",
    "linear_attention.max_initial_decay",
    "moe.balance.rate", "moe.balance.weight", "moe.balance.scope", "moe.balance.sequence_weight",
)  # fmt: skip

_ABSENT: Any = object()
_log = get_logger(__name__)


def build_config_json(model: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """Build the config.json of a model, with the simplest model type that can express it.

    Fields that only training uses (dropout, initialization, weights of balancing losses) are
    omitted with a log line if the type cannot express them.

    Args:
        model: the architecture.
        model_type: Hugging Face model type; None: the simplest type that fits.

    Returns:
        The values of the config.json, with `model_type` and `architectures`.

    Raises:
        ConfigError: no model type can express the model. Names the fields that differ.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(
            f"model_type: {model_type!r} is not supported. Known: {', '.join(FAMILIES)}."
        )
    found: list[tuple[list[str], dict[str, Any]]] = []
    for name in [model_type] if model_type else FAMILIES:
        values = _try_build_values(name, model)
        differences = None if values is None else _find_differences(model, name, values)
        if values is None or differences is None:
            continue
        if not differences:
            return values
        found.append((differences, values))
    harmless = [candidate for candidate in found if not _select_model_keys(candidate[0])]
    if not harmless:
        raise ConfigError(_format_refusal(model, found, model_type))
    differences, values = min(harmless, key=lambda candidate: len(candidate[0]))
    left_out = ", ".join(f"{key}={_get_value(model, key)}" for key in differences)
    _log.info(
        "config.json of %s has no field for %s; only training uses it",
        values["model_type"],
        left_out,
    )
    return values


def _select_model_keys(differences: list[str]) -> list[str]:
    return [key for key in differences if not key.startswith(TRAINING_ONLY)]


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


def _find_differences(model: ModelConfig, name: str, values: dict[str, Any]) -> list[str] | None:
    """Return the dotted keys that differ after reading `values` back; None if they are not a
    legal model.
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
    return list(_iter_unequal_keys(_to_normalized_values(model), _to_normalized_values(back), ()))


def _to_normalized_values(model: ModelConfig) -> Values:
    """Return the model as values, with one canonical form for equivalent settings."""
    values = model.model_dump()
    kinds = [model.get_layer_type(layer) for layer in range(model.num_hidden_layers)]
    values["layer_types"] = kinds
    values["sliding_window"] = model.sliding_window if "sliding_attention" in kinds else None
    if model.position.kind == "rope":
        values["position"]["layers"] = [
            model.uses_rope(layer) for layer in range(model.num_hidden_layers)
        ]
        if "sliding_attention" not in kinds:
            values["position"]["sliding_theta"] = None
    if model.attention.kind == "latent":
        values["head_dim"] = None
    if model.linear_attention is not None:
        # Chunks compute the same, whatever their length.
        values["linear_attention"]["chunk_length"] = None
    if model.moe is not None:
        values["moe"] |= {
            "layers": model.moe_layers,
            "first_dense_layers": 0,
            "every": 1,
            "dense_layers": (),
        }
        values["moe"] |= {"shared_width": model.moe.shared_expert_size, "num_shared_experts": 0}
        values["moe"]["shared_intermediate_size"] = None
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


def _iter_unequal_keys(ours: Values, theirs: Values, keys: tuple[str, ...]) -> Iterator[str]:
    for key in dict.fromkeys((*ours, *theirs)):
        value, other = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if (
            isinstance(value, dict)
            and isinstance(other, dict)
            and value.get("kind") == other.get("kind")
        ):
            yield from _iter_unequal_keys(value, other, (*keys, key))
        elif isinstance(value, dict) and isinstance(other, dict):
            yield ".".join((*keys, key, "kind"))
        elif value != other:
            yield ".".join((*keys, key))


def _get_value(model: ModelConfig, key: str) -> Any:
    found: Any = _to_normalized_values(model)
    for part in key.split("."):
        found = found.get(part, _ABSENT) if isinstance(found, dict) else _ABSENT
    if isinstance(found, dict):
        found = found.get("kind", "a section")
    return "given" if found is _ABSENT else found


def _format_refusal(
    model: ModelConfig, found: list[tuple[list[str], dict[str, Any]]], asked: str | None
) -> str:
    head = (
        "No Hugging Face model type can represent this model"
        if asked is None
        else f"{asked} cannot represent this model"
    )
    if not found:
        return f"{head}. Choose another type, or keep the model in llmsys format."
    differences, values = min(found, key=lambda candidate: len(_select_model_keys(candidate[0])))
    fields = format_choices(
        [f"{key}={_get_value(model, key)}" for key in _select_model_keys(differences)[:5]]
    )
    nearest = f"The nearest is {values['model_type']}, which" if asked is None else "It"
    return (
        f"{head}. {nearest} cannot represent {fields}. Change these fields, or keep the model in "
        "llmsys format."
    )

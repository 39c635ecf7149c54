"""Convert the text of a config.json to the values of a ModelConfig.

`FAMILIES` in families.py has the supported model types, with their readers and writers.

Invariants:
- Every key is converted, known to be harmless, restricted to supported values, or an error.
- A ConfigError names the file and every wrong key.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from llmsys.errors import ConfigError, format_choices
from llmsys.hugging_face.config_json import HARMLESS, ConfigJsonReader
from llmsys.hugging_face.families import FAMILIES

# Model types that `llmsys estimate` counts (llmsys/estimate/counted/) and nothing else reads.
COUNTED_TYPES = frozenset(
    (
        "apertus", "cohere", "esm", "gemma4_text", "hunyuan_v1_dense",
        "hunyuan_v1_moe", "jamba", "lfm2", "llama4_text", "mamba", "ministral3",
        "modernbert", "mt5", "phi3",
    )
)  # fmt: skip
# The limit of model.num_hidden_layers.
MAX_LAYERS = 100_000
# num_hidden_layers, n_layer, decoder_layers, … and the first layers that are dense.
_COUNTS_LAYERS = re.compile(r"layers?$|^first_k_dense_replace$")
# Model types whose config.json is another type's, under another name.
ALIASES = {"kimi_k2": "deepseek_v3"}


def read_model_values(values: dict[str, Any], source: str = "config.json") -> dict[str, Any]:
    """Convert a config.json to the values of the equivalent `model:` section.

    `num_nextn_predict_layers` is ignored, because Hugging Face's classes do not build that module.
    Set `multi_token_prediction: {depth: 1}` to build it.

    Args:
        values: the parsed config.json.
        source: name of the file in error messages.

    Returns:
        Values for ModelConfig, not yet validated.

    Raises:
        ConfigError: the model type or a key is not supported, or there are too many layers.
    """
    require_layer_limit(values, source)
    name = _require_model_type(values, source, list(FAMILIES))
    name = ALIASES.get(name, name)
    family = FAMILIES[name]
    fields = ConfigJsonReader(values, family.defaults)
    read = family.read(fields)
    fields.raise_violations(source)
    return read


def require_layer_limit(values: dict[str, Any], source: str) -> None:
    """Check the numbers of layers, before anything builds a list of layers.

    Args:
        values: the parsed config.json.
        source: name of the file in the message.

    Raises:
        ConfigError: a number of layers, by the name of its key, is above `MAX_LAYERS`.
    """
    waiting = [("", values)]
    while waiting:
        prefix, mapping = waiting.pop()
        for key, value in mapping.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            elif (
                _COUNTS_LAYERS.search(key) and isinstance(value, int | float) and value > MAX_LAYERS
            ):
                raise ConfigError(
                    f"{source}: {prefix}{key}: {value} layers are more than the maximum of "
                    f"{MAX_LAYERS:,}. Correct the number; no published model has a hundredth of "
                    "it."
                )


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON text that holds one mapping.

    Args:
        text: the JSON text.
        source: name of the file in error messages.

    Returns:
        The mapping.

    Raises:
        ConfigError: the text is not JSON, has a duplicate key, or is not a mapping.
    """

    def build_mapping(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        for i, (key, _) in enumerate(entries):
            if any(key == other for other, _ in entries[:i]):
                raise ConfigError(f"{source}: {key} is given twice. Keep one of them.")
        return dict(entries)

    try:
        values = json.loads(text, object_pairs_hook=build_mapping)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}:{error.lineno}: not JSON: {error.msg}. Correct column {error.colno}."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{source}: not JSON: nested too deeply. Give the config.json of a model."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds a {type(values).__name__}, not a mapping. Give the config.json of a "
            "model."
        )
    return values


def _require_model_type(values: dict[str, Any], source: str, model_types: Sequence[str]) -> str:
    name = values.get("model_type")
    known = ", ".join(sorted(model_types))
    if isinstance(name, str) and ALIASES.get(name, name) in model_types:
        return name
    if isinstance(name, str) and name in COUNTED_TYPES:
        raise ConfigError(
            f"{source}: model_type: {name!r} can be counted and not built: use llmsys estimate. "
            f"Known: {known}."
        )
    for inner in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(values.get(inner), dict):
            raise ConfigError(
                f"{source}: model_type: {name!r} has its language model under {inner}, with other "
                "parts that are not supported. Save that mapping as a separate config.json."
            )
    if name is None:
        raise ConfigError(f"{source}: model_type: is missing. Give one of {known}.")
    raise ConfigError(
        f"{source}: model_type: {name!r} is not supported.{_format_hint(values, model_types)} "
        f"Known: {known}."
    )


def _format_hint(values: dict[str, Any], model_types: Sequence[str]) -> str:
    """Return the type whose fields are nearest to those of a file, whatever its name.

    A name says nothing: qwen9 may be a Llama, and llama9 none.
    """
    own = {key for key, value in values.items() if value is not None} - HARMLESS
    if not own:
        return ""
    unknown = {name: _list_unknown_keys(values, name) for name in model_types}
    nearest = min(unknown, key=lambda name: len(unknown[name]))
    if len(unknown[nearest]) == len(own):
        return ""
    if not unknown[nearest]:
        return (
            f" By its fields it is {nearest}: if it computes the same, write that model_type into "
            "a copy of the file."
        )
    return (
        f" By its fields it is nearest to {nearest}, which does not take "
        f"{format_choices(unknown[nearest])}. Where these change nothing, write that model_type "
        "into a copy of the file without them."
    )


def _list_unknown_keys(values: dict[str, Any], name: str) -> list[str]:
    """Return the keys of a file with a value that a model type does not have."""
    family = FAMILIES[name]
    fields = ConfigJsonReader(values | {"architectures": [family.architecture]}, family.defaults)
    try:
        family.read(fields)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return [key for key, value in values.items() if value is not None]
    wrong = {problem.key for problem in (*fields.problems, *fields.find_unknown_keys())}
    return [key for key, value in values.items() if value is not None and key in wrong]

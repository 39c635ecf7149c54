"""The JSON schema of configs for editors: completion, descriptions and validation.

The schema accepts more than a resolved config holds, because a config file can be partial.
"""

from typing import Any

from llmsys.config.run import RunConfig

_BASE = {
    "description": (
        "Name or path of a YAML file whose mapping is loaded first, under this one; or "
        "a list of them."
    ),
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def build_json_schema() -> dict[str, Any]:
    """Return the schema of a run's YAML file.

    Returns:
        A JSON schema, draft 2020-12; `#/$defs/ModelConfig` is the schema of a bare model file.
    """
    schema: dict[str, Any] = _relax_schema(RunConfig.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _relax_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_relax_schema(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    # A `base:` can provide any key, so none is required.
    relaxed = {
        key: _relax_schema(value)
        for key, value in node.items()
        if key not in ("required", "discriminator", "default")
    }
    if "default" in node:
        relaxed["default"] = node["default"]
    if "oneOf" in relaxed:  # without required keys, a section can match several members of a union
        relaxed["anyOf"] = relaxed.pop("oneOf")
    if node.get("type") == "object" and "properties" in node:
        relaxed["properties"] = {**relaxed["properties"], "base": _BASE}
    if node.get("type") == "integer":
        # JSON has no underscores in numbers: 1_000 is a string to editors.
        relaxed |= {"type": ["integer", "string"], "pattern": "^[-+]?[0-9][0-9_]*$"}
    return relaxed

"""The JSON schema for editors: completion, descriptions and red lines while a config is being written.

It describes what a person may write, which is more than what a resolved config holds: keys can come from a `base:`, so
none is required, and numbers may carry underscores, which JSON knows only as text.
"""

from typing import Any

from llmsys.config.run import RunConfig

_BASE = {
    "description": "Name or path of a YAML file whose mapping is loaded first, under this one; or a list of them.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def build_json_schema() -> dict[str, Any]:
    """The schema of a run's YAML file; `#/$defs/ModelConfig` is that of a bare model file."""
    schema: dict[str, Any] = _relax_schema(RunConfig.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _relax_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_relax_schema(one) for one in node]
    if not isinstance(node, dict):
        return node
    opened = {
        key: _relax_schema(value) for key, value in node.items() if key not in ("required", "discriminator", "default")
    }
    if "default" in node:
        opened["default"] = node["default"]
    if "oneOf" in opened:
        opened["anyOf"] = opened.pop("oneOf")
    if node.get("type") == "object" and "properties" in node:
        opened["properties"] = {**opened["properties"], "base": _BASE}
    if node.get("type") == "integer":
        opened |= {"type": ["integer", "string"], "pattern": "^[-+]?[0-9][0-9_]*$"}
    return opened

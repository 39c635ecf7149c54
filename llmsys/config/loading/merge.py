"""Merge layers of config values: a `base:` below its file, and command-line overrides on top.

Reads: YAML files, config.json of Hugging Face models, and manifest.json of datasets.

Invariants:
- Mappings merge; lists and scalars replace.
- A union whose kind changes replaces the mapping below it.
- Each value keeps its origin: file and line, or command line.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.loading.config_files import find_config_file, pop_format_version
from llmsys.config.loading.yaml_files import MAX_DEPTH, Keys, format_path, parse_yaml
from llmsys.errors import ConfigError
from llmsys.storage.stored_formats import MANIFEST, VERSION_KEY, require_version

# What a config file may hold instead of a mapping.
_NAMES = {str: "text", list: "a list", bool: "true or false", int: "a number", float: "a number"}

# Return the default kind of the union at a key path; None where there is no union.
DefaultKind = Callable[[Keys], str | None]


@dataclass(frozen=True)
class ConfigLayer:
    """Plain values, and by key path the origin of each (`configs/train/demo.yaml:12` or `command
    line`).
    """

    values: Any
    origins: dict[Keys, str]

    def find_origin(self, keys: Keys) -> str | None:
        """Return the origin of the value at `keys`, else of a value inside it, else of the
        closest parent.
        """
        if keys not in self.origins:
            for inside, where in self.origins.items():
                if keys and inside[: len(keys)] == keys:
                    return where
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.origins:
                return self.origins[keys[:length]]
        return self.origins.get(())


def read_layer(
    path: Path, at: Keys, chain: tuple[Path, ...], default_kind: DefaultKind
) -> ConfigLayer:
    """Return the values of a file and of its bases.

    Args:
        path: a YAML file, a config.json, which is a model, or the manifest.json of a dataset.
        at: key path of the mapping that the values belong to.
        chain: files whose bases led here; one of them again is a cycle.
        default_kind: default kinds of unions.

    Raises:
        ConfigError: for an unreadable file, a value that is not a mapping, or a cycle of bases.
    """
    name = format_path(path)
    if path in chain:
        loop = " → ".join(format_path(file) for file in (*chain, path))
        raise ConfigError(f"base: forms a cycle: {loop}. Remove one of these lines.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name} cannot be read: {error}. Give a readable UTF-8 text file."
        ) from error
    if path.name == "manifest.json":
        return _read_manifest(text, path, at)
    if path.suffix == ".json":  # configs of this project are YAML
        return _read_config_json(text, name, at)
    values, lines = parse_yaml(text, name)
    if values is None:
        raise ConfigError(f"{name} is empty. Write at least one section, or `base:` and a name.")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} holds {_NAMES.get(type(values), 'a value')}, not a mapping. Write `section:` "
            "and keys below it."
        )
    if not at:
        values = pop_format_version(values, path)
    origins = {
        (*at, *keys): f"{name}:{line}"
        for keys, line in lines.items()
        if keys and keys[0] != VERSION_KEY
    }
    layer = ConfigLayer(values, {at: name, **origins})
    return resolve_bases(layer, at, path.parent, (*chain, path), default_kind)


def _read_config_json(text: str, name: str, at: Keys) -> ConfigLayer:
    if at not in ((), ("model",)):
        raise ConfigError(
            f"{name} is a model, but {'.'.join(at)} is not a model section. Write it as `model: "
            f"{{base: {name}}}`."
        )
    # Most runs read no config.json, and these are eleven files.
    from llmsys.hugging_face.read_config_json import parse_json, read_model_values

    values = read_model_values(parse_json(text, name), name)
    return ConfigLayer(values, {at: name} | {(*at, key): name for key in values})


def _read_manifest(text: str, path: Path, at: Keys) -> ConfigLayer:
    """Return the sections `data` and `tokenizer` that a dataset was prepared with, or its `data`
    alone as that section.

    The folder is the one of the manifest, which records none: the same settings give the same bytes
    anywhere.
    """
    name = format_path(path)
    try:
        manifest = json.loads(text)
        stored = manifest["config"]
        data = stored["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{name} is not the manifest of a dataset. Give a YAML file, or a folder that llmsys "
            "prepare wrote."
        ) from None
    require_version(MANIFEST, manifest, name)
    values = stored | {"data": data | {"folder": format_path(path.parent)}}
    if at == ("data",):
        values = values["data"]
    elif at:
        raise ConfigError(
            f"{name} is a dataset, but {'.'.join(at)} is not. Write it as `base:` of the file or "
            "of `data:`."
        )
    return ConfigLayer(values, {at: name} | {(*at, key): name for key in values})


def resolve_bases(
    layer: ConfigLayer, at: Keys, folder: Path, chain: tuple[Path, ...], default_kind: DefaultKind
) -> ConfigLayer:
    """Return a layer with each `base:` replaced by the values it names, merged below the keys
    next to it.
    """
    values, origins = layer.values, layer.origins
    if isinstance(values, list):
        values = {str(i): value for i, value in enumerate(values)}
        resolved = resolve_bases(ConfigLayer(values, origins), at, folder, chain, default_kind)
        return ConfigLayer(list(resolved.values.values()), resolved.origins)
    if not isinstance(values, dict):
        return layer
    result = ConfigLayer({}, {})
    for name in _list_base_names(values.get("base"), layer, at):
        origin = layer.find_origin((*at, "base")) or ""
        below = read_layer(find_config_file(name, folder, origin), at, chain, default_kind)
        if at and isinstance(below.values.get(at[-1]), dict):
            raise ConfigError(
                f"{origin}: base: {name} has a section {at[0]}, so it is a whole run and not a "
                f"{at[-1]}. Write base: {name} at the top of the file, or name a file of that "
                "section alone."
            )
        result = merge_layers(result, below, at, default_kind)
    own: dict[str, Any] = {}
    for key, value in values.items():
        if key == "base":
            continue
        child = resolve_bases(ConfigLayer(value, origins), (*at, key), folder, chain, default_kind)
        own[key], origins = child.values, child.origins
    origins = {
        keys: where for keys, where in origins.items() if keys[: len(at) + 1] != (*at, "base")
    }
    return merge_layers(result, ConfigLayer(own, origins), at, default_kind)


def merge_layers(
    below: ConfigLayer, above: ConfigLayer, at: Keys, default_kind: DefaultKind
) -> ConfigLayer:
    """Return `above` merged over `below`, both values at the key path `at`."""
    origins = dict(below.origins)
    values = _merge_values(below.values, above.values, at, default_kind, origins)
    return ConfigLayer(values, {**origins, **above.origins})


def _merge_values(
    below: Any, above: Any, at: Keys, default_kind: DefaultKind, origins: dict[Keys, str]
) -> Any:
    if (
        isinstance(below, list)
        and isinstance(above, dict)
        and above
        and all(key.isdigit() for key in above)
    ):
        return _merge_list(below, above, at, default_kind, origins)
    # The fields of one kind have no meaning in another.
    if not (isinstance(below, dict) and isinstance(above, dict)) or _has_kind_changed(
        below, above, at, default_kind
    ):
        for keys in [keys for keys in origins if keys[: len(at)] == at]:
            del origins[keys]
        return above
    result = dict(below)
    for key, value in above.items():
        here = (*at, key)
        result[key] = (
            _merge_values(below[key], value, here, default_kind, origins) if key in below else value
        )
    return result


def _merge_list(
    below: list[Any],
    above: dict[str, Any],
    at: Keys,
    default_kind: DefaultKind,
    origins: dict[Keys, str],
) -> list[Any]:
    result = list(below)
    for key, value in above.items():
        if int(key) >= len(below):
            raise ConfigError(
                f"{'.'.join((*at, key))}: the list has {len(below)} entries, counted from 0. "
                f"Use 0 to {len(below) - 1}, or give the whole list."
            )
        result[int(key)] = _merge_values(below[int(key)], value, (*at, key), default_kind, origins)
    return result


def _has_kind_changed(
    below: dict[str, Any], above: dict[str, Any], at: Keys, default_kind: DefaultKind
) -> bool:
    if "kind" not in above or not below:
        return False
    return bool(above["kind"] != below.get("kind", default_kind(at) or above["kind"]))


def _list_base_names(base: object, layer: ConfigLayer, at: Keys) -> Sequence[str]:
    names: list[Any] = base if isinstance(base, list) else [] if base is None else [base]
    for name in names:
        if not isinstance(name, str) or not name:
            where = layer.find_origin((*at, "base"))
            raise ConfigError(
                f"{where}: base: {name!r} is not a name or path of a config. Write, say, base: "
                "model/demo-moe."
            )
    return names


COMMAND_LINE = "command line"


def read_overrides(overrides: Sequence[str]) -> ConfigLayer:
    """Return the layer of command-line overrides.

    Args:
        overrides: `section.key=value` arguments; later ones win. Values are YAML:
            `optimizer.learning_rate=3e-4`, `data.inputs=[a.warc.gz, b.warc.gz]`, `model.moe=null`.
            List entries are counted from 0: `data.rules.0.kind=c4`.

    Returns:
        Values with the origin `command line`.

    Raises:
        ConfigError: with all malformed arguments.
    """
    values: dict[str, Any] = {}
    origins: dict[Keys, str] = {}
    errors = []
    for override in overrides:
        try:
            _apply_override(override, values, origins)
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return ConfigLayer(values, origins)


def _apply_override(override: str, values: dict[str, Any], origins: dict[Keys, str]) -> None:
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        key, _, value = override.partition(":")
        meant = f"{key}={value}" if value and "." in key else "batch.sequence_length=1024"
        raise ConfigError(f"{override!r} is not section.key=value. Write, say, {meant}.")
    if len(keys) > MAX_DEPTH:
        raise ConfigError(
            f"{override[:40]!r}… names a key {len(keys):,} levels deep; the limit is {MAX_DEPTH}. "
            "Write, say, batch.sequence_length=1024."
        )
    value, _ = parse_yaml(text, f"command line, {path}")
    target: Any = values
    for key in keys[:-1]:
        target = _get_or_create_child(target, key)
    if isinstance(target, list) and _require_list_index(keys[-1], target):
        target[int(keys[-1])] = value
    else:
        target[keys[-1]] = value
    origins[keys] = COMMAND_LINE


def _get_or_create_child(target: Any, key: str) -> Any:
    """Return the mapping or list at `key`; a new mapping when no earlier override has written
    one.
    """
    if isinstance(target, list):
        return target[int(key)] if _require_list_index(key, target) else {}
    if not isinstance(target.get(key), dict | list):
        target[key] = {}
    return target[key]


def _require_list_index(key: str, entries: list[Any]) -> bool:
    if key.isdigit() and int(key) < len(entries):
        return True
    raise ConfigError(
        f"{key!r} is not an entry of a list of {len(entries)}. Use 0 to {len(entries) - 1}."
    )

"""Load a RunConfig or ModelConfig from a config name and command-line overrides.

Reads: YAML files, config.json of Hugging Face models, and the folders of runs and datasets.

Invariants:
- All errors of a config are reported at once, with file, line and key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.loading.config_files import find_config_file, is_run_config
from llmsys.config.loading.merge import (
    ConfigLayer,
    merge_layers,
    read_layer,
    read_overrides,
    resolve_bases,
)
from llmsys.config.loading.validation_errors import build_config_error, build_violation_error
from llmsys.config.loading.yaml_files import Keys, format_path
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.config.section import fill_default_kinds, find_default_kind
from llmsys.errors import ConfigError, Violation


@dataclass(frozen=True)
class LoadedConfig:
    """A loaded config with the origin of each value.

    For a bare model file, `run` has that model and the defaults of all other sections.
    """

    run: RunConfig
    is_model_only: bool
    origins: dict[Keys, str]
    source: Path


def load_run_config(
    config: str, overrides: Sequence[str] = (), variants: Sequence[str] = ()
) -> RunConfig:
    """Return the config of a run.

    Args:
        config: a path, a name such as `train/demo`, or the folder of a run or a dataset.
        overrides: `section.key=value` arguments; later ones win.
        variants: paths or names of files that are merged over the config, below the overrides.

    Returns:
        A validated config.

    Raises:
        ConfigError: with every error of the config, or for a bare model file.
    """
    return require_run(read_config(config, overrides, variants), config)


def require_run(loaded: LoadedConfig, config: str) -> RunConfig:
    """Return the run of a loaded config.

    Args:
        loaded: result of `read_config`.
        config: the path or name that was given, for the message.

    Returns:
        The config.

    Raises:
        ConfigError: for a bare model file.
    """
    if loaded.is_model_only:
        raise ConfigError(
            f"{format_path(loaded.source)} is a bare model, but a run config is needed. Write a "
            f"file with `model: {{base: {config}}}`, or let llmsys init {config} write one."
        )
    return loaded.run


def load_model_config(config: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """Return the model of a config.

    Args:
        config: a path or name of a bare model file, or of a run with a `model:` section.
        overrides: `section.key=value` arguments; later ones win.

    Returns:
        A validated model configuration.

    Raises:
        ConfigError: with every error of the config.
    """
    return read_config(config, overrides).run.model


def read_config(
    config: str, overrides: Sequence[str] = (), variants: Sequence[str] = ()
) -> LoadedConfig:
    """Return a config with the origin of each value.

    Args:
        config: a path or name of a run config, a bare model file or a config.json, or the folder of
            a model, a run or a dataset.
        overrides: `section.key=value` arguments; later ones win. For a bare model the prefix
            `model.` is optional.
        variants: paths or names of files that are merged over the config, below the overrides.

    Returns:
        A validated config.

    Raises:
        ConfigError: with every error of the config.
    """
    path = find_config_file(config, Path.cwd())
    layer = read_layer(path, (), (), _get_default_kind)
    above = read_overrides(overrides)
    if path.name == "config.yaml" and Path(config).is_dir():
        layer = _move_run(layer, Path(config))
    elif is_run_config(path):
        layer = _move_run(layer, Path(config).parent)
    model_only = _is_bare_model(layer.values)
    for variant in variants:
        over = read_layer(find_config_file(variant, Path.cwd()), (), (), _get_default_kind)
        layer = merge_layers(layer, over, (), _get_default_kind)
    if model_only:
        layer = _nest_layer("model", layer)
        above = _move_model_keys(above)
    above = resolve_bases(above, (), Path.cwd(), (), _get_default_kind)
    layer = merge_layers(layer, above, (), _get_default_kind)
    # pydantic asks every union for its tag, and a file may leave the default out
    values = fill_default_kinds(layer.values, [RunConfig])
    if model_only:
        values = _cap_sequence_length(values)
    layer = ConfigLayer(values, layer.origins)
    try:
        run = RunConfig.model_validate(layer.values)
    except ValidationError as error:
        raise build_config_error(error, RunConfig, layer, format_path(path)) from None
    if run.train.must_export:
        _require_export(run, layer, path)
    return LoadedConfig(run, model_only, layer.origins, path)


def _require_export(run: RunConfig, layer: ConfigLayer, path: Path) -> None:
    """Raise ConfigError for a model that `llmsys convert` could not write."""
    # Most runs read no families of Hugging Face, and these are eleven files.
    from llmsys.config.export.exported_model import build_export_promise

    promise = build_export_promise(run)
    if promise.model_type is None:
        message = (
            f"true, and the model {promise.line}. Set these fields so, or train.must_export=false."
        )
        raise build_violation_error(
            Violation("train.must_export", message), layer, format_path(path)
        )


def _move_run(layer: ConfigLayer, folder: Path) -> ConfigLayer:
    """Return the config of a run folder with `run.folder` naming it: the folder may have been
    moved or copied.
    """
    run = layer.values.get("run")
    run = run if isinstance(run, dict) else {}
    if (
        isinstance(recorded := run.get("folder"), str)
        and Path(recorded).resolve() == folder.resolve()
    ):
        return layer
    values = layer.values | {"run": run | {"folder": str(folder)}}
    return ConfigLayer(values, layer.origins | {("run", "folder"): format_path(folder)})


def _get_default_kind(keys: Keys) -> str | None:
    in_model = bool(keys) and keys[0] in ModelConfig.model_fields
    return find_default_kind(ModelConfig if in_model else RunConfig, keys)


def _is_bare_model(values: dict[str, Any]) -> bool:
    return not values.keys() & RunConfig.model_fields.keys() and bool(
        values.keys() & ModelConfig.model_fields.keys()
    )


def _nest_layer(section: str, layer: ConfigLayer) -> ConfigLayer:
    return ConfigLayer(
        {section: layer.values}, {(section, *keys): where for keys, where in layer.origins.items()}
    )


def _move_model_keys(above: ConfigLayer) -> ConfigLayer:
    values = dict(above.values)
    model = {key: values.pop(key) for key in list(values) if key in ModelConfig.model_fields}
    if not model:
        return above
    origins = {
        (("model", *keys) if keys[0] in model else keys): where
        for keys, where in above.origins.items()
    }
    given = values.get("model", {})
    return ConfigLayer(
        {**values, "model": {**given, **model} if isinstance(given, dict) else given}, origins
    )


def _cap_sequence_length(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the default sequence length capped at the longest sequence of a bare
    model.
    """
    longest = (
        values["model"].get("max_position_embeddings")
        if isinstance(values["model"], dict)
        else None
    )
    default = BatchConfig.model_fields["sequence_length"].default
    batch = values.get("batch", {})
    if (
        isinstance(longest, int)
        and 0 < longest < default
        and isinstance(batch, dict)
        and "sequence_length" not in batch
    ):
        values = {**values, "batch": {**batch, "sequence_length": longest}}
    return values


def parse_batch(overrides: Sequence[str], source: str) -> BatchConfig:
    """Return a batch from command-line overrides alone, which may set no other section.

    Args:
        overrides: `batch.key=value` arguments.
        source: name of the command in error messages.

    Returns:
        The batch, with the defaults of a run.

    Raises:
        ConfigError: with every wrong override.
    """
    layer = read_overrides(overrides)
    if others := sorted({str(key) for key in layer.values} - {"batch"}):
        raise ConfigError(
            f"{source}: {others[0]}: only batch.… can be set here. Leave {others[0]} out."
        )
    values = layer.values.get("batch", {})
    try:
        return BatchConfig.model_validate(values)
    except ValidationError as error:
        raise build_config_error(
            error, BatchConfig, ConfigLayer(values, layer.origins), source
        ) from None


def build_model_config(values: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the model of a parsed config.json.

    Args:
        values: keys and values of Hugging Face's config.json.
        source: name of the file in error messages.

    Returns:
        A validated model configuration.

    Raises:
        ConfigError: with every key that is unknown, malformed or not supported.
    """
    # Most runs read no config.json, and these are eleven files.
    from llmsys.hugging_face.read_config_json import read_model_values

    read = read_model_values(values, source)
    try:
        return ModelConfig.model_validate(read)
    except ValidationError as error:
        raise build_config_error(
            error, ModelConfig, ConfigLayer(read, {(): source}), source
        ) from None

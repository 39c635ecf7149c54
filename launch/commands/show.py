"""Run `llmsys show`: print the resolved config, what differs from the defaults, or the schema for editors."""

import argparse
import json

from llmsys.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --schema, which prints the JSON schema of a run's YAML file instead of a config."""
    parser.add_argument("--schema", action="store_true", help="print the JSON schema for editors; needs no CONFIG")


def run(arguments: argparse.Namespace) -> int:
    """Print YAML that loads back to the same config; with --json, {config, differences}."""
    if arguments.schema:
        from llmsys.config.json_schema import build_json_schema

        print(json.dumps(build_json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.config is None:
        raise ConfigError("No config was given. Give a CONFIG such as train/demo, or --schema.")
    from llmsys.config.format_yaml import find_differences, format_annotated_yaml
    from llmsys.config.load import read_config

    resolved = read_config(arguments.config, arguments.overrides)
    config = resolved.run.model if resolved.is_model_only else resolved.run
    origins = resolved.origins
    if resolved.is_model_only:
        origins = {keys[1:]: where for keys, where in origins.items() if keys[:1] == ("model",)}
    if arguments.json:
        changed = {
            one.key: {"value": one.value, "default": one.default, "origin": one.origin}
            for one in find_differences(config, origins)
        }
        print(json.dumps({"config": config.model_dump(mode="json"), "differences": changed}, ensure_ascii=False))
    else:
        print(format_annotated_yaml(config, origins), end="")
    return 0

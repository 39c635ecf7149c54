"""Run `llmsys show`: print the resolved config, what differs from the defaults, its kernels, or
the schema.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import split_arguments

if TYPE_CHECKING:
    from llmsys.config.attention_device import AttentionDevice
    from llmsys.config.loading.load import LoadedConfig
    from llmsys.config.run import RunConfig
    from llmsys.kernels.attention_layers import AttentionGroup

# Devices that need no profile.
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --schema and --kernels, which print something else than the config. device= is given
    among the overrides.
    """
    parser.epilog = (
        f"device=NAME (with --kernels) is cpu, {', '.join(CAPABILITIES)} or a device profile such "
        f"as h100-sxm; left out: the first four.\n{parser.epilog}"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema for editors; needs no CONFIG"
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="print the attention kernel of each layer on a device, why, and its cost",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print YAML that loads back to the same config, and how a pipeline is cut; with --json, the
    same as one object.
    """
    if arguments.schema:
        from llmsys.config.loading.json_schema import build_json_schema

        print(json.dumps(build_json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.config is None:
        raise ConfigError("No config was given. Give a CONFIG such as train/demo, or --schema.")
    from llmsys.config.loading.load import read_config

    if arguments.kernels:
        own, words = split_arguments(arguments.overrides, ("device",))
        _print_kernels(
            read_config(arguments.config, words), own.get("device"), as_json=arguments.json
        )
        return 0
    _print_config(read_config(arguments.config, arguments.overrides), as_json=arguments.json)
    return 0


def _print_config(resolved: "LoadedConfig", *, as_json: bool) -> None:
    from llmsys.config.export.exported_model import build_export_promise
    from llmsys.config.loading.format_yaml import find_differences, format_annotated_yaml

    config = resolved.run.model if resolved.is_model_only else resolved.run
    origins = resolved.origins
    if resolved.is_model_only:
        origins = {keys[1:]: where for keys, where in origins.items() if keys[:1] == ("model",)}
    stages = list(_iter_stages(resolved.run))
    promise = build_export_promise(resolved.run)
    if as_json:
        changed = {
            one.key: {"value": one.value, "default": one.default, "origin": one.origin}
            for one in find_differences(config, origins)
        }
        export = {"model_type": promise.model_type, "line": promise.line}
        shown = {
            "config": config.model_dump(mode="json"),
            "differences": changed,
            "export": export,
        }
        print(json.dumps(shown | ({"stages": stages} if stages else {}), ensure_ascii=False))
    else:
        print(format_annotated_yaml(config, origins), end="")
        print(f"# {promise.line}")
        for number, stage in enumerate(stages):
            print(
                f"# stage {number} on pipeline rank {stage['rank']}: "
                f"{_format_layers(stage['layers'])}, {stage['operations']:.1%} of the operations, "
                f"{stage['parameters']:,} parameters"
            )


def _iter_stages(config: "RunConfig") -> Iterator[dict[str, Any]]:
    """Yield the stages of a pipeline; nothing without one."""
    if config.layout.pipeline == 1:
        return
    from llmsys.estimate.pipeline_stages import LayerCosts, cut_layers

    costs = LayerCosts(config.model, config.batch.sequence_length)
    cut = cut_layers(config.model, config.layout, config.batch.sequence_length)
    for number, layers in enumerate(cut.stages):
        yield {
            "rank": number % cut.ranks,
            "layers": list(layers),
            "operations": sum(costs.operations[layer] for layer in layers) / sum(costs.operations),
            "parameters": sum(costs.parameters[layer] for layer in layers),
        }


def _print_kernels(resolved: "LoadedConfig", name: str | None, *, as_json: bool) -> None:
    from llmsys.kernels.attention_layers import list_attention_groups

    devices = [_resolve_device(one) for one in (["cpu", *CAPABILITIES] if name is None else [name])]
    groups = {str(device): list_attention_groups(resolved.run, device) for device in devices}
    if as_json:
        print(
            json.dumps(
                {
                    "kernels": {
                        device: [_to_dict(one) for one in found] for device, found in groups.items()
                    }
                }
            )
        )
        return
    for device, found in groups.items():
        if not found:
            print(f"{device}, training: no layer has a kernel to choose")
            continue
        traits = found[0].traits
        print(f"{device}, {traits.dtype}, sequences of {traits.length} tokens, training")
        if device == "cpu" and resolved.run.train.precision == "auto":
            print(
                "  (train.precision=auto is fp32 on processors without native bf16: see "
                "train.precision=fp32)"
            )
        for group in found:
            print("\n".join(f"  {line}" for line in _iter_group_lines(group)))


def _resolve_device(name: str) -> "AttentionDevice":
    """Return the device of a name; raise ConfigError where no kernel is known for it."""
    from llmsys.config.attention_device import AttentionDevice

    if name == "cpu":
        return AttentionDevice("cpu")
    if name in CAPABILITIES:
        return AttentionDevice("cuda", CAPABILITIES[name])
    from llmsys.estimate.device_profile import load_device_profile

    profile = load_device_profile(name)
    if profile.compute_capability is None:
        raise ConfigError(
            f"The profile of {profile.name} has no compute_capability, and attention kernels are "
            f"known for CPUs and CUDA devices. Use cpu, {', '.join(CAPABILITIES)}, or give "
            "compute_capability in the profile."
        )
    return AttentionDevice("cuda", profile.compute_capability)


def _to_dict(group: "AttentionGroup") -> dict[str, Any]:
    return {
        "stack": group.stack,
        "attention": group.attention,
        "layers": list(group.layers),
        **asdict(group.choice),
        "traits": asdict(group.traits),
    }


def _iter_group_lines(group: "AttentionGroup") -> Iterator[str]:
    choice = group.choice
    instead = f", not {choice.preferred}" if choice.preferred else ""
    yield (
        f"{group.stack} {_format_layers(group.layers)}, {group.attention}: {choice.kernel}{instead}"
    )
    yield f"  {choice.reason}"
    if choice.cost:
        yield f"  cost: {choice.cost}"


def _format_layers(layers: Sequence[int]) -> str:
    """Return layers as runs, such as `layers 0-2, 4`."""
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ]
    return "layers " + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )

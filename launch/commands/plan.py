"""Run `llmsys plan`: list the layouts that fit a cluster, fastest first, or check a given one."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.commands.arguments import split_arguments
from llmsys.errors import ConfigError
from llmsys.local_files import parse_local_path, require_local_path, write_bytes_atomically

if TYPE_CHECKING:
    from llmsys.config.load import LoadedConfig

OWN_NAMES = ("gpus", "device", "cluster")
ILLEGAL, TOO_LARGE = 2, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --check and the output. gpus=, device= and cluster= are given among the overrides."""
    parser.epilog = (
        f"gpus=N device=NAME describe the cluster, or cluster=FILE with prices and failure rates.\n{parser.epilog}"
    )
    parser.add_argument("--check", metavar="LAYOUT", help="check one layout, such as tp=8,cp=1,pp=16,dp=64")
    parser.add_argument("--html", type=parse_local_path, metavar="FILE", help="write a page with the Pareto front")
    parser.add_argument("--top", type=int, default=5, help="number of layouts to print (default: 5)")
    parser.add_argument("--output", type=parse_local_path, help="write a config with the fastest layout")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0. With --check: 0 when the layout fits, 1 when it does not, 2 when it is illegal."""
    from llmsys.config.load import read_config

    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    resolved = read_config(arguments.config, words)
    if arguments.check is not None:
        return _print_layout_check(arguments, resolved, own)
    from llmsys.estimate.device_profile import load_device_profile
    from llmsys.estimate.plan.layout_candidate import PlanTarget
    from llmsys.estimate.plan.layout_search import search_layouts
    from llmsys.estimate.plan.layout_table import format_plan, plan_to_dict

    cluster = _resolve_cluster(own)
    device = load_device_profile(cluster.device)
    found = search_layouts(resolved.run, PlanTarget(cluster, device))
    data = plan_to_dict(found, device, max(1, arguments.top))
    data["launch"] = _format_launch_command(data["best"][0], cluster.devices, device.node_devices, arguments.output)
    if arguments.output is not None:
        write_bytes_atomically(
            arguments.output, _format_chosen_config(arguments.config, resolved, words, data).encode()
        )
        data["config"] = str(arguments.output)
    data["dryrun"] = _format_dry_run_command(arguments, words, data["best"], cluster, device.node_devices)
    if arguments.html is not None:
        from llmsys.report.plan_page import write_plan_page

        data["page"] = str(write_plan_page(data, arguments.config, arguments.html))
    if arguments.json:
        print(json.dumps(data))
    else:
        offer = f"\ntry one rank of the fastest torch layout without a GPU: {data['dryrun']}" if data["dryrun"] else ""
        print(f"{format_plan(data)}\n\nstart it: {data['launch']}{offer}")
    return 0


def _resolve_cluster(own: dict[str, str]) -> Any:
    from llmsys.estimate.cluster_costs import ClusterCosts, load_cluster_costs

    cluster = load_cluster_costs(require_local_path(own["cluster"], "cluster")) if "cluster" in own else ClusterCosts()
    if "cluster" not in own and "gpus" not in own:
        raise ConfigError("A plan needs a cluster. Give gpus=64 device=h100-sxm, or cluster=FILE.")
    gpus = own.get("gpus", str(cluster.devices))
    if not gpus.isdigit() or int(gpus) < 1:
        raise ConfigError(f"gpus={gpus} is not a number of devices. Use 1 or more.")
    return cluster.model_copy(update={"devices": int(gpus), "device": own.get("device", cluster.device)})


def _format_launch_command(best: dict[str, Any], devices: int, node_devices: int, output: Path | None) -> str:
    """Return the command that starts the best layout; the user replaces HOST and HOSTFILE."""
    config = output or "CONFIG"
    if devices <= node_devices:
        return f"llmsys train {config} launch.processes={devices}"
    nodes = -(-devices // node_devices)
    if best["engine"]["kind"] == "deepspeed":
        return f"deepspeed --hostfile HOSTFILE --module launch.train {config}"
    return (
        f"torchrun --nnodes={nodes} --nproc-per-node={node_devices} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
        f"-m launch.train {config}"
    )


def _format_dry_run_command(
    arguments: argparse.Namespace, words: list[str], best: list[dict[str, Any]], cluster: Any, node_devices: int
) -> str:
    """Return the command that runs one rank of the fastest layout of the torch engine; empty where none is listed."""
    fastest = next((one for one in best if one["engine"]["kind"] == "torch"), None)
    if fastest is None:
        return ""
    from llmsys.dryrun.dry_run_request import format_dry_run_command

    devices = min(cluster.devices, node_devices)
    nodes = -(-cluster.devices // node_devices)
    if arguments.output is not None and fastest is best[0]:
        return format_dry_run_command(str(arguments.output), (), nodes, devices, cluster.device)
    chosen = {
        "batch.micro_sequences": fastest["micro_sequences"],
        "train.activation_checkpoint": fastest["recompute"],
    }
    for section in ("engine", "layout"):
        chosen |= {f"{section}.{key}": value for key, value in fastest[section].items()}
    overrides = [*words, *(f"{key}={value}" for key, value in chosen.items() if value is not None)]
    return format_dry_run_command(arguments.config, overrides, nodes, devices, cluster.device)


def _format_chosen_config(asked: str, resolved: "LoadedConfig", words: list[str], data: dict[str, Any]) -> str:
    """Return a sparse config based on the one that was given."""
    from llmsys.config.yaml_files import dump_yaml

    best = data["best"][0]
    # a name under configs/ is found from anywhere, a relative path is not
    base = str(resolved.source) if Path(asked).exists() else asked
    values: dict[str, Any] = {"model": {"base": base}} if resolved.is_model_only else {"base": base}
    _merge_values(values, _collect_overrides(resolved, words))
    _merge_values(
        values,
        {
            "engine": best["engine"],
            "layout": best["layout"],
            "batch": {"micro_sequences": best["micro_sequences"]},
            "train": {"activation_checkpoint": best["recompute"]},
        },
    )
    seconds = best["step_seconds"]
    head = (
        f"# Chosen by llmsys plan for {data['device']}: {best['choice']}\n"
        f"# Expected: {seconds['p50']:.3g} s per step ({seconds['p10']:.3g} to {seconds['p90']:.3g}), "
        f"{best['peak_bytes'] / 2**30:.1f} GiB at most, {best['peak_instant']}\n"
    )
    return head + dump_yaml(values)


def _collect_overrides(resolved: "LoadedConfig", words: list[str]) -> dict[str, Any]:
    """Return the overrides of the command line. Those of a bare model may have left out `model.`."""
    from llmsys.config.merge import read_overrides

    values: dict[str, Any] = read_overrides(words).values
    if not resolved.is_model_only:
        return values
    sections = type(resolved.run).model_fields
    model = {key: value for key, value in values.items() if key not in sections}
    rest = {key: value for key, value in values.items() if key in sections}
    return rest | ({"model": rest.get("model", {}) | model} if model else {})


def _merge_values(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge_values(into[key], value)
        else:
            into[key] = value


def _print_layout_check(arguments: argparse.Namespace, resolved: "LoadedConfig", own: dict[str, str]) -> int:
    from llmsys.estimate.plan.layout_check import (
        estimate_layout_fit,
        find_layout_violations,
        iter_remarks,
        parse_layout,
    )

    named = parse_layout(arguments.check)
    devices = _resolve_cluster(own).devices if own.keys() & {"gpus", "cluster"} else None
    with_batch = "batch" in resolved.run.model_fields_set
    problems = list(find_layout_violations(resolved.run, named, devices, with_batch=with_batch))
    data: dict[str, Any] = {"legal": not problems, "devices": named.num_devices, "problems": problems}
    data["remarks"] = list(iter_remarks(resolved.run, named))
    if not problems and own:
        data |= estimate_layout_fit(resolved.run, named, _resolve_cluster(own | {"gpus": str(named.num_devices)}))
    if arguments.json:
        print(json.dumps(data))
    else:
        print(f"{'legal' if data['legal'] else 'illegal'}: {arguments.check} on {devices or named.num_devices} devices")
        for line in (*problems, *data["remarks"], *filter(None, [data.get("memory"), data.get("time")])):
            print(f"  {line}")
    return ILLEGAL if problems else TOO_LARGE if data.get("fits") is False else 0

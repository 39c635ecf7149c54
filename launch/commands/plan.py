"""Run `llmsys plan`: list the layouts that fit a cluster, fastest first, or check a given one."""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import (
    parse_count,
    parse_probability,
    split_arguments,
)
from llmsys.launch.commands.estimate_request import (
    MAX_ASKED,
    add_my_machine_argument,
    choose_example_length,
    find_my_machine,
    has_batch,
    print_assumptions,
)
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import parse_local_path, require_local_path

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmsys.config.loading.load import LoadedConfig
    from llmsys.estimate.plan.json_output import (
        PlannedProgram,
        PlannedRun,
        PlanOutput,
        PricedLayout,
    )

OWN_NAMES = ("gpus", "device", "cluster", "program")
ILLEGAL, TOO_LARGE = 2, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --check and the output. gpus=, device= and cluster= are given among the overrides."""
    parser.epilog = (
        "gpus=N device=NAME describe the cluster, or cluster=FILE with prices, failure rates and "
        "network levels.\nprogram=NAME,NAME prices other programs too, each in its fastest "
        f"layout.\n{parser.epilog}"
    )
    parser.add_argument(
        "--check", metavar="LAYOUT", help="check one layout, such as tp=8,cp=1,pp=16,dp=64"
    )
    add_my_machine_argument(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="with --check: also the layout that a plan would choose",
    )
    parser.add_argument(
        "--html",
        type=parse_local_path,
        metavar="FILE",
        help="write a page: Pareto front, and memory, roofline and timeline of the best layout",
    )
    parser.add_argument(
        "--top", type=parse_count(1), default=5, help="number of layouts to print (default: 5)"
    )
    parser.add_argument(
        "--min-fit-probability",
        type=parse_probability,
        metavar="P",
        help="least probability that the fullest rank fits, such as 0.5 or 0.99: peaks are known "
        "to a few per cent (default: 0.9)",
    )
    parser.add_argument(
        "--output", type=parse_local_path, help="write a config with the fastest layout"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0. With --check: 0 when the layout fits, 1 when it does not, 2
    when it is illegal.
    """
    from llmsys.config.loading.load import read_config

    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    is_own_machine = arguments.my_machine and not own.keys() & {"device", "cluster"}
    if is_own_machine:
        device, count = find_my_machine()
        own = {"gpus": str(count), **own, "device": device}
    resolved = read_config(arguments.config, words)
    if arguments.check is not None:
        return _print_layout_check(arguments, resolved, own)
    cluster = _resolve_cluster(own)
    if is_own_machine:
        # nobody rents their own machine
        cluster = cluster.model_copy(update={"price_per_hour": 0.0})
    device = cluster.load_device()
    if not has_batch(resolved):
        raise ConfigError(_format_missing_batch(resolved, arguments, own))
    from llmsys.estimate.plan.layout_search import search_layouts
    from llmsys.estimate.plan.layout_table import (
        build_plan_output,
        build_priced_layout,
        format_plan,
    )

    programs = _list_programs(own)  # an unknown one is an error before the search
    place = _build_target(arguments, cluster)
    found = _search(resolved, place, search_layouts)
    best = [build_priced_layout(one, device) for one in found.ranked[: arguments.top]]
    data = build_plan_output(
        found,
        place,
        best,
        programs=[_describe_program(resolved, name, cluster) for name in programs],
        launch=_format_launch_command(
            arguments, words, best[0], cluster.devices, device.node_devices
        ),
        dryrun=_format_dry_run_command(arguments, words, best, cluster, device.node_devices),
    )
    if "tokens" in resolved.run.train.model_fields_set:
        run = _describe_run(found.ranked[0], device, cluster)
        data = data.model_copy(update={"run": run})
    if arguments.output is not None:
        write_bytes_atomically(
            arguments.output,
            _format_chosen_config(arguments.config, resolved, words, data).encode(),
        )
        data = data.model_copy(update={"config": str(arguments.output)})
    if arguments.html is not None:
        from llmsys.report.plan_page import write_plan_page

        page = write_plan_page(data, arguments.config, arguments.html, found.ranked[0], device)
        data = data.model_copy(update={"page": str(page)})
    if arguments.json:
        _print_json(data)
    else:
        offer = (
            f"\ntry one rank of the fastest torch layout without a GPU: {data.dryrun}"
            if data.dryrun
            else ""
        )
        print(f"{format_plan(data)}\n\nstart it: {data.launch}{offer}")
    return 0


def _build_target(arguments: argparse.Namespace, cluster: Any) -> Any:
    from llmsys.estimate.plan.layout_candidate import PlanTarget

    place = PlanTarget(cluster, cluster.load_device())
    least = arguments.min_fit_probability
    return place if least is None else replace(place, min_fit_probability=least)


def _print_json(output: "BaseModel") -> None:
    # a key that has a default is printed only where it was set
    print(json.dumps(output.model_dump(exclude_unset=True)))


def _format_missing_batch(
    resolved: "LoadedConfig", arguments: argparse.Namespace, own: dict[str, str]
) -> str:
    words = " ".join([arguments.config, *(f"{name}={value}" for name, value in own.items())])
    length = choose_example_length(resolved)
    example = f"llmsys plan {words} batch.sequence_length={length} batch.sequences=512"
    return (
        f"{arguments.config} is a bare model without a batch, and the fastest layout depends on "
        f"it. Give one, such as\n  {example}\nor, for hours and money, a number of tokens too:\n  "
        f"{example} train.tokens=1_000_000_000_000"
    )


def _search(resolved: "LoadedConfig", place: Any, search_layouts: Any) -> Any:
    """Return the plan; on a terminal, with a bar of the search."""
    from llmsys.progress import Progress

    if not sys.stderr.isatty():
        return search_layouts(resolved.run, place)
    with Progress("plan", total=1.0, unit="search") as progress:
        return search_layouts(
            resolved.run, place, lambda share: progress.advance(share - progress.done)
        )


def _list_programs(own: dict[str, str]) -> list[str]:
    names = [name for name in own.get("program", "").split(",") if name]
    if "program" in own and not names:
        raise ConfigError(
            "program= names no program. Give one, such as program=megatron, or leave it out."
        )
    for name in names:
        _load_program({"program": name})
    return names


def _describe_run(best: Any, device: Any, cluster: Any) -> "PlannedRun":
    """Return hours and money of the whole run in the fastest layout."""
    from llmsys.estimate.plan.json_output import PlannedRun
    from llmsys.estimate.run_cost import estimate_run_cost

    cost = estimate_run_cost(best.config, best.step, device, cluster)
    return PlannedRun(
        hours=cost.hours,
        accelerator_hours=cost.accelerator_hours,
        amount=cost.money,
        currency=cluster.currency,
        price_per_hour=cluster.price_per_hour,
    )


def _describe_program(resolved: "LoadedConfig", name: str, cluster: Any) -> "PlannedProgram":
    """Return the fastest layout of another program on the same devices."""
    from llmsys.estimate.plan.json_output import PlannedProgram
    from llmsys.estimate.plan.layout_table import collect_price
    from llmsys.estimate.program_search import plan_program_run

    device = cluster.load_device()
    options: dict[str, Any] = {"num_devices": cluster.devices, "expert_load": cluster.expert_load}
    run = plan_program_run(resolved.run, name, "auto", device=device, **options)
    price = collect_price(run.estimate_step(device), run.estimate_memory(), device, run.program)
    return PlannedProgram(program=name, layout=run.format_layout(), **price)


def _resolve_cluster(own: dict[str, str], *, is_priced: bool = True) -> Any:
    """Return the cluster that the words describe. Where it is priced, say what is assumed."""
    from llmsys.estimate.cluster_costs import ClusterCosts, load_cluster_costs

    cluster = (
        load_cluster_costs(require_local_path(own["cluster"], "cluster"))
        if "cluster" in own
        else ClusterCosts()
    )
    if "cluster" not in own and "gpus" not in own:
        raise ConfigError("A plan needs a cluster. Give gpus=64 device=h100-sxm, or cluster=FILE.")
    gpus = own.get("gpus", str(cluster.devices))
    if not gpus.isdigit() or not 1 <= int(gpus) <= MAX_ASKED:
        raise ConfigError(f"gpus={gpus} is not a number of devices. Use 1 to {MAX_ASKED}.")
    if is_priced:
        print_assumptions(
            cluster,
            None if "device" in own else "device=NAME",
            None if "gpus" in own else "gpus=N",
        )
    return cluster.model_copy(
        update={"devices": int(gpus), "device": own.get("device", cluster.device)}
    )


def _format_launch_command(
    arguments: argparse.Namespace,
    words: list[str],
    best: "PricedLayout",
    devices: int,
    node_devices: int,
) -> str:
    """Return the command that starts the best layout: on this machine, or on as many of Slurm's
    as it needs.
    """
    config = str(arguments.output or arguments.config)
    chosen = [] if arguments.output is not None else [*words, *_list_layout_words(best)]
    if devices <= node_devices:
        return shlex.join(["llmsys", "train", config, *chosen, f"launch.processes={devices}"])
    nodes = -(-devices // node_devices)
    per_node = devices // nodes
    return shlex.join(
        ["llmsys", "launch", config, *chosen, f"nodes={nodes}", f"launch.processes={per_node}"]
    )


def _list_layout_words(chosen: "PricedLayout") -> list[str]:
    """Return a layout as overrides of a config."""
    values: dict[str, Any] = {
        "batch.micro_sequences": chosen.micro_sequences,
        "train.activation_checkpoint": chosen.recompute,
    }
    values |= {f"engine.{key}": value for key, value in chosen.engine.items()}
    values |= {f"layout.{key}": value for key, value in chosen.layout.items()}
    return [
        f"{key}={json.dumps(value) if isinstance(value, dict) else value}"
        for key, value in values.items()
        if value is not None
    ]


def _format_dry_run_command(
    arguments: argparse.Namespace,
    words: list[str],
    best: "list[PricedLayout]",
    cluster: Any,
    node_devices: int,
) -> str:
    """Return the command that runs one rank of the fastest layout of the torch engine; empty
    where none is listed.
    """
    fastest = next((one for one in best if one.engine["kind"] == "torch"), None)
    if fastest is None:
        return ""
    from llmsys.dryrun.dry_run_request import format_dry_run_command

    devices = min(cluster.devices, node_devices)
    nodes = -(-cluster.devices // node_devices)
    if arguments.output is not None and fastest is best[0]:
        return format_dry_run_command(str(arguments.output), (), nodes, devices, cluster.device)
    overrides = [*words, *_list_layout_words(fastest)]
    return format_dry_run_command(arguments.config, overrides, nodes, devices, cluster.device)


def _format_chosen_config(
    asked: str, resolved: "LoadedConfig", words: list[str], data: "PlanOutput"
) -> str:
    """Return a sparse config based on the one that was given."""
    from llmsys.config.loading.yaml_files import dump_yaml

    best = data.best[0]
    # a name under configs/ is found from anywhere, a relative path is not
    base = str(resolved.source) if Path(asked).exists() else asked
    values: dict[str, Any] = {"model": {"base": base}} if resolved.is_model_only else {"base": base}
    _merge_values(values, _collect_overrides(resolved, words))
    # The plan chose the stages, and a cut into others would not load.
    cut = {} if resolved.run.layout.layers_per_stage is None else {"layers_per_stage": None}
    _merge_values(
        values,
        {
            "engine": best.engine,
            "layout": cut | best.layout,
            "batch": {"micro_sequences": best.micro_sequences},
            "train": {"activation_checkpoint": best.recompute},
        },
    )
    seconds = best.step_seconds
    head = (
        f"# Chosen by llmsys plan for {data.device}: {best.choice}\n# Expected: "
        f"{seconds.p50:.3g} s per step ({seconds.p10:.3g} to {seconds.p90:.3g}), "
        f"{(best.peak_bytes + best.driver_bytes) / 2**30:.1f} GiB at most, "
        f"{best.peak_instant}\n"
    )
    return head + dump_yaml(values)


def _collect_overrides(resolved: "LoadedConfig", words: list[str]) -> dict[str, Any]:
    """Return the overrides of the command line. Those of a bare model may have left out
    `model.`.
    """
    from llmsys.config.loading.merge import read_overrides

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


def _print_layout_check(
    arguments: argparse.Namespace, resolved: "LoadedConfig", own: dict[str, str]
) -> int:
    from llmsys.estimate.named_layout import find_layout_violations, parse_layout
    from llmsys.estimate.plan.json_output import LayoutCheckOutput
    from llmsys.estimate.plan.layout_check import estimate_layout_fit, iter_remarks

    named = parse_layout(arguments.check)
    is_named = bool(own.keys() & {"gpus", "cluster"})
    devices = _resolve_cluster(own, is_priced=False).devices if is_named else None
    is_given = has_batch(resolved)
    problems = list(find_layout_violations(resolved.run, named, devices, with_batch=is_given))
    if not problems and is_given and own.keys() - {"program"}:
        cluster = _resolve_cluster(own | {"gpus": str(named.num_devices)})
        data = estimate_layout_fit(resolved.run, named, cluster, _load_program(own))
        if arguments.compare:
            data = data.model_copy(
                update={"own": _describe_own_choice(arguments, resolved, cluster)}
            )
    else:
        data = LayoutCheckOutput(
            legal=not problems,
            devices=named.num_devices,
            problems=problems,
            remarks=list(iter_remarks(resolved.run, named, has_batch=is_given)),
        )
    if arguments.json:
        _print_json(data)
    else:
        print(
            f"{'legal' if data.legal else 'illegal'}: {arguments.check} on "
            f"{devices or named.num_devices} devices"
        )
        priced = [data.memory, *(data.assumed or ()), data.time, data.own]
        for line in (*problems, *data.remarks, *filter(None, priced)):
            print(f"  {line}")
    return ILLEGAL if problems else TOO_LARGE if data.fits is False else 0


def _load_program(own: dict[str, str]) -> Any:
    from llmsys.estimate.program_profile import load_program_profile

    return load_program_profile(own["program"]) if "program" in own else None


def _describe_own_choice(
    arguments: argparse.Namespace, resolved: "LoadedConfig", cluster: Any
) -> str:
    """Return a sentence on the layout that a plan would choose on the same devices."""
    from llmsys.errors import LayoutError
    from llmsys.estimate.plan.layout_search import search_layouts

    try:
        best = _search(resolved, _build_target(arguments, cluster), search_layouts).ranked[0]
    except LayoutError as error:
        return f"llmsys has no layout for it: {error}"
    seconds, peak = best.step.seconds, best.memory.peak_bytes + best.memory.driver_bytes
    return (
        f"llmsys would choose {best.choice.format_layout()}: {seconds.p50:.3g} s "
        f"({seconds.p10:.3g} to {seconds.p90:.3g}), {peak / 2**30:.1f} GiB"
    )

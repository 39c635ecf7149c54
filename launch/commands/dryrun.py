"""Run `llmsys dryrun`: the training step of one rank of any cluster, without a GPU."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError, LlmsysError
from llmsys.launch.commands.arguments import parse_positive_number, split_arguments
from llmsys.launch.commands.estimate import parse_lengths
from llmsys.storage.paths import parse_local_path

if TYPE_CHECKING:
    from llmsys.dryrun.dry_run_request import DryRunRequest

OWN_NAMES = ("nodes", "rank", "device")
REFUTED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ranks to run, the assumed loads and the output. nodes=, rank= and device= are
    among the overrides.
    """
    parser.add_argument(
        "--all-kinds",
        action="store_true",
        help="run one rank of every kind: ranks with different shards, and the last",
    )
    parser.add_argument(
        "--all-configs",
        action="store_true",
        help="run one rank of every kind of every training config, on the cluster that its name "
        "ends in, such as 64xh100, else on two devices",
    )
    parser.add_argument(
        "--documents",
        type=parse_lengths,
        default=(),
        metavar="N,N,…",
        help="document lengths in tokens, repeated to fill a packed sequence (default: one "
        "document)",
    )
    parser.add_argument(
        "--expert-skew",
        type=parse_positive_number,
        default=1.0,
        metavar="F",
        help="load of this rank's experts over the mean load (default: %(default)s, even)",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("runs/dryrun"),
        metavar="FOLDER",
        help="folder of dryrun.html and dryrun.json, with --all-configs of a folder for each "
        "config (default: %(default)s)",
    )
    parser.add_argument(
        "--table",
        type=parse_local_path,
        metavar="FILE",
        help="with --all-configs: Markdown file whose table between the marks of dry runs is "
        "replaced by that of these runs",
    )
    parser.epilog = (
        "nodes=512:8 is 512 machines with 8 devices each; rank=17 is the rank that runs "
        f"(default: 0); device=h100-sxm names a device profile or a YAML file.\n{parser.epilog}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the dry run and write its page. 1 when a rank does not fit the memory of its device, or
    its messages, shards or blocks are not those of its config.
    """
    from llmsys.dryrun.dry_run import iter_dry_runs
    from llmsys.dryrun.page import write_dry_run
    from llmsys.dryrun.summary import format_dry_run, format_verdict

    if arguments.all_configs:
        return run_all_configs(arguments)
    if arguments.table is not None:
        raise ConfigError(
            f"--table {arguments.table} is for the table of all configs. Give --all-configs too, "
            "or leave it out."
        )
    results: list[dict[str, Any]] = []
    for result in iter_dry_runs(build_request(arguments), all_kinds=arguments.all_kinds):
        results.append(result)
        if not arguments.json:
            print(
                format_verdict(result) if len(results) > 1 else format_dry_run(result), flush=True
            )
    page, data = write_dry_run(results, arguments.output)
    print(json.dumps({"ranks": results}) if arguments.json else f"\n{page}\n{data}")
    return 0 if all(one["is_proven"] for one in results) else REFUTED


def run_all_configs(arguments: argparse.Namespace) -> int:
    """Run one rank of every kind of every training config. 1 when one of them is refuted or cannot
    be run.

    Raises:
        ConfigError: a config, or a cluster for it, is given too.
    """
    from concurrent.futures import ThreadPoolExecutor

    from llmsys.dryrun.config_table import format_config_table, replace_table
    from llmsys.dryrun.page import write_dry_run
    from llmsys.dryrun.shipped_configs import list_shipped_requests
    from llmsys.dryrun.summary import format_verdict
    from llmsys.storage.atomic_write import write_bytes_atomically

    if arguments.config is not None:
        raise ConfigError(
            f"--all-configs runs every training config, and {arguments.config} is given too. Leave "
            "one of them out."
        )
    if arguments.table is not None:
        replace_table(arguments.table, "")  # a file without marks is refused before an hour of runs
    requests = list_shipped_requests()
    found: dict[str, list[dict[str, Any]]] = {}
    refuted: dict[str, str] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = zip(requests, pool.map(_run_all_kinds, requests), strict=True)
        for request, (results, error) in runs:
            name = request.config
            found[name] = results
            if results:
                write_dry_run(results, arguments.output / name)
            if error or not all(one["is_proven"] for one in results):
                refuted[name] = error or "refuted"
            if not arguments.json:
                print("\n".join([name, *map(format_verdict, results), *filter(None, [error])]))
    table = format_config_table(found, refuted)
    if arguments.table is not None:
        text = replace_table(arguments.table, table)
        write_bytes_atomically(arguments.table, text.encode())
    if arguments.json:
        print(json.dumps({"configs": found, "refuted": refuted}))
    else:
        print(f"\n{table}")
        proven = len(requests) - len(refuted)
        named = "".join(f"\n  {name}" for name in refuted)
        print(f"\n{proven} of {len(requests)} configs are proven{named}\n{arguments.output}")
    return REFUTED if refuted else 0


def _run_all_kinds(request: "DryRunRequest") -> tuple[list[dict[str, Any]], str]:
    """Return the results of one rank of every kind, and the message of an error or nothing."""
    from llmsys.dryrun.dry_run import iter_dry_runs

    results: list[dict[str, Any]] = []
    try:
        results.extend(iter_dry_runs(request, all_kinds=True))
    except LlmsysError as error:
        return results, str(error)
    return results, ""


def build_request(arguments: argparse.Namespace) -> "DryRunRequest":
    """Return the request of a command line.

    Raises:
        ConfigError: nodes, rank or device cannot be read.
    """
    from llmsys.dryrun.dry_run_request import DryRunRequest

    if arguments.config is None:
        raise ConfigError("A dry run needs a config. Give its name or path, or --all-configs.")
    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    if missing := [name for name in ("nodes", "device") if name not in own]:
        raise ConfigError(
            f"A dry run needs a cluster, and {' and '.join(missing)} is not given. Give nodes=8:8 "
            "(8 machines with 8 devices each) and device=h100-sxm."
        )
    nodes, devices = parse_cluster(own["nodes"])
    rank = own.get("rank", "0")
    if not rank.isdigit():
        raise ConfigError(f"rank={rank} is not a rank. Use rank=0 to rank={nodes * devices - 1}.")
    return DryRunRequest(
        config=arguments.config,
        overrides=tuple(words),
        nodes=nodes,
        node_devices=devices,
        rank=int(rank),
        device=own["device"],
        documents=arguments.documents,
        expert_skew=arguments.expert_skew,
    )


def parse_cluster(text: str) -> tuple[int, int]:
    """Return (machines, devices of each) of `512:8`.

    Raises:
        ConfigError: the text is something else.
    """
    nodes, _, devices = text.partition(":")
    if not (nodes.isdigit() and devices.isdigit() and int(nodes) and int(devices)):
        raise ConfigError(
            f"nodes={text} is not a cluster for a dry run. Use nodes=512:8 for 512 machines of 8 "
            "devices."
        )
    return int(nodes), int(devices)

"""Run `llmsys launch`: start a run on its hosts by torchrun, DeepSpeed, accelerate or Slurm, or
print the commands.

With `--by` it prints what `kubectl apply`, `sky launch` or `ray job submit` take.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import LaunchError
from llmsys.launch.commands.arguments import parse_count, split_arguments
from llmsys.launch.commands.train import require_finish
from llmsys.launch.hosts.hostfile import ANONYMOUS, PATIENCE_SECONDS, Host, parse_nodes
from llmsys.storage.atomic_write import PRIVATE, write_bytes_atomically

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig
    from llmsys.launch.launchers.host_commands import Launcher, LaunchPlan

OWN_NAMES = ("nodes", "spares", "device")
# The command that submits the job of a cluster; `-` means that it reads the job from its standard
# input.
CLUSTERS = {"kubernetes": "kubectl apply -f -", "skypilot": "sky launch task.yaml", "ray": "sh"}
ELSEWHERE = ("kubernetes", "skypilot")  # clusters whose hosts share no folder with this one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's options. nodes= is given among the overrides."""
    parser.epilog = (
        "nodes=HOST:SLOTS,… or nodes=HOSTFILE names the hosts; nodes=COUNT requests that many "
        "from Slurm, with launch.processes ranks each.\nspares=1 takes one host more from Slurm, "
        "spares=HOST:SLOTS names one: it trains when another host fails.\ndevice=h100-sxm names "
        "the accelerators for --by skypilot.\nlaunch/README.md has a "
        f"walk-through.\n\n{parser.epilog}"
    )
    parser.add_argument(
        "--launcher",
        choices=("torchrun", "deepspeed", "accelerate", "slurm"),
        help="program that starts the ranks (default: the engine's)",
    )
    parser.add_argument(
        "--print",
        action="store_true",
        help="write the run bundle and print the commands, but start nothing",
    )
    _add_cluster_arguments(parser)
    parser.add_argument(
        "--no-ssh", action="store_true", help="deepspeed: use one command per host instead of pdsh"
    )
    parser.add_argument(
        "--min-hosts",
        metavar="COUNT",
        type=parse_count(0),
        default=0,
        help="torchrun, slurm: minimum hosts to continue with (default: all)",
    )
    parser.add_argument(
        "--restarts",
        type=parse_count(0),
        default=3,
        help="torchrun, slurm: restarts of lost ranks per host (default: 3)",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="torchrun, slurm: keep processes that have imported torch for the next restart (0.35 "
        "GB of memory a rank)",
    )
    parser.add_argument(
        "--patience",
        type=parse_count(1),
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="torchrun, slurm: seconds to wait for lost hosts (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus",
        type=parse_count(0),
        help="slurm, --by: accelerators per node (default: its ranks; 0: none)",
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        help="slurm: option to pass to sbatch, such as --sbatch=--time=24:00:00; may be repeated",
    )


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by",
        choices=tuple(CLUSTERS),
        help="with --print: print what kubectl apply, sky launch or ray job submit take, for "
        "nodes=COUNT",
    )
    parser.add_argument(
        "--image",
        default="",
        help="kubernetes, skypilot: image built from containers/Dockerfile (default: llmsys; "
        "skypilot: this checkout)",
    )
    parser.add_argument(
        "--volume",
        default="llmsys",
        help="kubernetes, skypilot: PersistentVolumeClaim, or volume, that is mounted at "
        "/workspace (default: llmsys)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the run bundle and start the run, or print the commands. The statuses are those of
    launch/train.py.
    """
    from llmsys.config.loading.load import load_run_config
    from llmsys.launch.hosts.network_interfaces import is_this_host
    from llmsys.launch.launchers.host_commands import NATURAL, build_commands, strip_user
    from llmsys.launch.launchers.launch_plan import build_launch_plan, require_hosts
    from llmsys.launch.launchers.multi_host import run_commands
    from llmsys.launch.launchers.run_bundle import list_withheld_secrets, write_run_bundle

    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    if not own:
        raise LaunchError(
            "A launch needs hosts. Give nodes=first:8,second:8, nodes=HOSTFILE or nodes=COUNT."
        )
    if "device" in own and arguments.by != "skypilot":
        raise LaunchError(
            f"device={own['device']} is for --by skypilot, which rents it. Leave it out."
        )
    config, nodes = load_run_config(arguments.config, words), own["nodes"]
    _check_config(config, prints_only=arguments.print)
    count = int(nodes) if nodes.isdigit() else None
    launcher: Launcher = arguments.launcher or (
        "slurm" if count is not None else NATURAL[config.engine.kind]
    )
    if arguments.by:
        launcher = "torchrun"
        _check_cluster_job(arguments, own)
    hosts = (
        parse_nodes(nodes)
        if count is None
        else _build_anonymous_hosts(config, count, arguments.by or launcher)
    )
    plan = build_launch_plan(
        config,
        hosts,
        launcher,
        arguments.min_hosts,
        arguments.restarts,
        arguments.patience,
        _parse_spares(own.get("spares", ""), hosts, is_anonymous=count is not None),
        must_resolve=not arguments.print,
        has_standby=arguments.standby,
    )
    if arguments.by not in ELSEWHERE:  # their volume is not mounted here
        write_run_bundle(config, hosts)
    for name in list_withheld_secrets():
        print(
            f"llmsys: {name} looks like a secret and is not copied: set it on every host.",
            file=sys.stderr,
        )
    if arguments.by:
        return _print_cluster_job(arguments, config, plan, own.get("device", ""))
    if launcher == "slurm":
        return _submit_slurm_job(arguments, config, plan, count)
    chosen = build_commands(launcher, plan, over_ssh=not arguments.no_ssh and len(hosts) > 1)
    lines = [(command.host, command.format_shell_line(plan)) for command in chosen]
    text = "".join(
        f"# on {host or 'this host, which reaches the others by pdsh'}:\n{line}\n"
        for host, line in lines
    )
    text += _format_spare_lines(plan)
    # the run folder is shared, and its commands are for their owner alone
    write_bytes_atomically(plan.folder / "run.sh", text.encode(), PRIVATE)
    if arguments.print:
        data = {
            "folder": str(plan.folder),
            "commands": [{"host": host, "line": line} for host, line in lines],
        }
        print(json.dumps(data) if arguments.json else text, end="\n" if arguments.json else "")
        return 0
    everywhere = chosen[0].host is None  # pdsh goes to this host by ssh as well
    require_hosts(
        plan, [host.name for host in hosts if everywhere or not is_this_host(strip_user(host.name))]
    )
    status = run_commands(plan, chosen)
    # a launcher that was killed may exit with 0
    if status == 0:
        require_finish(config)
    return status


def _check_config(config: "RunConfig", *, prints_only: bool) -> None:
    """Raise ConfigError or CheckpointError for what ranks would find on every host."""
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.estimate.device_profile import load_device_profile
    from llmsys.train.run_settings import require_resumable_settings

    require_trusted_run(config, "training")
    if config.flops.device is not None:
        load_device_profile(config.flops.device)
    if not prints_only:
        require_resumable_settings(config)


def _check_cluster_job(arguments: argparse.Namespace, own: dict[str, str]) -> None:
    """Reject what a cluster's own scheduler decides."""
    by, nodes = arguments.by, own["nodes"]
    if not arguments.print:
        raise LaunchError(
            f"--by {by} starts nothing. Add --print, and give the output to `{CLUSTERS[by]}`."
        )
    if arguments.launcher not in (None, "torchrun"):
        raise LaunchError(
            f"--launcher {arguments.launcher}: --by {by} starts the ranks of a host by torchrun. "
            "Leave --launcher out."
        )
    if not nodes.isdigit():
        raise LaunchError(
            f"nodes={nodes} names hosts, but {by} chooses them. Give their number and the ranks "
            "of each: nodes=2 launch.processes=8."
        )
    if by == "ray" and arguments.min_hosts:
        raise LaunchError(
            f"--min-hosts {arguments.min_hosts}: a Ray job needs all of its nodes. Leave it out."
        )
    if arguments.sbatch:
        raise LaunchError(
            f"--sbatch is for Slurm, and --by {by} asks another scheduler. Leave it out."
        )
    if "spares" in own:
        raise LaunchError(
            f"spares={own['spares']}: {by} itself finds another host for one that fails. Leave "
            "spares= out."
        )


def _print_cluster_job(
    arguments: argparse.Namespace, config: "RunConfig", plan: "LaunchPlan", device: str
) -> int:
    """Print the job of a cluster."""
    gpus = plan.hosts[0].slots if arguments.gpus is None else arguments.gpus
    match arguments.by:
        case "kubernetes":
            from llmsys.launch.launchers.kubernetes import format_kubernetes_objects

            text = format_kubernetes_objects(config, plan, gpus, arguments.image, arguments.volume)
        case "skypilot":
            from llmsys.launch.launchers.skypilot import format_skypilot_task

            text = format_skypilot_task(
                config, plan, gpus, device, arguments.image, arguments.volume
            )
        case _:
            from llmsys.launch.launchers.ray_job import format_ray_command

            text = format_ray_command(plan, gpus)
    data = {"job": text, "command": CLUSTERS[arguments.by]}
    print(json.dumps(data) if arguments.json else text, end="\n" if arguments.json else "")
    return 0


def _parse_spares(text: str, hosts: list[Host], *, is_anonymous: bool) -> list[Host]:
    """Return the hosts of `spares=`: a number of Slurm's nodes, or names where nodes= has names."""
    if not text:
        return []
    if is_anonymous:
        if not text.isdigit():
            raise LaunchError(
                f"spares={text}: Slurm chooses the nodes. Give a number of spares, such as "
                "spares=1."
            )
        return [Host(f"{ANONYMOUS}-spare-{number}", hosts[0].slots) for number in range(int(text))]
    if text.isdigit():
        raise LaunchError(
            f"spares={text} is a number, but nodes= has names. Name the spares: spares=third:8."
        )
    return parse_nodes(text)


def _build_anonymous_hosts(config: "RunConfig", count: int, launcher: str) -> list[Host]:
    """Return hosts that Slurm or another cluster will choose, all with launch.processes slots."""
    if launcher not in ("slurm", *CLUSTERS):
        raise LaunchError(
            f"nodes={count} is a number of hosts, but {launcher} needs their names. Give "
            "nodes=first:8,…"
        )
    if count < 1 or config.launch.processes < 1:
        raise LaunchError(
            f"nodes={count} with launch.processes={config.launch.processes} starts no rank. Give "
            "the number of hosts and the ranks of each: nodes=8 launch.processes=8."
        )
    return [Host(f"{ANONYMOUS}-{number}", config.launch.processes) for number in range(count)]


def _format_spare_lines(plan: "LaunchPlan") -> str:
    """Return the command of each spare, as comments: it is run only where a host has failed."""
    from llmsys.launch.launchers.host_commands import build_torchrun_command

    lines = [f"# spare {one.name}, instead of a host that has failed:\n# " for one in plan.spares]
    commands = [build_torchrun_command(plan, one).format_shell_line(plan) for one in plan.spares]
    return "".join(f"{line}{command}\n" for line, command in zip(lines, commands, strict=True))


def _submit_slurm_job(
    arguments: argparse.Namespace, config: "RunConfig", plan: "LaunchPlan", count: int | None
) -> int:
    from llmsys.launch.launchers.slurm import format_sbatch_script

    gpus = plan.hosts[0].slots if arguments.gpus is None else arguments.gpus
    text = format_sbatch_script(
        plan, chosen=count is not None, gpus=gpus, port=config.launch.port, more=arguments.sbatch
    )
    path: Path = plan.folder / "job.sbatch"
    command = shlex.join(["sbatch", str(path)])
    write_bytes_atomically(path, text.encode(), PRIVATE)
    if arguments.print:
        data: dict[str, Any] = {
            "folder": str(plan.folder),
            "job": str(path),
            "command": command,
        }
        print(json.dumps(data) if arguments.json else text, end="\n" if arguments.json else "")
        return 0
    try:
        return subprocess.run(["sbatch", str(path)], check=False).returncode
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch is not on this host's PATH. The job script was written: run `{command}` on a "
            "host of the cluster."
        ) from None

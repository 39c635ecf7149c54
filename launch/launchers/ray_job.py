"""Train on the nodes of a Ray cluster: the entry point that `llmsys launch --print --by ray`
submits.

`python -m llmsys.launch.launchers.ray_job --nodes=8 --slots=8 --gpus=8 … CONFIG` reserves the
nodes, runs torchrun under the restart agent on each of them, and ends with the status of the run.
Run folder, code and interpreter have the same paths on every node.

Invariants:
- SIGTERM, as `ray job stop` sends it, reaches the ranks of every node, which save and exit with 75.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from llmsys.errors import LaunchError, LlmsysError
from llmsys.launch.hosts.hostfile import ANONYMOUS, Host
from llmsys.launch.launchers.host_commands import (
    LaunchPlan,
    build_torchrun_command,
    require_even_slots,
)
from llmsys.launch.launchers.multi_host import combine_statuses
from llmsys.launch.launchers.run_bundle import build_rank_environment
from llmsys.launch.process.parent_watch import build_child_environment

NUMBERS = {
    "nodes": "number of nodes",
    "slots": "ranks of a node",
    "gpus": "accelerators of a node; 0 reserves CPUs",
    "port": "port of the rendezvous, on the first node",
    "restarts": "restarts of lost ranks, per node",
    "patience": "seconds to wait for nodes",
    "outage": "longest network outage that ranks survive, in seconds",
}
LOST = 1  # status of a node whose actor is gone


class NodeRunner:
    """An actor that runs one command on its node."""

    def __init__(self, folder: str) -> None:
        """Run commands in a folder."""
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def get_address(self) -> str:
        """Return the node's address in the cluster."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def run(self, words: Sequence[str]) -> int:
        """Run a command to its end.

        Args:
            words: the command and its arguments.

        Returns:
            Its exit status; negative: the signal that ended it.
        """
        self.process = subprocess.Popen(words, cwd=self.folder, env=build_child_environment())
        return self.process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def run_on_nodes(plan: LaunchPlan, gpus: int) -> int:
    """Run the ranks on nodes of Ray's choice; return the combined status.

    Args:
        plan: The launch. Each of its hosts is replaced by a node of the cluster.
        gpus: Accelerators of a node; 0 reserves CPUs.

    Returns:
        0, or 75 when the run was stopped and has saved.

    Raises:
        LaunchError: The cluster has too few nodes.
        LostRankError: Nodes failed; the message names them.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_nodes, slots = len(plan.hosts), plan.hosts[0].slots
    ray.init(ignore_reinit_error=True)
    bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": slots}
    group = placement_group(
        [bundle] * num_nodes, strategy="STRICT_SPREAD" if num_nodes > 1 else "PACK"
    )
    if not group.wait(plan.patience_seconds):
        raise LaunchError(
            f"nodes={num_nodes}: Ray had no {num_nodes} nodes with {bundle} free within "
            f"{plan.patience_seconds} s. Ask for fewer nodes, wait longer with --patience, or "
            "look at `ray status`."
        )
    options = {"num_cpus": bundle["CPU"], "num_gpus": gpus, "max_concurrency": 3}
    runners = [
        ray.remote(NodeRunner)
        .options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, number))
        .remote(str(plan.working_directory))
        for number in range(num_nodes)
    ]
    hosts = tuple(
        Host(address, slots) for address in ray.get([one.get_address.remote() for one in runners])
    )
    plan = replace(plan, hosts=hosts)
    running = [
        runner.run.remote(build_torchrun_command(plan, host).arguments)
        for runner, host in zip(runners, hosts, strict=True)
    ]
    _forward_signals(runners)
    statuses = [_get_status(one) for one in running]
    # nodes of one machine share an address
    names = [f"node {number} ({host.name})" for number, host in enumerate(hosts)]
    return combine_statuses(dict(zip(names, statuses, strict=True)), plan)


def _forward_signals(runners: Sequence[Any]) -> None:
    """Forward requests to stop to every node. A handler must return soon, so it waits for no
    answer.
    """

    def handle_signal(number: int, frame: FrameType | None) -> None:
        for runner in runners:
            runner.send_signal.remote(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle_signal)


def _get_status(running: Any) -> int:
    import ray
    from ray.exceptions import RayError

    try:
        status: int = ray.get(running)
    except RayError as error:
        print(
            f"llmsys: a node of Ray was lost: {str(error).splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )
        return LOST
    return status


def format_ray_command(plan: LaunchPlan, gpus: int) -> str:
    """Return the shell line that submits a launch to a Ray cluster.

    Args:
        plan: The launch. Hosts must have equal slots.
        gpus: Accelerators of a node; 0 reserves CPUs.

    Returns:
        `ray job submit …`; RAY_ADDRESS or `--address` names the cluster.

    Raises:
        LaunchError: Slots differ.
    """
    slots = require_even_slots(plan.hosts, "a Ray job")
    # the ranks of all nodes get these, and their Ray workers find this code
    settings = {"env_vars": build_rank_environment(os.environ, plan.folder)}
    words = ["ray", "job", "submit", f"--runtime-env-json={json.dumps(settings)}", "--"]
    words += [
        plan.interpreter,
        "-m",
        "llmsys.launch.launchers.ray_job",
        f"--nodes={len(plan.hosts)}",
        f"--slots={slots}",
    ]
    words += [
        f"--gpus={gpus}",
        f"--port={plan.port}",
        f"--name={plan.name}",
        f"--restarts={plan.max_restarts}",
    ]
    words += [f"--patience={plan.patience_seconds}", f"--outage={plan.outage_seconds}"]
    words += ["--standby"] if plan.has_standby else []
    words += [f"--folder={plan.working_directory}", plan.script_arguments[1]]
    return shlex.join(words) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks on the nodes of the cluster that this job was submitted to; return the
    status of the run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m llmsys.launch.launchers.ray_job", description=__doc__
    )
    for name, meaning in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=meaning)
    parser.add_argument("--name", required=True, help="name of the run")
    parser.add_argument(
        "--folder", type=Path, required=True, help="working directory on every node"
    )
    parser.add_argument("config", type=Path, help="config.yaml of the run bundle")
    parser.add_argument(
        "--standby", action="store_true", help="import torch for the next restart in advance"
    )
    given = parser.parse_args(arguments)
    plan = LaunchPlan(
        hosts=tuple(Host(f"{ANONYMOUS}-{number}", given.slots) for number in range(given.nodes)),
        folder=given.config.parent,
        working_directory=given.folder,
        port=given.port,
        name=given.name,
        min_hosts=given.nodes,
        max_restarts=given.restarts,
        patience_seconds=given.patience,
        outage_seconds=given.outage,
        has_standby=given.standby,
    )
    try:
        return run_on_nodes(plan, given.gpus)
    except LlmsysError as error:
        print(f"llmsys: error: {error}", file=sys.stderr, flush=True)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())

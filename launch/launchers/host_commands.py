"""The commands that start a run on its hosts, one for each host, or one that starts them all.

From hosts and the files of the run folder (`launch/launchers/run_bundle.py`) to words of a shell: torchrun with a
rendezvous that nodes may leave, DeepSpeed's launcher with a hostfile, `accelerate launch`. Pure: nothing is started and
nothing read.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.hosts.hostfile import Host
from launch.launchers.local import SCRIPT
from llmsys.errors import LaunchError

Launcher = Literal["torchrun", "deepspeed", "accelerate", "slurm"]
NATURAL: dict[str, Launcher] = {"torch": "torchrun", "deepspeed": "deepspeed", "accelerate": "accelerate"}
"""What starts an engine's ranks where nothing else is asked for."""


@dataclass(frozen=True)
class LaunchPlan:
    """What every command needs to know. Paths are absolute; `min_hosts` hosts are enough for torchrun to go on.

    Hosts that were lost are waited for so long as the patience; ranks sit out an outage of `outage_seconds`.
    """

    hosts: tuple[Host, ...]
    folder: Path
    working_directory: Path
    port: int
    name: str
    min_hosts: int
    max_restarts: int
    patience_seconds: int
    outage_seconds: int

    @property
    def rendezvous_host(self) -> str:
        """The host where ranks meet, by the name others know it by."""
        return strip_user(self.hosts[0].name)

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def script_arguments(self) -> list[str]:
        """What each rank runs: the script and the config that travels."""
        return [str(SCRIPT), str(self.folder / "config.yaml")]


@dataclass(frozen=True)
class HostCommand:
    """Words to run on a host; None: here, and it reaches the others itself. `lasting`: to be run there again when the
    connection was lost and is back."""

    host: str | None
    arguments: tuple[str, ...]
    lasting: bool = False

    def format_shell_line(self, start: LaunchPlan, *, in_place: bool = False) -> str:
        """As a person types it into a shell: in the run's working directory, with the environment that travels.

        `in_place`: the shell becomes the command, so that signals to it reach the command.
        """
        setting = shlex.quote(str(start.folder / "environment.sh"))
        run = "exec " * in_place + shlex.join(self.arguments)
        return f"cd {shlex.quote(str(start.working_directory))} && . {setting} && {run}"


def strip_user(name: str) -> str:
    """A host's name without the user that ssh needs."""
    return name.rpartition("@")[2]


def build_commands(launcher: Launcher, start: LaunchPlan, *, over_ssh: bool) -> list[HostCommand]:
    """The commands of a launcher. `over_ssh`: DeepSpeed's launcher reaches the other hosts itself, by pdsh."""
    if launcher == "torchrun":
        return build_torchrun_commands(start)
    if launcher == "accelerate":
        return build_accelerate_commands(start)
    return build_deepspeed_commands(start, over_ssh=over_ssh)


def build_torchrun_arguments(start: LaunchPlan, slots: int, endpoint: str, identity: str, address: str) -> list[str]:
    """torchrun by way of launch/launchers/torchrun.py, which hands signals to the ranks, kept going by
    launch/launchers/restart_agent.py.
    """
    return [
        sys.executable,
        "-m",
        "launch.launchers.restart_agent",
        f"--meet={endpoint}",
        f"--restarts={start.max_restarts}",
        f"--patience={start.patience_seconds}",
        sys.executable,
        "-m",
        "launch.launchers.torchrun",
        f"--nnodes={start.min_hosts}:{len(start.hosts)}",
        f"--nproc-per-node={slots}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={identity}",
        f"--local-addr={address}",
        f"--rdzv-conf=join_timeout={start.patience_seconds}",
        *start.script_arguments,
    ]


def build_torchrun_commands(start: LaunchPlan) -> list[HostCommand]:
    """One command for each host; hosts may differ in slots."""
    endpoint = f"{start.rendezvous_host}:{start.port}"
    return [
        HostCommand(
            host.name,
            tuple(build_torchrun_arguments(start, host.slots, endpoint, start.name, strip_user(host.name))),
            lasting=True,
        )
        for host in start.hosts
    ]


def build_accelerate_commands(start: LaunchPlan) -> list[HostCommand]:
    """One command for each host. accelerate shares ranks out evenly: hosts of different sizes are refused."""
    slots = require_even_slots(start.hosts, "accelerate launch")
    shared = ["--num_machines", str(len(start.hosts)), "--num_processes", str(slots * len(start.hosts))]
    shared += ["--main_process_ip", start.rendezvous_host, "--main_process_port", str(start.port)]
    return [
        HostCommand(
            host.name,
            (
                sys.executable,
                "-m",
                "launch.launchers.accelerate",
                *shared,
                "--machine_rank",
                str(number),
                *start.script_arguments,
            ),
        )
        for number, host in enumerate(start.hosts)
    ]


def build_deepspeed_commands(start: LaunchPlan, *, over_ssh: bool) -> list[HostCommand]:
    """One command here that reaches the hosts by pdsh, or one for each host that needs no ssh."""
    shared = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(start.folder / "hostfile")]
    shared += ["--master_addr", start.rendezvous_host, "--master_port", str(start.port)]
    if over_ssh:
        return [HostCommand(None, (*shared, "--launcher", "pdsh", "--force_multi", *start.script_arguments))]
    return [
        HostCommand(host.name, (*shared, "--no_ssh", "--node_rank", str(number), *start.script_arguments))
        for number, host in enumerate(start.hosts)
    ]


def require_even_slots(hosts: tuple[Host, ...], launcher: str) -> int:
    """The slots of every host. LaunchError where they differ."""
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        sizes = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"nodes={sizes}: {launcher} starts equally many ranks on every host. "
            f"Use {min(slots)} slots on each, or --launcher torchrun."
        )
    return slots.pop()

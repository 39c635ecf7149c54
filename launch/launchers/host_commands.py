"""Build the commands that start a run: one for each host, or one that starts them all.

Turns hosts and the files of launch/launchers/run_bundle.py into shell commands: torchrun with an
elastic rendezvous, DeepSpeed's launcher with a hostfile, or `accelerate launch`. Pure functions:
they start and read nothing.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llmsys.errors import LaunchError
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.launchers.local import SCRIPT

OWN_FAILURES = 2  # a host whose own ranks failed this often in a row leaves its place to a spare
Launcher = Literal["torchrun", "deepspeed", "accelerate", "slurm"]
# Default launcher of each engine.
NATURAL: dict[str, Launcher] = {
    "torch": "torchrun",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}


@dataclass(frozen=True)
class LaunchPlan:
    """Settings that every command of a launch shares. Paths are absolute.

    Attributes:
        hosts: The hosts, in rank order. The first one holds the rendezvous.
        folder: `launch/` of the run folder.
        working_directory: Folder that commands run in, on every host.
        port: Rendezvous port; 0 under Slurm means one derived from the job id.
        name: Run name, in letters that Slurm and torchrun accept.
        min_hosts: Fewest hosts that torchrun continues with.
        max_restarts: Restarts of lost ranks, per host.
        patience_seconds: Longest wait for lost hosts.
        outage_seconds: Longest network outage that ranks survive.
        spares: Hosts that train only when another host has failed.
        interpreter: Python of the hosts.
        script: Script of a rank, on the hosts.
        config_file: Config that ranks read, on the hosts; "" means that of `folder`.
        has_standby: The processes of the next restart import torch while the ranks run.
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
    spares: tuple[Host, ...] = ()
    interpreter: str = field(default_factory=lambda: sys.executable)
    script: str = str(SCRIPT)
    config_file: str = ""
    has_standby: bool = False

    @property
    def rendezvous_host(self) -> str:
        """The host of the rendezvous, by the name that others know it by."""
        return strip_user(self.hosts[0].name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def script_arguments(self) -> list[str]:
        """The script of a rank and its config."""
        return [self.script, self.config_file or str(self.folder / "config.yaml")]


@dataclass(frozen=True)
class HostCommand:
    """Arguments to run on a host.

    Attributes:
        host: Name for ssh. None: run here, the command reaches the other hosts itself.
        arguments: The command and its arguments.
        lasting: Run it again when a lost connection to the host is back.
    """

    host: str | None
    arguments: tuple[str, ...]
    lasting: bool = False

    def format_shell_line(self, plan: LaunchPlan, *, in_place: bool = False) -> str:
        """Return the command as a shell line, in the run's working directory and environment.

        Args:
            plan: The launch.
            in_place: Replace the shell by the command (`exec`), so that signals reach the command.

        Returns:
            One line for a POSIX shell.
        """
        setting = shlex.quote(str(plan.folder / "environment.sh"))
        # exec, so that a signal reaches the command and no shell stays around it.
        run = "exec " * in_place + shlex.join(self.arguments)
        return f"cd {shlex.quote(str(plan.working_directory))} && . {setting} && {run}"


def strip_user(name: str) -> str:
    """Return a host's name without the user that ssh needs.

    Args:
        name: `host` or `user@host`.

    Returns:
        `host`.
    """
    return name.rpartition("@")[2]


def build_commands(launcher: Launcher, plan: LaunchPlan, *, over_ssh: bool) -> list[HostCommand]:
    """Return the commands of a launcher.

    Args:
        launcher: torchrun, deepspeed or accelerate. Slurm has a script instead, see slurm.py.
        plan: The launch.
        over_ssh: DeepSpeed's launcher reaches the other hosts itself, by pdsh.

    Returns:
        One command per host, or one for all.

    Raises:
        LaunchError: The launcher needs equal slots on every host, and they differ.
    """
    if launcher == "torchrun":
        return build_torchrun_commands(plan)
    if launcher == "accelerate":
        return build_accelerate_commands(plan)
    return build_deepspeed_commands(plan, over_ssh=over_ssh)


def build_torchrun_arguments(
    plan: LaunchPlan, slots: int, endpoint: str, identity: str, address: str
) -> list[str]:
    """Return the arguments that run torchrun under the restart agent.

    launch/launchers/torchrun.py forwards signals to the ranks; launch/launchers/restart_agent.py
    restarts lost ones.
    """
    return [
        plan.interpreter,
        "-m",
        "llmsys.launch.launchers.restart_agent",
        f"--meet={endpoint}",
        f"--restarts={plan.max_restarts}",
        f"--patience={plan.patience_seconds}",
        *([f"--leave-after={OWN_FAILURES}"] if plan.spares else []),
        *(["--standby"] if plan.has_standby else []),
        plan.interpreter,
        "-m",
        "llmsys.launch.launchers.torchrun",
        f"--nnodes={plan.min_hosts}:{len(plan.hosts)}",
        f"--nproc-per-node={slots}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={identity}",
        # torchrun would announce this host's own name, which may lead to loopback elsewhere
        f"--local-addr={address}",
        f"--rdzv-conf=join_timeout={plan.patience_seconds}",
        *plan.script_arguments,
    ]


def build_torchrun_commands(plan: LaunchPlan) -> list[HostCommand]:
    """Return one command for each host; hosts may differ in slots."""
    return [build_torchrun_command(plan, host) for host in plan.hosts]


def build_torchrun_command(plan: LaunchPlan, host: Host) -> HostCommand:
    """Return the command of one host, which may be a spare.

    Args:
        plan: The launch.
        host: The host and its slots.

    Returns:
        The command.
    """
    endpoint = f"{plan.rendezvous_host}:{plan.port}"
    words = build_torchrun_arguments(plan, host.slots, endpoint, plan.name, strip_user(host.name))
    return HostCommand(host.name, tuple(words), lasting=True)


def join_with_variables(words: Sequence[str], names: Sequence[str]) -> str:
    """Return words as shell text in which the shell replaces some variables.

    Args:
        words: Arguments of a command.
        names: Variables that the shell replaces, without `$`. Words that hold one must hold no
            other special character.

    Returns:
        The words, quoted.
    """
    return " ".join(
        f'"{word}"' if any(f"${name}" in word for name in names) else shlex.quote(word)
        for word in words
    )


def build_accelerate_commands(plan: LaunchPlan) -> list[HostCommand]:
    """Return one command for each host. accelerate needs the same number of ranks on every host."""
    slots = require_even_slots(plan.hosts, "accelerate launch")
    shared = [
        "--num_machines",
        str(len(plan.hosts)),
        "--num_processes",
        str(slots * len(plan.hosts)),
    ]
    shared += ["--main_process_ip", plan.rendezvous_host, "--main_process_port", str(plan.port)]
    return [
        HostCommand(
            host.name,
            (
                sys.executable,
                "-m",
                "llmsys.launch.launchers.accelerate",
                *shared,
                "--machine_rank",
                str(number),
                *plan.script_arguments,
            ),
        )
        for number, host in enumerate(plan.hosts)
    ]


def build_deepspeed_commands(plan: LaunchPlan, *, over_ssh: bool) -> list[HostCommand]:
    """Return one command that reaches the hosts by pdsh, or one for each host without ssh."""
    shared = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--hostfile",
        str(plan.folder / "hostfile"),
    ]
    shared += ["--master_addr", plan.rendezvous_host, "--master_port", str(plan.port)]
    if over_ssh:
        # DeepSpeed's launcher would start a single host without ssh unless it is forced.
        return [
            HostCommand(
                None, (*shared, "--launcher", "pdsh", "--force_multi", *plan.script_arguments)
            )
        ]
    return [
        HostCommand(
            host.name, (*shared, "--no_ssh", "--node_rank", str(number), *plan.script_arguments)
        )
        for number, host in enumerate(plan.hosts)
    ]


def require_even_slots(hosts: tuple[Host, ...], launcher: str) -> int:
    """Return the slots of every host; raise LaunchError where they differ."""
    slots = {host.slots for host in hosts}
    if len(slots) > 1:
        sizes = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"nodes={sizes}: {launcher} needs the same number of ranks on every host. Use "
            f"{min(slots)} slots on each, or --launcher torchrun."
        )
    return slots.pop()

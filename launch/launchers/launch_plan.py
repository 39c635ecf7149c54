"""Build a `LaunchPlan` from a config and hosts, and reject everything that can be known to fail
before the launch.

Checks that the layout and the batch fit every number of hosts that the run may continue with, that
no host name leads to loopback, and that the rendezvous port is free. `require_hosts` then asks the
hosts themselves by ssh.
"""

import shlex
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, LaunchError, LayoutError
from llmsys.launch.hosts.host_checks import check_clock, check_ssh
from llmsys.launch.hosts.hostfile import ANONYMOUS, PATIENCE_SECONDS, Host
from llmsys.launch.hosts.network_interfaces import is_loopback, is_this_host, resolve_addresses
from llmsys.launch.hosts.ssh import CONNECT_SECONDS, SshResult, run_on_all_hosts
from llmsys.launch.launchers.host_commands import Launcher, LaunchPlan, strip_user
from llmsys.launch.launchers.run_bundle import get_bundle_folder
from llmsys.launch.process.run_requirements import require_layout
from llmsys.parallel.port import EVERYWHERE, describe_port_conflict, find_free_port

# torchrun's default, for several hosts and launch.port=0: other hosts cannot be asked for a free
# one
PORT = 29_500
ASK_SECONDS = CONNECT_SECONDS + 2
UNWATCHED_SECONDS = 300  # longest outage without a hang watchdog: the timeout of a collective


def build_launch_plan(
    config: RunConfig,
    hosts: Sequence[Host],
    launcher: Launcher,
    min_hosts: int,
    restarts: int,
    patience_seconds: int = PATIENCE_SECONDS,
    spares: Sequence[Host] = (),
    *,
    must_resolve: bool = True,
    has_standby: bool = False,
) -> LaunchPlan:
    """Check a launch and return its plan.

    Args:
        config: The run.
        hosts: Hosts with their slots, in rank order.
        launcher: Program that starts the ranks.
        min_hosts: Fewest hosts to continue with; 0 means all.
        restarts: Restarts of lost ranks, per host.
        patience_seconds: How long hosts that lost each other wait to meet again.
        spares: Hosts that train only when another host has failed.
        has_standby: Import torch for the next restart while the ranks run.
        must_resolve: Reject a name that this host cannot resolve. Commands that are only printed
            may run elsewhere.

    Returns:
        The settings that every command shares.

    Raises:
        LaunchError: A host, the port or `min_hosts` cannot be used.
        LayoutError: The layout does not fit the ranks.
        ConfigError: The batch does not fit the ranks.
    """
    min_hosts = min_hosts or len(hosts)
    check_launcher(launcher, len(hosts), min_hosts, has_standby=has_standby)
    is_anonymous = hosts[0].name.startswith(ANONYMOUS)
    check_layout(config, hosts, min_hosts, is_anonymous=is_anonymous)
    check_spares(hosts, spares, launcher)
    if launcher != "slurm" and not is_anonymous:
        check_addresses([*hosts, *spares], must_resolve=must_resolve)
    port = config.launch.port
    # a Slurm job derives its port from its id: no node can be asked now
    if launcher != "slurm":
        port = (
            (port or PORT)
            if is_anonymous
            else choose_rendezvous_port(hosts, port, must_resolve=must_resolve)
        )
    return LaunchPlan(
        hosts=tuple(hosts),
        folder=get_bundle_folder(config),
        working_directory=Path.cwd(),
        port=port,
        name="".join(
            letter if letter.isalnum() or letter in "._-" else "-" for letter in config.run.name
        ),
        min_hosts=min_hosts,
        max_restarts=restarts,
        patience_seconds=patience_seconds,
        outage_seconds=round(config.train.hang_timeout_seconds) or UNWATCHED_SECONDS,
        spares=tuple(spares),
        has_standby=has_standby,
    )


def check_launcher(
    launcher: Launcher, num_hosts: int, min_hosts: int, *, has_standby: bool
) -> None:
    """Reject numbers of hosts that are not there, and what a launcher without restarts cannot
    do.
    """
    if not 1 <= min_hosts <= num_hosts:
        raise LaunchError(
            f"--min-hosts {min_hosts} is not possible with {num_hosts} hosts. Use 1 to {num_hosts}."
        )
    if min_hosts < num_hosts and launcher not in ("torchrun", "slurm"):
        raise LaunchError(
            f"--min-hosts {min_hosts}: {launcher} cannot continue with fewer hosts than it "
            "started with. Use --launcher torchrun or --launcher slurm, or leave --min-hosts "
            "out: the same command resumes on hosts of your choice."
        )
    if has_standby and launcher not in ("torchrun", "slurm"):
        raise LaunchError(
            f"--standby: {launcher} does not restart ranks. Use --launcher torchrun, or leave "
            "--standby out: the same command continues from the newest checkpoint."
        )


def check_spares(hosts: Sequence[Host], spares: Sequence[Host], launcher: Launcher) -> None:
    """Reject spares that could not take the place of every host, or a launcher that cannot
    replace one.
    """
    if not spares:
        return
    if launcher not in ("torchrun", "slurm"):
        raise LaunchError(
            f"spares={len(spares)}: {launcher} cannot replace a host. Use --launcher torchrun or "
            "--launcher slurm, or leave spares= out: the same command resumes on hosts of your "
            "choice."
        )
    if len(hosts) == 1:
        raise LaunchError(
            "spares= needs two hosts or more, because the first one holds the rendezvous and "
            "cannot be replaced. Leave it out."
        )
    if len({host.slots for host in (*hosts, *spares)}) > 1:
        sizes = ", ".join(f"{host.name}:{host.slots}" for host in (*hosts, *spares))
        raise LaunchError(
            f"{sizes}: a spare takes the place of any host, so all need the same number of slots. "
            "Give spares as many slots as the hosts have."
        )
    if twice := {host.name for host in hosts} & {host.name for host in spares}:
        raise LaunchError(
            f"spares={', '.join(sorted(twice))} is also in nodes=. Name each host once."
        )


def check_layout(
    config: RunConfig, hosts: Sequence[Host], min_hosts: int, is_anonymous: bool = False
) -> None:
    """Check that layout and batch fit the ranks of all hosts, and of every smaller number down
    to `min_hosts`.
    """
    for count in range(len(hosts), min_hosts - 1, -1):
        ranks = sum(host.slots for host in hosts[:count])
        try:
            require_layout(config, ranks)
            # their plans need torch, whose import takes seconds
            if not config.objective.uses_windows:
                from llmsys.train.build_objective import build_run_plan

                build_run_plan(config, config.resolve_layout(ranks).data_parallel_size, 0)
        except (LayoutError, ConfigError) as error:
            remedy = (
                ""
                if count == len(hosts)
                else f" Or use --min-hosts {count + 1}, so that the run ends on fewer."
            )
            # hosts of Slurm's choice are not named, and their ranks are those of the config
            each = f" with launch.processes={config.launch.processes} each" if is_anonymous else ""
            raise type(error)(
                f"on {count} of {len(hosts)} hosts{each}, {ranks} ranks: {error}{remedy}"
            ) from None


def check_addresses(hosts: Sequence[Host], *, must_resolve: bool) -> None:
    """Reject a name that resolves to loopback: other hosts would look for the ranks on
    themselves.
    """
    if len(hosts) == 1:
        return
    for host in hosts:
        try:
            found = resolve_addresses(strip_user(host.name))
        except LaunchError:
            if must_resolve:
                raise
            continue
        for address in found:
            if is_loopback(address):
                raise LaunchError(
                    f"{host.name} resolves to {address} on {socket.gethostname()}, a loopback "
                    "address, which on every other host is that host itself. Use an address that "
                    "the others reach, or correct /etc/hosts."
                )


def choose_rendezvous_port(hosts: Sequence[Host], port: int, *, must_resolve: bool) -> int:
    """Return the port where ranks meet; raise LaunchError when it is in use. Only this host can
    be asked.
    """
    head = strip_user(hosts[0].name)
    try:
        if not is_this_host(head):
            return port or PORT
    except LaunchError:
        if must_resolve:
            raise
        return port or PORT
    if not port and len(hosts) == 1:
        return find_free_port()
    chosen = port or PORT
    if reason := describe_port_conflict(chosen, EVERYWHERE):
        raise LaunchError(
            f"launch.port={chosen} is in use on {head} ({reason}). The rendezvous needs a free "
            "port. Choose another with launch.port=N, or stop the process that holds it."
        )
    return chosen


def require_hosts(plan: LaunchPlan, names: Sequence[str]) -> None:
    """Ask hosts by ssh, all at once, whether they can take part.

    Args:
        plan: The launch, whose folder exists.
        names: Hosts to ask, as ssh names them.

    Raises:
        LaunchError: A host cannot be reached, its clock is wrong, or it does not see the launch
            folder.
    """
    # A host that sees this file shares the run folder.
    marker = plan.folder / f".seen-{uuid.uuid4().hex[:12]}"
    marker.touch()
    try:
        # The date shows whether the host's clock agrees with ours.
        look = f"test -e {shlex.quote(str(marker))} && echo seen; date +%s.%N"
        answers = run_on_all_hosts(names, lambda _: look, ASK_SECONDS)
    finally:
        marker.unlink()
    if wrong := [
        problem
        for name, answer in answers.items()
        if (problem := _describe_host_problem(name, answer, plan.folder.parent))
    ]:
        raise LaunchError(
            "\n".join([*wrong, "Nothing was started. `llmsys preflight` checks everything."])
        )


def _describe_host_problem(name: str, answer: SshResult, run: Path) -> str:
    """Return the reason why a host cannot take part and the fix; "" where it can."""
    for found in (check_ssh(name, answer), check_clock(name, answer)):
        if found.remedy:
            return f"{name} {found.finding}. {found.remedy}"
    if "seen" not in answer.output.split():
        return (
            f"{name} does not see the files that this host wrote to {run}, but every rank writes "
            "its shard of a checkpoint. Mount one shared folder on all hosts, and set run.folder "
            "to a path in it."
        )
    return ""

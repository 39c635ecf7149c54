"""Hosts on one machine, for tests: network namespaces joined by a bridge, each with its own name,
address, loopback,
/etc/hosts, mounts and sshd. They share this machine's disk and processors, as hosts with one shared
file system do.

Needs root, Debian's iproute2, openssh-server, openssh-client (and pdsh, where a test uses it) and
leave to make namespaces; `why_not` says what is missing. Everything made is removed at the end of
the block.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.paths import ROOT

PROGRAMS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_SECONDS = 30

SSHD = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
SetEnv PATH={path}
"""
SSH = """Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
BEGIN = """hostname {name}
mount --make-rprivate /
mkdir -p /run/sshd
{before}
exec {sshd} -D -e -f {config}
"""


@dataclass
class Hosts:
    """Hosts that are up. `env` has an `ssh` on its PATH that finds their keys; commands begin in
    the checkout.
    """

    folder: Path
    prefix: str
    names: Sequence[str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """Where a test may let several commands speak."""
        return self.folder / "log"

    @property
    def env(self) -> dict[str, str]:
        """The environment of a shell on one of the hosts."""
        path = f"{self.folder}/bin:{Path(sys.executable).parent}:{SYSTEM_PATH}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def inside(self, name: str, *words: str) -> list[str]:
        """The command line that runs `words` on a host, in the namespaces of its sshd."""
        return ["nsenter", "-t", str(self.daemons[name].pid), "-n", "-m", "-u", f"-w{ROOT}", *words]

    def run(
        self, name: str, *words: str, timeout_seconds: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end on a host, and give what was said."""
        command = self.inside(name, *words)
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_seconds
        )

    def start(self, name: str, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Begin on a host; what is said goes to `log`."""
        with log.open("ab") as opened:
            return subprocess.Popen(
                self.inside(name, *words), env=self.env, stdout=opened, stderr=opened
            )

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each host."""
        return {name: f"10.77.0.{number}" for number, name in enumerate(self.names, 1)}

    def pids(self, name: str) -> list[int]:
        """The processes of a host, but for the sshd that holds it."""
        return [pid for pid in _pids(f"{self.prefix}{name}") if pid != self.daemons[name].pid]

    def crash(self, name: str) -> None:
        """Kill everything on a host at once, as the loss of its power does.

        All of it stands still before any of it ends: a process that saw another one die would tell
        of it, as srun asks Slurm to end a step that has lost a node. Slurm asks a minute later,
        when another start has the step's name.
        """
        halted: set[int] = set()
        while running := set(self.pids(name)) - halted:
            _send(signal.SIGSTOP, running)
            halted |= running
        _send(signal.SIGKILL, halted)

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs in a host's network."""
        listed = subprocess.run(
            ["ip", "netns", "pids", f"{self.prefix}{name}"], capture_output=True, text=True
        )
        found = []
        for pid in listed.stdout.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def commands(self, name: str) -> list[tuple[psutil.Process, list[str]]]:
        """A host's processes with what each was started with."""
        found = []
        for process in self.processes(name):
            with suppress(psutil.Error):
                found.append((process, process.cmdline()))
        return found

    def signal(self, name: str, number: int) -> None:
        """Send a signal to every process of a host, its sshd too: SIGSTOP halts it, SIGKILL ends
        it for good.
        """
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def cut(self, name: str) -> None:
        """Take a host's cable out."""
        _ip("-n", f"{self.prefix}net", "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put a host's cable back."""
        _ip("-n", f"{self.prefix}net", "link", "set", f"to-{name}", "up")

    def stop_sshd(self, name: str) -> None:
        """End a host's sshd, so that ssh is refused. Nothing can be run `inside` it afterwards."""
        self.daemons[name].terminate()
        self.daemons[name].wait()


def find_missing_requirement() -> str:
    """Why no hosts can be made here; "" when they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = {
        package
        for program, package in PROGRAMS.items()
        if shutil.which(program, path=SYSTEM_PATH) is None
    }
    if missing:
        return f"apt-get install {' '.join(sorted(missing))} is wanted"
    probe = f"llmsys-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"network namespaces are forbidden: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def real_hosts(
    folder: Path, names: Sequence[str], before: dict[str, str] | None = None
) -> Iterator[Hosts]:
    """Hosts of these names for the block. `before` has shell lines that a host runs before its
    sshd starts.
    """
    hosts = Hosts(folder, f"llmsys-{os.getpid()}-", names)
    _write_keys(folder)
    try:
        _join(hosts)
        for name in names:
            _start_sshd(hosts, name, (before or {}).get(name, ""))
        _wait_for(hosts)
        yield hosts
    finally:
        _remove(hosts)


def _write_keys(folder: Path) -> None:
    for key in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
        )
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    (folder / "bin").mkdir()
    # Hosts share their processes' numbers with this machine, and a host's pkill must not reach
    # beyond it.
    for name, options in (("ssh", f"-F {folder}/ssh_config"), ("pkill", "--ns $$ --nslist net")):
        program = folder / "bin" / name
        program.write_text(
            f'#!/bin/sh\nexec {shutil.which(name, path=SYSTEM_PATH)} {options} "$@"\n'
        )
        program.chmod(0o755)


def _join(hosts: Hosts) -> None:
    """A namespace with a bridge, a namespace for each host, and a cable between."""
    net = f"{hosts.prefix}net"
    _ip("netns", "add", net)
    _ip("-n", net, "link", "add", "bridge", "type", "bridge")
    _ip("-n", net, "link", "set", "bridge", "up")
    table = "127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n" for name, address in hosts.addresses.items()
    )
    for name, address in hosts.addresses.items():
        host = f"{hosts.prefix}{name}"
        _ip("netns", "add", host)
        settings = Path("/etc/netns") / host
        settings.mkdir(parents=True)
        (settings / "hosts").write_text(table)
        _ip(
            "-n",
            net,
            "link",
            "add",
            f"to-{name}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            host,
        )
        _ip("-n", net, "link", "set", f"to-{name}", "master", "bridge", "up")
        _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")
        _ip("-n", host, "link", "set", "lo", "up")


def _start_sshd(hosts: Hosts, name: str, before: str) -> None:
    """sshd in the host's own network, mounts and name. `ip netns exec` has put its /etc/hosts in
    place.
    """
    config, sshd = hosts.folder / f"sshd-{name}", shutil.which("sshd", path=SYSTEM_PATH)
    (hosts.folder / "bin" / name).mkdir()  # what only this host has on its PATH
    path = (
        f"{hosts.folder}/bin/{name}:{hosts.folder}/bin:{Path(sys.executable).parent}:{SYSTEM_PATH}"
    )
    config.write_text(SSHD.format(folder=hosts.folder, path=path))
    script = BEGIN.format(name=name, before=before, sshd=sshd, config=config)
    words = [
        "ip",
        "netns",
        "exec",
        f"{hosts.prefix}{name}",
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-ec",
        script,
    ]
    with (hosts.folder / f"sshd-{name}.log").open("wb") as log:
        hosts.daemons[name] = subprocess.Popen(words, stdout=log, stderr=log)


def _wait_for(hosts: Hosts) -> None:
    """Until every sshd listens."""
    deadline = time.monotonic() + START_SECONDS
    for name in hosts.names:
        log = hosts.folder / f"sshd-{name}.log"
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline, f"sshd of {name} did not start: {log.read_text()}"
            assert hosts.daemons[name].poll() is None, f"sshd of {name} ended: {log.read_text()}"
            time.sleep(0.02)


def _remove(hosts: Hosts) -> None:
    """End every process in the namespaces, then remove these; what was never made is no trouble."""
    for name in (*hosts.names, "net"):
        host = f"{hosts.prefix}{name}"
        _send(signal.SIGKILL, _pids(host))
        subprocess.run(["ip", "netns", "delete", host], capture_output=True)
        shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)
    for daemon in hosts.daemons.values():
        daemon.wait()


def _pids(namespace: str) -> list[int]:
    """The processes of a network namespace; none where it was never made."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"

"""Slurm's own daemons in their own folder, for tests: munged, slurmctld, and slurmd on each
node.

The node is this machine, or nodes are hosts made of namespaces (tests/helpers/hosts.py), the first
of which controls. Needs root and Debian's packages: apt-get install --no-install-recommends
slurm-wlm munge
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llmsys.parallel.port import find_free_port
from tests.helpers.hosts import Hosts
from tests.helpers.process import wait_until

PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
LOOK = 0.3
"""Seconds between two questions to slurmctld."""
CONF = """ClusterName=scratch
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmdTimeout=3000
MessageTimeout=60
KillWait=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _build_local_node(name: str, *words: str) -> list[str]:
    return list(words)


@dataclass
class Slurm:
    """A Slurm that is up. `inside` gives the line that runs words on one of its hosts; the first
    one controls.
    """

    folder: Path
    head: str
    addresses: dict[str, str]
    inside: Callable[..., list[str]]
    base: dict[str, str]
    ports: tuple[int, int]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What the commands of Slurm need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def said(self, *words: str) -> str:
        """What a command says on the host that controls."""
        done = subprocess.run(
            self.inside(self.head, *words),
            env=self.base | self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: int | str, field: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        found = re.search(
            rf"\b{field}=(\S*)", self.said("scontrol", "--oneliner", "show", "job", str(number))
        )
        assert found is not None, field
        return found[1]

    def nodes(self, *states: str) -> set[str]:
        """The nodes that are in one of these states."""
        lines = self.said("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return {name for name, state in map(str.split, lines) if state in states}

    def start_node(self, name: str) -> None:
        """Start slurmd on a node, as its boot does."""
        self._start(name, "slurmd", "-D")

    def notice_silence(self, *names: str) -> None:
        """Tell slurmctld to give up nodes that do not answer, long before its SlurmdTimeout: no
        clock decides.
        """
        self.said(
            "scontrol", "update", f"NodeName={','.join(names)}", "State=DOWN", "Reason=silence"
        )

    def _configure(self) -> None:
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN"
            for name, address in self.addresses.items()
            if name != self.head or len(self.addresses) == 1
        )
        text = CONF.format(
            head=self.head, address=self.addresses[self.head], folder=self.folder, nodes=nodes,
            port=self.ports[0], other_port=self.ports[1],
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        command = self.inside(name, shutil.which(words[0], path=path) or words[0], *words[1:])
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=self.base | self.environment, stdout=log, stderr=log
            )
        self.daemons.append(daemon)
        return daemon

    def _begin(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "munge").mkdir(mode=0o700)
        key, door = self.folder / "munge" / "key", self.folder / "munge" / "socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        # none is used, and none is looked for
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._configure()
        parts = [
            f"--{part}-file={self.folder}/munge/{part}" for part in ("key", "pid", "log", "seed")
        ]
        munged = self._start(
            self.head, "munged", "--foreground", "--force", f"--socket={door}", *parts
        )
        wait_until(lambda: door.exists() or munged.poll() is not None, "munged did not start")
        self._start(self.head, "slurmctld", "-D", "-c")
        nodes = [name for name in self.addresses if name != self.head or len(self.addresses) == 1]
        for name in nodes:
            self.start_node(name)
        wait_until(
            lambda: self._is_up(set(nodes)), f"nodes never came up, see {self.folder}/*.log", LOOK
        )

    def _is_up(self, nodes: set[str]) -> bool:
        try:
            return self.nodes("idle") == nodes
        except AssertionError:
            assert all(daemon.poll() is None for daemon in self.daemons), (
                self.folder / "daemons.log"
            ).read_text()
            return False

    def _end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()
        _end_steps(self.folder / "slurm.conf")


@contextmanager
def _running(slurm: Slurm) -> Iterator[Slurm]:
    try:
        slurm._begin()
        yield slurm
    finally:
        slurm._end()


def find_missing_requirement() -> str:
    """Why no Slurm can be started here; "" when one can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [
        package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None
    ]
    if missing:
        return f"apt-get install {' '.join(missing)} is wanted"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextmanager
def real_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm whose only node is this machine, for the block; yields the environment in which
    sbatch finds it.
    """
    name = socket.gethostname().split(".")[0]
    slurm = Slurm(
        folder,
        name,
        {name: "127.0.0.1"},
        _build_local_node,
        dict(os.environ),
        (find_free_port(), find_free_port()),
    )
    with _running(slurm):
        yield slurm.environment


@contextmanager
def start_slurm(hosts: Hosts, folder: Path) -> Iterator[Slurm]:
    """A Slurm on hosts, for the block: the first controls, the others are nodes."""
    slurm = Slurm(folder, hosts.names[0], hosts.addresses, hosts.inside, hosts.env, (6817, 6818))
    with _running(slurm):
        yield slurm


def _end_steps(conf: Path) -> None:
    """Slurm leaves the steps of jobs to themselves when its daemons end.

    They write their title over the first part of their environment, so it is read as bytes.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (
                process.name() == "slurmstepd"
                and str(conf).encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            ):
                process.kill()

"""A Slurm of one node in a folder of its own, for tests: munged, slurmctld and slurmd of Debian's slurm-wlm.

apt-get install --no-install-recommends slurm-wlm munge
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from llmsys.port import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
CONF = """ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no Slurm can be started here; "" when one can."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "" if os.geteuid() == 0 else "its daemons need root"


@contextmanager
def real_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons for the block and yield the environment in which sbatch finds them."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = {"port": free_port(), "other_port": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname().split(".")[0], folder=folder, **ports))
    environment = {"SLURM_CONF": str(conf)}
    parts = [f"--{part}-file={folder}/munge/{part}" for part in ("key", "pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *parts]
    daemons = [_start(munged, environment)]
    try:
        while not (folder / "munge" / "socket").exists():
            assert daemons[0].poll() is None, "munged ended at once"
            time.sleep(0.02)
        daemons += [_start(["slurmctld", "-D", "-c"], environment), _start(["slurmd", "-D"], environment)]
        _wait_for_node(environment)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        _end_steps(conf)


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


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [_find(words[0]) or words[0], *words[1:]]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait_for_node(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"], env=os.environ | environment, capture_output=True, text=True
        )
        if told.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise AssertionError(f"the node of the scratch Slurm never came up: {told.stdout}{told.stderr}")

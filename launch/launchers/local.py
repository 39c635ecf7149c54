"""Start the ranks of one machine for `llmsys train`, and report how they ended.

torch runs under torchrun, DeepSpeed and accelerate under their own launchers. All start
launch/train.py. A single process needs no launcher, except DeepSpeed's.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError, LostRankError
from llmsys.estimate.device_profile import MACHINE_PROFILE
from llmsys.launch.launchers.run_probe import find_machine_profile
from llmsys.launch.process.parent_watch import build_child_environment
from llmsys.launch.process.run_requirements import require_datasets, require_layout
from llmsys.launch.process.signal_forwarding import forward_signals, ignore_own_signals
from llmsys.launch.train import LOST_PEER, UNMET
from llmsys.parallel.port import describe_port_conflict, find_free_port
from llmsys.storage.paths import find_import_root

SCRIPT = Path(__file__).resolve().parent.parent / "train.py"
HOST = "127.0.0.1"


def run_local_ranks(config: RunConfig, words: Sequence[str]) -> None:
    """Run `launch/train.py WORDS` on launch.processes processes of this machine and wait for the
    end. A machine whose device has no profile is measured first.

    Args:
        config: The run.
        words: CONFIG and overrides, as the ranks get them.

    Raises:
        LayoutError, ConfigError, DataError: The run cannot start; no rank was started.
        LostRankError: A signal killed a process.
        SystemExit: A rank or launcher failed otherwise; it has printed its own message, and this
            carries its status.
    """
    processes = config.launch.processes or _count_accelerators()
    require_layout(config, processes)
    require_datasets(config, words)
    port = _check_port(config.launch.port) or find_free_port()
    command = build_local_command(config.engine.kind, processes, port, words)
    environment = _build_environment(config, processes)
    profile = find_machine_profile(config, processes, environment)
    measured = {} if profile is None else {MACHINE_PROFILE: str(profile)}
    status = _run_launcher(command, environment | measured)
    if status == 0:
        return
    killed_by = find_signal(status)
    if killed_by == signal.SIGINT:
        # Ctrl-C: the status that shells give, without a message.
        raise SystemExit(128 + killed_by)
    if not killed_by:
        raise SystemExit(LOST_PEER if status == UNMET else status)
    raise LostRankError(
        f"training stopped: a process was killed by signal {killed_by}. Checkpoints are intact: "
        f"run the same command again to continue from the newest one in {config.run.folder}."
    )


def _run_launcher(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a launcher to its end, and forward requests to stop to the ranks."""
    with ignore_own_signals() as more:
        process = subprocess.Popen(command, env=environment | more)
    with forward_signals(process.pid):
        return process.wait()


def build_local_command(engine: str, processes: int, port: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts `processes` ranks of launch/train.py on this machine."""
    script = [str(SCRIPT), *words]
    if engine == "deepspeed":
        # finds the deepspeed of this environment also where it is not activated
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        launcher = shutil.which("deepspeed", path=places)
        if launcher is None:
            raise LaunchError(
                "The deepspeed launcher is not on PATH. Install it: `pip install deepspeed`."
            )
        # An empty hostfile path keeps it to this machine; the interpreter is the one we run under.
        here = ["--hostfile", os.devnull, "--master_addr", HOST, "--master_port", str(port)]
        return [
            sys.executable,
            launcher,
            *here,
            "--num_accelerators",
            str(processes),
            "--quiet",
            *script,
        ]
    if processes == 1:
        return [sys.executable, *script]
    if engine == "accelerate":
        here = ["--num_processes", str(processes), "--main_process_port", str(port)]
        return [sys.executable, "-m", "llmsys.launch.launchers.accelerate", *here, *script]
    here = [
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        f"--master-addr={HOST}",
        f"--master-port={port}",
    ]
    return [sys.executable, "-m", "llmsys.launch.launchers.torchrun", *here, *script]


def _check_port(port: int) -> int:
    """Return the port; raise LaunchError where it is in use."""
    if port and (reason := describe_port_conflict(port, HOST)):
        raise LaunchError(
            f"launch.port={port} is in use on {HOST} ({reason}). The rendezvous needs a free "
            "port. Use launch.port=0 to let the system choose, or stop the process that holds it."
        )
    return port


def _build_environment(config: RunConfig, processes: int) -> dict[str, str]:
    cores = os.cpu_count() or 1
    environment = build_child_environment()
    environment.setdefault(
        "OMP_NUM_THREADS", str(config.train.threads_per_process or max(1, cores // processes))
    )
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(find_import_root()), environment.get("PYTHONPATH", "")])
    )
    if not _count_accelerators(or_one=False):
        environment.setdefault("DS_ACCELERATOR", "cpu")
        # gloo would bind to the address of this host's name, and all ranks are here
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _count_accelerators(or_one: bool = True) -> int:
    """Return the number of accelerators of this machine; with `or_one`, at least 1."""
    import torch

    return torch.cuda.device_count() or int(or_one)


def find_signal(status: int) -> int:
    """Return the signal that ended a process, from its exit status; 0 when it exited by itself."""
    if status < 0:
        return -status
    if status > 128:  # shells return 128 + signal, DeepSpeed's launcher 256 - signal
        return status - 128 if status < 192 else 256 - status
    return 0

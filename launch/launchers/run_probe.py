"""Measure this machine in about ten seconds before a run on a device without a profile, for
`llmsys train`.

`python -m llmsys.launch.launchers.run_probe FILE THREADS`, under torchrun where the run has several
processes, writes the profile. The file is kept for 30 days in the cache folder.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import (
    MACHINE_PROFILE,
    find_device_by_driver_name,
    load_device_profile,
)
from llmsys.launch.process.parent_watch import die_with_parent
from llmsys.log import configure_logging, get_logger
from llmsys.parallel.port import find_free_port

# The measurement takes ten seconds of an idle machine, and its imports a few more.
MAX_SECONDS = 60.0
SWITCH = "`llmsys train --no-probe` measures nothing."

log = get_logger("llmsys.launch.launchers.run_probe")


def find_machine_profile(
    config: RunConfig, processes: int, environment: dict[str, str]
) -> Path | None:
    """Find the probe of this machine with a run's processes and threads, and measure it where
    none is fresh.

    Args:
        config: The run.
        processes: Its processes on this machine.
        environment: Variables of the ranks.

    Returns:
        The file of the profile; None where the device has one already, `LLMSYS_MACHINE_PROFILE`
        is set, or the measurement failed, which a log line says.
    """
    if config.flops.device is not None or MACHINE_PROFILE in os.environ:
        return None
    threads = config.train.threads_per_process or max(1, (os.cpu_count() or 1) // processes)
    workers = _describe_workers(processes, threads)
    if workers is None:
        return None
    # torch is imported for runs that need it alone
    from llmsys.calibrate.probe_cache import BUSY, get_cache_file, load_cached_probe

    path = get_cache_file(workers)
    if load_cached_probe(path) is None:
        log.info(
            "this machine has no profile: measuring it for about ten seconds, for the time of a "
            "step. %s is kept for 30 days; %s", path, SWITCH,
        )  # fmt: skip
        if (problem := _run_probe(path, processes, threads, environment)) is not None:
            log.warning("this machine could not be measured, so no time is predicted: %s", problem)
            return None
        profile = load_device_profile(str(path))
        rates = ", ".join(
            f"{number} {flops / 1e9:,.0f} GFLOP/s" for number, flops in profile.peak_flops.items()
        )
        memory = f"{profile.memory_bandwidth / 1e9:.3g} GB/s"
        log.info("measured, of each process: %s in products, %s of memory", rates, memory)
        if BUSY in profile.sources:
            log.warning(
                "other programs used this machine meanwhile (%s), so the predicted time is too "
                "long; the next run measures again", profile.sources[BUSY],
            )  # fmt: skip
    return path


def _describe_workers(processes: int, threads: int) -> str | None:
    """Return what a probe is measured with; None where the accelerator has a profile, or its
    name is not known.
    """
    described = f"{processes} processes of {threads} threads"
    import torch

    if not torch.cuda.is_available():
        return described
    # asking torch would take memory of the device for this whole process
    tool = shutil.which("nvidia-smi")
    asked = [str(tool), "--query-gpu=name", "--format=csv,noheader"]
    said = "" if tool is None else subprocess.run(asked, capture_output=True, text=True).stdout
    name = said.partition("\n")[0].strip()
    is_known = not name or find_device_by_driver_name(name) is not None
    return None if is_known else f"{described} on {name}"


def _run_probe(path: Path, processes: int, threads: int, environment: dict[str, str]) -> str | None:
    """Measure in processes of their own; return what went wrong, None where nothing did."""
    command = build_probe_command(path, processes, threads)
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no result after {MAX_SECONDS:.0f} s. {SWITCH}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0 and path.is_file():
        return None
    last = [line for line in said.splitlines() if line.strip()][-1:]
    return f"status {process.returncode}, {' '.join(last) or 'without a message'}"


def build_probe_command(path: Path, processes: int, threads: int) -> list[str]:
    """Build the command that measures this machine.

    Args:
        path: File to write.
        processes: Processes that measure at the same time.
        threads: CPU threads of each.

    Returns:
        The words of the command.
    """
    module = ["-m", "llmsys.launch.launchers.run_probe", str(path), str(threads)]
    if processes == 1:
        return [sys.executable, *module]
    here = [
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        f"--master-port={find_free_port()}",
    ]
    return [sys.executable, "-m", "llmsys.launch.launchers.torchrun", *here, *module]


def main(arguments: Sequence[str]) -> int:
    """Measure on this process, write the profile on rank 0, and return the exit status."""
    die_with_parent()
    configure_logging()
    file, threads = arguments
    from llmsys.calibrate.probe_cache import write_probe
    from llmsys.calibrate.run_probe import measure_run_machine

    profile = measure_run_machine(int(threads))
    if profile is not None:
        write_probe(Path(file), profile)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

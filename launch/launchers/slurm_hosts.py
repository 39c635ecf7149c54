"""Run one task on each node of a Slurm job, and on a spare instead of a node that fails.

`python -m llmsys.launch.launchers.slurm_hosts --trainers=8 --task=SHELL NODE …` is the job step of
a job with spares: one srun for each of the first nodes. It ends with one status for all.

Invariants:
- SIGTERM, which Slurm sends to every process of a job, ends the tasks and not this process.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from llmsys.launch.launchers.spare_hosts import Replacement
from llmsys.launch.train import LOST_PEER, STOPPED

LOOK_SECONDS = 0.2


def run_on_nodes(
    nodes: Sequence[str],
    num_trainers: int,
    start: Callable[[str], "subprocess.Popen[bytes]"],
    is_lost: Callable[[str], bool],
) -> int:
    """Run a task on the first nodes, and on a further one for each that fails.

    Args:
        nodes: Nodes of the job, spares last. The first one holds the rendezvous and is not
            replaced.
        num_trainers: Number of nodes that train.
        start: Starts the task on a node.
        is_lost: Whether a node has left the job. srun ends with 0 when its node fails in a job with
            --no-kill.

    Returns:
        0, 75 when the run was stopped and has saved, or the largest status of the nodes that were
        not replaced.
    """
    spares = list(nodes[num_trainers:])
    running = {node: start(node) for node in nodes[:num_trainers]}
    ended: dict[str, int] = {}
    replacement = Replacement(nodes[0])
    while running:
        time.sleep(LOOK_SECONDS)
        for node, process in list(running.items()):
            if (status := process.poll()) is not None:
                del running[node]
                ended[node] = (
                    LOST_PEER
                    if status == 0 and is_lost(node)
                    else status
                    if status >= 0
                    else 128 - status
                )
                replacement.add_failure(node, ended[node])
        for node in replacement.list_due(ended, running):
            if not spares:
                break
            spare = spares.pop(0)
            print(
                f"llmsys: {node} failed (status {ended.pop(node)}); {spare} takes its place",
                file=sys.stderr,
                flush=True,
            )
            running[spare] = start(spare)
    statuses = set(ended.values())
    return STOPPED if STOPPED in statuses else max(statuses)


def start_srun(node: str, task: str) -> "subprocess.Popen[bytes]":
    """Start a job step of one task on a node.

    Args:
        node: Name of the node.
        task: Shell command.

    Returns:
        srun, which ends when the task or the node does.
    """
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    words = [
        "srun",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cores}",
    ]
    return subprocess.Popen([*words, "--kill-on-bad-exit=0", "--wait=0", "bash", "-c", task])


def is_out_of_job(node: str) -> bool:
    """Return whether Slurm has taken a node out of this job; False where Slurm does not answer.

    Args:
        node: Name of the node.

    Returns:
        True for a node that has failed.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    nodes = _ask_slurm("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    names = _ask_slurm("scontrol", "show", "hostnames", nodes) if nodes else ""
    return bool(names) and node not in names.split()


def _ask_slurm(*words: str) -> str:
    """Return what a command of Slurm prints; "" where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tasks; return the status of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m llmsys.launch.launchers.slurm_hosts", description=__doc__
    )
    parser.add_argument("--trainers", type=int, required=True, help="number of nodes that train")
    parser.add_argument("--task", required=True, help="shell command of a node")
    parser.add_argument("nodes", nargs="+", help="nodes of the job, spares last")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which srun would inherit
    return run_on_nodes(
        given.nodes, given.trainers, lambda node: start_srun(node, given.task), is_out_of_job
    )


if __name__ == "__main__":
    sys.exit(main())

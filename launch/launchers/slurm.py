"""Format a Slurm job that starts a run, stops it before the time limit, and requeues it until it is
finished.

One task per node runs torchrun; the rendezvous is on the first node. NOTICE_SECONDS before the time
limit Slurm sends SIGUSR1 to the batch script, which forwards it to the ranks: they save and exit
with 75, and the job is requeued. After a node failure Slurm requeues the job itself, unless
`min_hosts` nodes are left or a spare takes its place. Slurm does not notice the loss of the first
node of such a job, where the script runs: the other nodes then requeue it.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from llmsys.errors import LaunchError
from llmsys.launch.launchers.host_commands import (
    LaunchPlan,
    build_torchrun_arguments,
    join_with_variables,
    require_even_slots,
    strip_user,
)
from llmsys.launch.train import STOPPED
from llmsys.log import has_secret, redact_secrets
from llmsys.storage.local_files import LOCK_NAME

NOTICE_SECONDS = 300  # before the time limit: enough for a step, a save, and a margin
AIR_SECONDS = 60  # margin over the longest outage that ranks of a lost node survive
LOOK_SECONDS = 30  # interval at which the other nodes check that the first is still in the job
FIRST_PORT = 20_000
NEEDS_QUOTES = re.compile(r"[\s\"'\\#]")

BODY = """\
unset LLMSYS_PARENT  # names a process of the host that submitted
{enter}
export MASTER_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT={port}
saved() {{ ls -1 {checkpoints} 2>/dev/null | tail -n 1; }}
before=$(saved)
# A node that was cut off may still have ranks, and one of them this run, until it notices.
[ -z "${{SLURM_RESTART_COUNT:-}}" ] || flock --wait {held} {lock} true

{run} &
step=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # signals the job's steps, not this script
trap : TERM  # the steps have it too
wait "$step"; status=$?
# A signal may have ended the wait, and not the step.
while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done

if [ "$status" -eq {stopped} ]; then
    # Slurm itself is ending the job: cancelled, or to be queued again, or at its time limit
    if scontrol show job "$SLURM_JOB_ID" | grep -qE 'JobState=(COMPLETING|CANCELLED)'; then
        exit {stopped}
    fi
    if [ "$(saved)" = "$before" ]; then
        echo "llmsys: not queued again: nothing was saved between start and stop." \\
            "Ask for more time." >&2
        exit {stopped}
    fi
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""

RUN = """\
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
    --kill-on-bad-exit=0 --wait=0{stay} \\
    bash -c {task}"""
# One step for each node: a spare takes the place of one that fails.
RUN_WITH_SPARES = """\
{python} -m llmsys.launch.launchers.slurm_hosts --trainers={trainers} --task={task} \\
    $(scontrol show hostnames "$SLURM_JOB_NODELIST")"""

# A job with --no-kill that loses the node of its script would otherwise idle until its time limit.
WATCH = """\
[ "$SLURMD_NODENAME" = "$MASTER_HOST" ] || while sleep {seconds} && kill -0 $$; do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && [ -n "$nodes" ] || continue
    scontrol show hostnames "$nodes" | grep -qx "$MASTER_HOST" || scontrol requeue "$SLURM_JOB_ID"
done </dev/null >/dev/null 2>&1 &
"""


def format_sbatch_script(
    plan: LaunchPlan, *, chosen: bool, gpus: int, port: int, more: Sequence[str] = ()
) -> str:
    """Return the text of a batch script.

    Args:
        plan: The launch. Hosts must have equal slots.
        chosen: Slurm chooses as many nodes as the plan has hosts; otherwise the job asks for those
            very nodes.
        gpus: Accelerators per node; 0 asks for none.
        port: Rendezvous port; 0 derives one from the job id.
        more: Further options of sbatch.

    Returns:
        The script for `sbatch`.

    Raises:
        LaunchError: Slots differ, or an option holds a secret or several lines.
    """
    slots = require_even_slots(plan.hosts, "a Slurm job")
    nodes = len(plan.hosts) + len(plan.spares)
    options = [
        f"--job-name={plan.name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--requeue",
    ]
    options += [
        "--open-mode=append",
        # B: the batch script alone gets it, and forwards it to the ranks
        f"--signal=B:USR1@{NOTICE_SECONDS}",
        f"--output={_escape_percent(plan.folder)}/slurm-%j.out",
    ]
    if not chosen:
        options.append(
            f"--nodelist={','.join(strip_user(host.name) for host in (*plan.hosts, *plan.spares))}"
        )
    options += (
        [f"--gpus-per-node={gpus}"] * bool(gpus)
        + ["--no-kill"] * (plan.min_hosts < nodes)
        + list(more)
    )
    head = "".join(f"#SBATCH {_quote_option(option)}\n" for option in options)
    return "#!/bin/bash\n" + head + "\n" + _format_job_body(plan, slots, port)


def _escape_percent(folder: Path) -> str:
    """Return a path for Slurm's output files, where %j is the job id."""
    return str(folder).replace("%", "%%")


def _quote_option(option: str) -> str:
    """Return an option as a `#SBATCH` line takes it: sbatch splits at blanks, and reads quotes and
    backslashes.

    Raises LaunchError for an option that holds a secret or several lines.
    """
    if has_secret(option) or "\n" in option:
        reason = (
            "several lines"
            if "\n" in option
            else "a secret, and job.sbatch is in the shared run folder"
        )
        raise LaunchError(
            f"--sbatch={redact_secrets(option)!r} holds {reason}. Leave it out, and set it in the "
            "environment of every node, or in a file that only you can read."
        )
    if not NEEDS_QUOTES.search(option):
        return option
    return '"' + option.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _format_job_body(plan: LaunchPlan, slots: int, port: int) -> str:
    checkpoints: Path = plan.folder.parent / "checkpoints"
    task, python = shlex.quote(_format_node_task(plan, slots)), shlex.quote(plan.interpreter)
    if plan.spares:
        run = RUN_WITH_SPARES.format(python=python, trainers=len(plan.hosts), task=task)
    else:
        run = RUN.format(stay=" --no-kill" if plan.min_hosts < len(plan.hosts) else "", task=task)
    return BODY.format(
        enter=f"cd {shlex.quote(str(plan.working_directory))} && . "
        f"{shlex.quote(str(plan.folder / 'environment.sh'))} || exit",
        # The job number: jobs that share a node take different ports.
        port=port or f"$(({FIRST_PORT} + SLURM_JOB_ID % 20000))",
        checkpoints=shlex.quote(str(checkpoints)),
        held=plan.outage_seconds + AIR_SECONDS,
        lock=shlex.quote(str(plan.folder.parent / LOCK_NAME)),
        run=run,
        stopped=STOPPED,
    )


def _format_node_task(plan: LaunchPlan, slots: int) -> str:
    """Return the shell command of each node: torchrun, with $SLURM and $MASTER names left for
    the node's shell.
    """
    # after a requeue, agents must not meet those of the start before
    identity = "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    words = build_torchrun_arguments(
        plan, slots, "$MASTER_HOST:$PORT", identity, "$SLURMD_NODENAME"
    )
    may_lose_nodes = plan.min_hosts < len(plan.hosts) or bool(plan.spares)
    watch = WATCH.format(seconds=LOOK_SECONDS) if may_lose_nodes else ""
    return f"{watch}exec {join_with_variables(words, ('SLURM', 'MASTER'))}"

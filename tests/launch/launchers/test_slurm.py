"""Laws of the script of a Slurm job, held to a Slurm of three lines: what it does when Slurm
says this or that.
"""

import os
import shlex
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from llmsys.errors import LaunchError
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.launchers import slurm_hosts
from llmsys.launch.launchers.host_commands import LaunchPlan
from llmsys.launch.launchers.slurm import WATCH, format_sbatch_script
from llmsys.launch.train import STOPPED
from llmsys.storage.folder_lock import lock_folder
from tests.helpers.process import PATIENCE_SECONDS, wait_until

HEARD = 'echo "$0 $*" >> "$SAID"\n'
UNTIL = 'until [ "$(grep -c {} "$SAID")" -ge {} ]; do sleep 0.05; done'


def commands_of_slurm(folder: Path, **bodies: str) -> dict[str, str]:
    """An environment whose commands of Slurm write down how they were called and do what
    `bodies` say.
    """
    (folder / "bin").mkdir()
    (folder / "said").touch()
    for name in ("squeue", "scontrol", "srun", "scancel"):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{HEARD}{bodies.get(name, '')}\n")
        path.chmod(0o755)
    names = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURMD_NODENAME": "n2",
    }
    found = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SAID": str(folder / "said"),
    }
    return os.environ | names | found | {"MASTER_HOST": "n1"}


def job(folder: Path) -> Path:
    """The script of a job of two nodes that trains into `folder / run`."""
    kit = folder / "run" / "launch"
    kit.mkdir(parents=True)
    (kit / "environment.sh").touch()
    start = LaunchPlan((Host("n1", 1), Host("n2", 1)), kit, folder, 0, "toy", 2, 3, 60, 60)
    (kit / "job.sbatch").write_text(format_sbatch_script(start, chosen=True, gpus=0, port=0))
    return kit / "job.sbatch"


def said(folder: Path) -> list[str]:
    return [line.rpartition("/")[2] for line in (folder / "said").read_text().splitlines()]


@pytest.mark.parametrize(
    ("squeue", "hosts", "queued_again"),
    [
        ("echo n[2-3]", "n2 n3", True),
        ("echo n[1-3]", "n1 n2 n3", False),
        ("exit 1", "", False),
        ("", "", False),
    ],
    ids=["the first node is lost", "all is well", "no response", "nothing is known"],
)
def test_a_job_that_may_shrink_is_queued_again_when_the_node_of_its_script_is_lost(
    tmp_path: Path, squeue: str, hosts: str, queued_again: bool
) -> None:
    environment = commands_of_slurm(tmp_path, squeue=squeue, scontrol=f"printf '%s\\n' {hosts}")
    script = WATCH.format(seconds=0) + UNTIL.format(
        *(("requeue", 1) if queued_again else ("squeue", 3))
    )
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=PATIENCE_SECONDS)
    assert ("scontrol requeue 7" in said(tmp_path)) == queued_again


@pytest.mark.parametrize(
    ("state", "saves", "queued_again", "words"),
    [
        ("RUNNING", True, True, ""),
        ("RUNNING", False, False, "nothing was saved between start and stop"),
        ("COMPLETING", True, False, ""),
    ],
    ids=["near its time limit", "nothing saved", "cancelled"],
)
def test_a_stopped_job_is_queued_again_unless_it_was_cancelled_or_has_come_no_further(
    tmp_path: Path, state: str, saves: bool, queued_again: bool, words: str
) -> None:
    save = f"mkdir -p {tmp_path}/run/checkpoints/step-00000002" if saves else ""
    scontrol = f"echo JobState={state}"
    environment = commands_of_slurm(tmp_path, srun=f"{save}\nexit {STOPPED}", scontrol=scontrol)
    done = subprocess.run(["bash", job(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == STOPPED
    assert ("scontrol requeue 7" in said(tmp_path)) == queued_again
    assert words in done.stderr


def test_a_second_start_waits_for_ranks_of_the_first_that_were_cut_off_with_their_node(
    tmp_path: Path,
) -> None:
    environment = commands_of_slurm(tmp_path, srun=f"ls {tmp_path}/gone")
    script = job(tmp_path)
    with lock_folder(tmp_path / "run"):
        started = subprocess.Popen(["bash", script], env=environment | {"SLURM_RESTART_COUNT": "1"})
        children = psutil.Process(started.pid).children
        wait_until(lambda: [one for one in children() if one.name() == "flock"], "it does not wait")
        (tmp_path / "gone").touch()
    assert started.wait(PATIENCE_SECONDS) == 0


def test_a_job_with_spares_asks_for_their_nodes_and_starts_them_in_place_of_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$SAID.words"\n')
    (tmp_path / "python").chmod(0o755)
    kit = tmp_path / "run" / "launch"
    kit.mkdir(parents=True)
    (kit / "environment.sh").touch()
    hosts, spares = (Host("n1", 1), Host("n2", 1)), (Host("n3", 1), Host("n4", 1))
    plan = LaunchPlan(
        hosts, kit, tmp_path, 0, "toy", 2, 3, 60, 60, spares, interpreter=str(tmp_path / "python")
    )
    text = format_sbatch_script(plan, chosen=True, gpus=0, port=0)
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --no-kill\n" in text
    environment = commands_of_slurm(tmp_path, scontrol='printf "%s\\n" n1 n2 n3 n4')
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=PATIENCE_SECONDS)
    words = (tmp_path / "said.words").read_text().splitlines()
    assert words[:2] == ["-m", "llmsys.launch.launchers.slurm_hosts"]
    assert words[-4:] == ["n1", "n2", "n3", "n4"]
    # the task itself: two nodes train, whichever they are, and each node but the first watches over
    # the first
    _, task = "\n".join(words[2:-4]).split("--task=")
    assert "--nnodes=2:2" in task
    assert "--leave-after=2" in task
    assert "scontrol requeue" in task

    # n2 leaves the job, at which srun ends with 0, and n3 fails in its place: n4 trains with n1 to
    # the end
    bodies = {"n2": "exit 0", "n3": "kill -9 $$", "n4": f"touch {tmp_path}/done"}
    srun = "case $1 in " + " ".join(f"--nodelist={name}) {body};;" for name, body in bodies.items())
    srun += f" *) until [ -e {tmp_path}/done ]; do sleep 0.05; done;; esac"
    (tmp_path / "two").mkdir()
    nodes_left = {"squeue": "echo n[1,3-4]", "scontrol": 'printf "%s\\n" n1 n3 n4'}
    for name, value in commands_of_slurm(tmp_path / "two", srun=srun, **nodes_left).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("llmsys.launch.launchers.spare_hosts.TOGETHER_SECONDS", 0.1)
    nodes, is_lost = words[-4:], slurm_hosts.is_out_of_job
    assert (
        slurm_hosts.run_on_nodes(
            nodes, 2, lambda node: slurm_hosts.start_srun(node, "task"), is_lost
        )
        == 0
    )
    begun = [line.split()[1] for line in said(tmp_path / "two") if line.startswith("srun")]
    assert sorted(begun[:2]) == ["--nodelist=n1", "--nodelist=n2"]
    assert begun[2:] == ["--nodelist=n3", "--nodelist=n4"]


def start_command(commands: dict[str, list[str]], node: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(commands[node])


def test_a_job_without_spares_left_ends_with_the_status_of_its_nodes(tmp_path: Path) -> None:
    for first, second, status in ((0, 0, 0), (3, STOPPED, STOPPED), (1, 3, 3)):
        ends = {"n1": first, "n2": second, "n3": 9}
        commands = {node: ["sh", "-c", f"exit {end}"] for node, end in ends.items()}
        start = partial(start_command, commands)
        assert slurm_hosts.run_on_nodes(list(ends), 2, start, lambda node: False) == status


SHOW_WORDS = 'printf "%s\\n" "$@" > "$SAID.words"; pwd >> "$SAID.words"\n'


def test_paths_with_spaces_reach_every_command_of_a_job_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run, the working directory and the interpreter have spaces, quotes and
    signs of shells.
    """
    home = tmp_path / 'my "own" $HOME runs #1'
    python = home / "venv with space" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\n{SHOW_WORDS}")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    (home / "run" / "checkpoints").mkdir(parents=True)
    script = job(home)
    assert str(home / "run" / "launch") in str(script)
    run_task = '[ "$1" = --ntasks-per-node=1 ] && bash -c "${@: -1}"'
    environment = commands_of_slurm(tmp_path, srun=run_task, scontrol="echo n1")
    environment |= {"SLURM_RESTART_COUNT": "1"}  # waits for the lock of the run folder
    done = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    *words, working = (tmp_path / "said.words").read_text().splitlines()
    assert working == str(home)
    assert words[-1] == str(home / "run" / "launch" / "config.yaml")
    assert words[:3] == [
        "-m",
        "llmsys.launch.launchers.restart_agent",
        f"--meet=n1:{words[2].rpartition(':')[2]}",
    ]
    assert str(python) in words


def test_sbatch_reads_every_option_as_it_was_meant(tmp_path: Path) -> None:
    kit = tmp_path / "my runs 100%" / "launch"
    start = LaunchPlan((Host("n1", 1), Host("n2", 1)), kit, tmp_path, 0, "toy", 2, 3, 60, 60)
    more = ["--comment=a b", '--comment=say "c" \\ d', "--reservation=x#1", "--time=1:00:00"]
    text = format_sbatch_script(start, chosen=True, gpus=0, port=0, more=more)
    head = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")
    ]
    # sbatch knows quotes, backslashes and remarks alike
    options = [shlex.split(line, comments=True) for line in head]
    assert all(len(one) == 1 for one in options)
    read = [one[0] for one in options]
    assert f"--output={tmp_path}/my runs 100%%/launch/slurm-%j.out" in read
    assert read[-4:] == more
    with pytest.raises(LaunchError, match=r"holds several lines\. Leave it out"):
        format_sbatch_script(start, chosen=True, gpus=0, port=0, more=["--comment=a\nrm x"])

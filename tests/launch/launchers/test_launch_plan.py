"""`llmsys launch`: the launchers' own parsers understand its commands, and what cannot work is
refused by name.
"""

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsys.errors import ConfigError, LaunchError, LayoutError
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.launchers.host_commands import build_accelerate_commands, build_commands
from llmsys.launch.launchers.launch_plan import build_launch_plan
from llmsys.launch.launchers.multi_host import combine_statuses
from llmsys.launch.launchers.run_bundle import (
    build_rank_environment,
    format_deepspeed_environment,
    list_withheld_secrets,
    read_code_state,
)
from llmsys.launch.main import main
from tests.helpers.launch_config import HOSTS, build_toy_config, write_toy_config


def words_of(folder: Path, launcher: Any, **options: Any) -> list[list[str]]:
    start = build_launch_plan(build_toy_config(folder), HOSTS, launcher, options.pop("least", 0), 3)
    return [
        list(command.arguments)
        for command in build_commands(launcher, start, **{"over_ssh": True} | options)
    ]


def test_torchrun_understands_its_commands(tmp_path: Path) -> None:
    from torch.distributed.run import config_from_args, parse_args

    for words, host in zip(
        words_of(tmp_path, "torchrun", least=1), ("10.9.8.1", "10.9.8.2"), strict=True
    ):
        kept = [
            "-m",
            "llmsys.launch.launchers.restart_agent",
            "--meet=10.9.8.1:29500",
            "--restarts=3",
            "--patience=3600",
            words[0],
        ]
        assert words[1 : len(kept) + 1] == kept
        assert words[len(kept) + 1 : len(kept) + 3] == ["-m", "llmsys.launch.launchers.torchrun"]
        config, _, arguments = config_from_args(parse_args(words[len(kept) + 3 :]))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (
            1,
            2,
            2,
            0,
        )
        assert config.rdzv_configs["join_timeout"] == "3600"
        assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "10.9.8.1:29500")
        assert (config.run_id, config.local_addr) == ("a-toy", host)
        assert arguments[-2:] == words[-2:]


def test_deepspeed_understands_its_commands_with_pdsh_and_without_ssh(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import parse_args

    [words] = words_of(tmp_path, "deepspeed")
    options = parse_args(words[3:])
    assert (options.launcher, options.no_ssh, options.force_multi) == ("pdsh", False, True)
    assert (options.master_addr, options.master_port) == ("10.9.8.1", 29500)
    assert options.hostfile == str(tmp_path / "run" / "launch" / "hostfile")
    assert options.user_script.endswith("launch/train.py")
    alone = [parse_args(words[3:]) for words in words_of(tmp_path, "deepspeed", over_ssh=False)]
    assert [(one.no_ssh, one.node_rank) for one in alone] == [(True, 0), (True, 1)]


def test_accelerate_understands_its_commands_and_needs_hosts_of_one_size(tmp_path: Path) -> None:
    from accelerate.commands.launch import launch_command_parser

    for number, words in enumerate(words_of(tmp_path, "accelerate")):
        options = launch_command_parser().parse_args(words[3:])
        assert (options.num_machines, options.num_processes, options.machine_rank) == (2, 4, number)
        assert (options.main_process_ip, options.main_process_port) == ("10.9.8.1", 29500)
    start = build_launch_plan(
        build_toy_config(tmp_path), [Host("10.9.8.1", 1), Host("10.9.8.2", 3)], "torchrun", 0, 3
    )
    with pytest.raises(
        LaunchError,
        match=r"the same number of ranks on every host. Use 1 slots on each, or --launcher "
        r"torchrun",
    ):
        build_accelerate_commands(start)


def test_what_deepspeed_wants_is_read_by_it_and_the_hosts_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    words = [
        write_toy_config(tmp_path),
        "nodes=10.9.8.1:2,10.9.8.2:2",
        "engine.kind=deepspeed",
        "--print",
        "--json",
    ]
    assert main(["launch", *words]) == 0
    said = capsys.readouterr()
    assert "WANDB_API_KEY looks like a secret and is not copied" in said.err
    folder = Path(json.loads(said.out)["folder"])
    assert dict(fetch_hostfile(str(folder / "hostfile"))) == {"10.9.8.1": 2, "10.9.8.2": 2}
    lines = (folder / ".deepspeed_env").read_text().splitlines()
    assert "NCCL_DEBUG=INFO" in lines
    assert all("=" in line for line in lines)
    assert f"export DS_ENV_FILE={folder}/.deepspeed_env" in (folder / "environment.sh").read_text()
    assert not any("hush" in file.read_text() for file in folder.iterdir())
    assert main(["show", str(folder / "config.yaml")]) == 0


def test_variables_survive_the_remote_shell_and_files_of_the_user_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").write_text("A=1\n\n# remark\nMY_TOKEN=hush\n")
    value = 'a "b" $HOME `ls` \\ c'
    text = format_deepspeed_environment({"NCCL_X": value}, [tmp_path / "theirs"])
    first, second = text.splitlines()
    assert first == "A=1"
    # DeepSpeed writes: export NAME="VALUE"; into the command of the remote shell
    quoted = second.partition("=")[2]
    shell = f'export NCCL_X="{quoted}"; printf %s "$NCCL_X"'
    assert (
        subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
        == value
    )
    with pytest.raises(LaunchError, match="NCCL_Y has several lines"):
        build_rank_environment({"NCCL_Y": "a\nb"}, tmp_path)
    travels = build_rank_environment(
        {"CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "x", "HOME": "/"}, tmp_path
    )
    assert travels.keys() == {"PYTHONPATH", "DS_ENV_FILE", "PDSH_SSH_ARGS_APPEND"}
    monkeypatch.setattr(
        "llmsys.launch.launchers.run_bundle._list_user_files", lambda: [tmp_path / "theirs"]
    )
    assert list_withheld_secrets({"HF_TOKEN": "x", "NCCL_DEBUG": "INFO"}) == [
        "HF_TOKEN",
        "MY_TOKEN",
    ]


def test_the_difference_that_travels_makes_the_code_again(tmp_path: Path) -> None:
    def git(*words: str, where: str = "one") -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path / where, check=True, capture_output=True)

    (tmp_path / "one" / "llmsys").mkdir(parents=True)
    git("init")
    (tmp_path / "one" / "llmsys" / "old.py").write_text("old\n")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "one" / "llmsys" / "old.py").write_text("changed\n")
    (tmp_path / "one" / "llmsys" / "new.py").write_text("new\n")
    state, difference = read_code_state(tmp_path / "one")
    assert state["changed"] is True
    (tmp_path / "code.diff").write_bytes(difference)
    git("clone", "one", "two", where=".")
    git("checkout", state["commit"], where="two")
    git("apply", str(tmp_path / "code.diff"), where="two")
    assert (tmp_path / "two" / "llmsys" / "old.py").read_text() == "changed\n"
    assert (tmp_path / "two" / "llmsys" / "new.py").read_text() == "new\n"


def test_a_slurm_job_is_a_script_that_asks_to_be_queued_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        write_toy_config(tmp_path),
        "nodes=2",
        "launch.processes=4",
        "--min-hosts",
        "1",
        "--sbatch=--time=1:00:00",
    ]
    assert main(["launch", *words, "--print"]) == 0
    text = capsys.readouterr().out
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "4")
    assert (asked["signal"], asked["time"]) == ("B:USR1@300", "1:00:00")
    assert {"requeue", "no-kill"} <= asked.keys()
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text
    assert '"--rdzv-endpoint=$MASTER_HOST:$PORT"' in text
    assert '"--local-addr=$SLURMD_NODENAME"' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert (tmp_path / "run" / "launch" / "job.sbatch").read_text() == text


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate", "slurm"])
def test_printed_commands_need_no_host_that_this_one_can_resolve(
    tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        write_toy_config(tmp_path),
        "nodes=first.invalid:2,second.invalid:2",
        "--launcher",
        launcher,
    ]
    assert main(["launch", *words, "--print"]) == 0
    assert (
        "second.invalid"
        in capsys.readouterr().out + (tmp_path / "run" / "launch" / "hostfile").read_text()
    )
    if launcher != "slurm":
        assert main(["launch", *words]) == 2
        assert "first.invalid cannot be resolved" in capsys.readouterr().err


def test_the_command_of_a_spare_is_printed_as_one_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write_toy_config(tmp_path), "nodes=10.9.8.1:2,10.9.8.2:2", "spares=10.9.8.3:2"]
    assert main(["launch", *words, "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("cd ")][:2] == [
        "# on 10.9.8.1:",
        "# on 10.9.8.2:",
    ]
    assert lines[-2] == "# spare 10.9.8.3, instead of a host that has failed:"
    assert "--nnodes=2:2" in lines[-1]
    assert lines[-1].startswith("# cd ")
    assert "--local-addr=10.9.8.3" in lines[-1]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with (
        held_port() as port,
        pytest.raises(LaunchError, match=f"launch.port={port} is in use on 127.0.0.1 .*port=N"),
    ):
        build_launch_plan(
            build_toy_config(tmp_path, launch={"port": port}),
            [Host("127.0.0.1", 2)],
            "torchrun",
            0,
            3,
        )


@pytest.mark.parametrize(
    ("hosts", "least", "error", "message"),
    [
        (
            [("localhost", 2), ("10.9.8.2", 2)],
            0,
            LaunchError,
            "localhost resolves to .*, a loopback address, .* Use an address",
        ),
        (
            [("no.such.host.invalid", 2), ("10.9.8.2", 2)],
            0,
            LaunchError,
            "no.such.host.invalid cannot be resolved",
        ),
        (
            [("10.9.8.1", 2), ("10.9.8.2", 1)],
            0,
            ConfigError,
            "on 2 of 2 hosts, 3 ranks: .*divided evenly over 3 data ranks",
        ),
        (
            [(f"10.9.8.{n}", 1) for n in range(1, 5)],
            3,
            ConfigError,
            "on 3 of 4 hosts, 3 ranks: .* Or use --min-hosts 4",
        ),
        (
            [("10.9.8.1", 2)],
            2,
            LaunchError,
            "--min-hosts 2 is not possible with 1 hosts. Use 1 to 1",
        ),
    ],
    ids=["loopback", "unknown", "indivisible", "indivisible when one is lost", "least"],
)
def test_hosts_that_cannot_train_it_are_refused_before_the_start(
    tmp_path: Path, hosts: list[tuple[str, int]], least: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_launch_plan(
            build_toy_config(tmp_path), [Host(*host) for host in hosts], "torchrun", least, 3
        )
    assert not (tmp_path / "run").exists()


def test_a_layout_that_does_not_fit_the_hosts_is_refused(tmp_path: Path) -> None:
    config = build_toy_config(tmp_path, layout={"replicate": 3})
    with pytest.raises(
        LayoutError, match="on 2 of 2 hosts, 4 ranks: 4 ranks cannot be split into replicate=3"
    ):
        build_launch_plan(config, HOSTS, "torchrun", 0, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "A launch needs hosts."),
        (["nodes=a:2", "nodes=b:2"], "nodes=a:2 and nodes=b:2 were both given. Give nodes= once."),
        (["nodes=a:2", "nodes=a:2"], "nodes=a:2 and nodes=a:2 were both given. Give nodes= once."),
        (
            ["nodes=2", "--launcher", "torchrun"],
            "nodes=2 is a number of hosts, but torchrun needs their names.",
        ),
        (
            ["nodes=2", "launch.processes=0"],
            "starts no rank. Give the number of hosts and the ranks of each",
        ),
        (
            ["nodes=10.9.8.1:2,10.9.8.2:2", "--launcher", "deepspeed", "--min-hosts", "1"],
            "deepspeed cannot continue with fewer",
        ),
        (["nodes=10.9.8.1:0"], "has 0 slots"),
        (
            ["nodes=2", "spares=n3:1", "launch.processes=2"],
            "spares=n3:1: Slurm chooses the nodes. Give a number",
        ),
        (
            ["nodes=a:2,b:2", "spares=1"],
            "spares=1 is a number, but nodes= has names. Name the spares: spares=third:8",
        ),
        (
            ["nodes=10.9.8.1:2,10.9.8.2:2", "spares=10.9.8.3:1"],
            "a spare takes the place of any host, so all need",
        ),
        (
            ["nodes=10.9.8.1:2,10.9.8.2:2", "spares=10.9.8.2:2"],
            "spares=10.9.8.2 is also in nodes=. Name each host once",
        ),
        (["nodes=10.9.8.1:2", "spares=10.9.8.2:2"], "spares= needs two hosts or more"),
        (
            ["nodes=10.9.8.1:2,10.9.8.2:2", "spares=10.9.8.3:2", "--launcher", "accelerate"],
            "spares=1: accelerate cannot replace a host",
        ),
        (
            ["nodes=10.9.8.1:2,10.9.8.2:2", "--standby", "--launcher", "deepspeed"],
            "--standby: deepspeed does not restart ranks. Use --launcher torchrun",
        ),
        (["nodes=10.9.8.1:2,10.9.8.1:2"], "is listed 2 times"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_words_is_one_message(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", write_toy_config(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_ended_well_when_enough_hosts_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = build_launch_plan(build_toy_config(tmp_path), HOSTS, "torchrun", 1, 3)
    whole = build_launch_plan(build_toy_config(tmp_path), HOSTS, "torchrun", 2, 3)
    assert combine_statuses({"a": 0, "b": 255}, elastic) == 0
    assert "lost: b lost its ssh connection, or could not be reached" in capsys.readouterr().err
    assert combine_statuses({"a": 75, "b": 1}, whole) == 75
    with pytest.raises(
        LaunchError, match=r"training stopped: b ended with status 3. Checkpoints are intact"
    ):
        combine_statuses({"a": 0, "b": 3}, whole)
    with pytest.raises(SystemExit, match="2"):
        combine_statuses({"a": 2, "b": 2}, whole)

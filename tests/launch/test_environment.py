"""What launchers say is understood: torchrun's names, srun's, and the argument that deepspeed adds."""

import sys
from pathlib import Path

import pytest

from launch.environment import adopt_slurm, launched, without_local_rank
from launch.local import free_port, local_command
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, LaunchError, LayoutError
from llmsys.parallel.group import joined
from llmsys.train.objective import run_plan


def test_srun_variables_become_the_usual_names() -> None:
    environment = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_ID": "41000",
    }  # fmt: skip
    adopt_slurm(environment)
    assert environment["RANK"] == "3"
    assert environment["WORLD_SIZE"] == "8"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["MASTER_ADDR"] == "10.0.0.1"
    assert environment["MASTER_PORT"] == "21000"


def test_a_launcher_that_has_spoken_is_not_overruled() -> None:
    environment = {"RANK": "0", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    adopt_slurm(environment)
    assert environment["RANK"] == "0"
    assert "WORLD_SIZE" not in environment


def test_an_interactive_slurm_shell_is_one_process() -> None:
    environment = {"SLURM_JOB_ID": "5"}
    adopt_slurm(environment)
    assert not launched(environment)


@pytest.mark.parametrize("words", [["--local_rank=2", "demo"], ["demo", "--local-rank", "2"]])
def test_a_stray_local_rank_is_accepted(words: list[str]) -> None:
    environment: dict[str, str] = {}
    assert without_local_rank(words, environment) == ["demo"]
    assert environment == {"LOCAL_RANK": "2"}


def test_half_a_rendezvous_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="RANK=1 is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"), joined():
        pass


def test_the_command_names_the_script_the_processes_and_the_port() -> None:
    words = ["demo", "train.tokens=1000"]
    torch_words = local_command("torch", 2, 1234, words)
    assert torch_words[0] == sys.executable
    assert torch_words[1:3] == ["-m", "launch.torchrun"]
    assert {"--nproc-per-node=2", "--master-port=1234"} <= set(torch_words)
    deepspeed_words = local_command("deepspeed", 2, 1234, words)
    assert Path(deepspeed_words[1]).name == "deepspeed"
    assert deepspeed_words[deepspeed_words.index("--num_accelerators") + 1] == "2"
    accelerate_words = local_command("accelerate", 2, 1234, words)
    assert accelerate_words[1:] == [
        "-m", "launch.accelerate", "--num_processes", "2", "--main_process_port", "1234", *torch_words[-3:],
    ]  # fmt: skip
    for command in (torch_words, deepspeed_words, local_command("torch", 1, 1234, words)):
        assert command[-3:][0].endswith("train.py")
        assert command[-2:] == words
    assert "launch.torchrun" not in local_command("torch", 1, 1234, words)


def test_a_free_port_is_free() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_ranks_that_cannot_share_a_step_are_refused() -> None:
    config = RunConfig.model_validate({"batch": {"sequence_length": 8, "sequences": 6}})
    with pytest.raises(ConfigError, match="cannot be dealt evenly to 4 data ranks"):
        run_plan(config, 4, 0)
    with pytest.raises(LayoutError, match="Use expert=1"):
        config.layout.model_copy(update={"expert": 2}).fit(2, config.model)

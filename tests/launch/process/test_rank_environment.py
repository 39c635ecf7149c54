"""What launchers say is understood: torchrun's names, srun's, and the argument that deepspeed
adds.
"""

import sys
from pathlib import Path

import pytest

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, LaunchError, LayoutError
from llmsys.launch.hosts.network_interfaces import find_default_interface, find_interface_to
from llmsys.launch.launchers.local import build_local_command
from llmsys.launch.process.rank_environment import (
    adopt_launcher,
    choose_interface,
    is_launched,
    parse_first_host,
    set_device_variables,
    strip_local_rank,
)
from llmsys.parallel.port import find_free_port
from llmsys.parallel.process_group import init_process_group
from llmsys.train.build_objective import build_run_plan


def test_srun_variables_become_the_usual_names() -> None:
    environment = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_JOB_ID": "41000",
    }  # fmt: skip
    adopt_launcher(environment)
    assert environment["RANK"] == "3"
    assert environment["WORLD_SIZE"] == "8"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["MASTER_ADDR"] == "10.0.0.1"
    assert environment["MASTER_PORT"] == "21000"


def test_a_launcher_that_has_spoken_is_not_overruled() -> None:
    environment = {"RANK": "0", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    adopt_launcher(environment)
    assert environment["RANK"] == "0"
    assert "WORLD_SIZE" not in environment


def test_under_srun_rank_0_is_on_the_first_node_of_the_step_not_where_srun_was_typed() -> None:
    environment = {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_LAUNCH_NODE_IPADDR": "login",
    }  # fmt: skip
    adopt_launcher(environment)
    assert (environment["MASTER_ADDR"], environment["LOCAL_WORLD_SIZE"]) == ("node03", "1")


@pytest.mark.parametrize(
    ("listed", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[007-009,12]", "gpu007"), ("r[1-2]-ib,x", "r1-ib"), ("", "")],
)
def test_the_first_of_slurms_node_list(listed: str, first: str) -> None:
    assert parse_first_host(listed) == first


MPI = {
    "open mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip


@pytest.mark.parametrize("names", MPI.values(), ids=MPI)
def test_mpi_is_understood_and_asked_where_rank_0_is_when_there_are_several_hosts(
    names: tuple[str, ...],
) -> None:
    alone = dict(zip(names, ("3", "4", "3", "4"), strict=True))
    adopt_launcher(alone)
    assert [alone[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")] == [
        "3",
        "4",
        "3",
        "127.0.0.1",
    ]
    spread = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    with pytest.raises(
        LaunchError, match=r"rank 3 of 4 on several hosts, but MASTER_ADDR.*`mpirun -x MASTER_ADDR="
    ):
        adopt_launcher(dict(spread))
    adopt_launcher(named := spread | {"MASTER_ADDR": "first"})
    assert (named["MASTER_ADDR"], named["LOCAL_RANK"], named["LOCAL_WORLD_SIZE"]) == (
        "first",
        "1",
        "2",
    )


def test_deepspeed_says_how_many_ranks_are_here_by_another_name() -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    adopt_launcher(environment)
    assert environment["LOCAL_WORLD_SIZE"] == "2"


def test_loopback_is_chosen_when_every_rank_is_on_this_host_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "llmsys.launch.process.rank_environment.find_interface_to", lambda host: f"towards-{host}"
    )
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    choose_interface(here)
    assert here["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in here
    spread = here | {"WORLD_SIZE": "4", "MASTER_ADDR": "first"}
    del spread["GLOO_SOCKET_IFNAME"]
    choose_interface(spread)
    assert (spread["GLOO_SOCKET_IFNAME"], spread["NCCL_SOCKET_IFNAME"]) == (
        "towards-first",
        "=towards-first",
    )
    mine = spread | {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    choose_interface(mine)
    assert (mine["GLOO_SOCKET_IFNAME"], mine["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")


def test_the_interface_is_that_of_the_route_and_never_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "route"
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    routes.write_text(
        f"{head}wifi0 00000000 0102A8C0 3 0 0 600 0 0 0 0\neth7 00000000 0102A8C0 3 0 0 100 0 0 0 "
        "0\n"
    )
    assert find_default_interface(routes) == "eth7"
    routes.write_text(f"{head}ib0 0000000A 00000000 1 0 0 0 00FFFFFF 0 0 0\n")
    assert find_default_interface(routes) == "ib0"
    monkeypatch.setattr(
        "llmsys.launch.hosts.network_interfaces.list_local_addresses",
        lambda: {"127.0.0.1": "lo", "10.0.0.2": "br0"},
    )
    monkeypatch.setattr(
        "llmsys.launch.hosts.network_interfaces._find_source_address", lambda address: "10.0.0.2"
    )
    assert find_interface_to("10.0.0.1") == "br0"
    monkeypatch.setattr(
        "llmsys.launch.hosts.network_interfaces._find_source_address", lambda address: "127.0.0.1"
    )
    monkeypatch.setattr(
        "llmsys.launch.hosts.network_interfaces.find_default_interface", lambda: None
    )
    with pytest.raises(
        LaunchError,
        match=r"except loopback has a route to 127\.0\.1\.1, the host of rank 0\. Use an address",
    ):
        find_interface_to("127.0.1.1")


def test_an_interactive_slurm_shell_is_one_process() -> None:
    environment = {"SLURM_JOB_ID": "5"}
    adopt_launcher(environment)
    assert not is_launched(environment)


@pytest.mark.parametrize("words", [["--local_rank=2", "demo"], ["demo", "--local-rank", "2"]])
def test_a_stray_local_rank_is_accepted(words: list[str]) -> None:
    environment: dict[str, str] = {}
    assert strip_local_rank(words, environment) == ["demo"]
    assert environment == {"LOCAL_RANK": "2"}


def test_half_a_rendezvous_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(
            LaunchError, match="RANK=1 is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"
        ),
        init_process_group(),
    ):
        pass


def test_the_command_names_the_script_the_processes_and_the_port() -> None:
    words = ["demo", "train.tokens=1000"]
    torch_words = build_local_command("torch", 2, 1234, words)
    assert torch_words[0] == sys.executable
    assert torch_words[1:3] == ["-m", "llmsys.launch.launchers.torchrun"]
    assert {"--nproc-per-node=2", "--master-port=1234"} <= set(torch_words)
    deepspeed_words = build_local_command("deepspeed", 2, 1234, words)
    assert Path(deepspeed_words[1]).name == "deepspeed"
    assert deepspeed_words[deepspeed_words.index("--num_accelerators") + 1] == "2"
    accelerate_words = build_local_command("accelerate", 2, 1234, words)
    assert accelerate_words[1:] == [
        "-m", "llmsys.launch.launchers.accelerate", "--num_processes", "2", "--main_process_port",
        "1234", *torch_words[-3:],
    ]  # fmt: skip
    for command in (torch_words, deepspeed_words, build_local_command("torch", 1, 1234, words)):
        assert command[-3:][0].endswith("train.py")
        assert command[-2:] == words
    assert "llmsys.launch.launchers.torchrun" not in build_local_command("torch", 1, 1234, words)


def test_a_free_port_is_free() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", find_free_port()))


def test_ranks_that_cannot_share_a_step_are_refused() -> None:
    config = RunConfig.model_validate({"batch": {"sequence_length": 8, "sequences": 6}})
    with pytest.raises(ConfigError, match="cannot be divided evenly over 4 data ranks"):
        build_run_plan(config, 4, 0)
    with pytest.raises(LayoutError, match="Use expert=1"):
        config.layout.model_copy(update={"expert": 2}).resolve(2, config.model)


def test_allocator_and_flight_recorder_are_set_where_the_user_has_not() -> None:
    environment: dict[str, str] = {}
    set_device_variables(Path("/runs/one/heartbeats"), environment)
    assert environment == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "10000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/one/heartbeats/collectives-rank-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    chosen = {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    kept = dict(chosen)
    set_device_variables(Path("heartbeats"), kept)
    assert kept == chosen

"""Laws of `llmsys preflight`: what would fail is named with host, finding and remedy before a
rank starts.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmsys.doctor.toy_dataset import build_toy_config, write_toy_dataset
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.errors import LaunchError, LlmsysError
from llmsys.launch.commands.preflight import format_host_findings
from llmsys.launch.hosts import host_checks
from llmsys.launch.hosts.host_checks import HostFinding
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.hosts.ssh import (
    SshResult,
    describe_ssh_remedy,
    parse_last_json,
    run_on_all_hosts,
    run_on_host,
)
from llmsys.launch.main import main
from llmsys.launch.preflight import dry_run_check, host_probe, run_preflight
from llmsys.launch.preflight.cluster_checks import check_memory_fit
from llmsys.launch.preflight.dry_run_check import DryRunWish, check_dry_run
from llmsys.launch.preflight.run_preflight import PreflightRequest, check_divisibility
from tests.helpers.dry_runs import RANKS, write_tiny_config

GIB = 1 << 30
GPU = {"name": "H100", "free_bytes": 79 * GIB, "total_bytes": 80 * GIB}


def told(
    *accelerators: dict[str, Any], code: str = "c0de", torch: str = "2.13.0"
) -> dict[str, Any]:
    versions = {"python": "3.11.7", "llmsys": "0.1.0", "torch": torch}
    devices = {"accelerators": list(accelerators), "memory_bytes": 8 * GIB, "cores": 2,
               "bf16": {"is_native": True, "reason": ""}}  # fmt: skip
    return {"versions": versions, "code": code, "commit": "", "devices": devices}


def failing(found: Any) -> list[tuple[str, str, str]]:
    return [(one.host, one.finding, one.remedy) for one in found if one.remedy]


def test_the_odd_one_out_is_named_and_not_the_many() -> None:
    hosts = {"a": told(torch="2.12.0", code="0dd"), "b": told(), "c": told()}
    assert failing(host_checks.check_versions(hosts)) == [
        (
            "a",
            "torch is 2.12.0, on other hosts 2.13.0",
            "Install torch 2.13.0 there, or share one environment.",
        ),
        (
            "a",
            "files of code differ: digest 0dd, on other hosts c0de",
            "Check out the same commit there, or share one checkout.",
        ),
    ]


@pytest.mark.parametrize(
    ("odd", "finding"),
    [
        ([GPU], "has 1 accelerators for 2 slots"),
        ([], "has no accelerator, ranks run on the CPU, other hosts H100"),
        (
            [GPU, GPU | {"free_bytes": 40 * GIB}],
            "1 accelerators are in use; of one, 40 of 80 GiB are free",
        ),
    ],
)
def test_accelerators_are_as_many_as_slots_alike_and_free(
    odd: list[dict[str, Any]], finding: str
) -> None:
    hosts = {"a": told(GPU, GPU), "b": told(*odd)}
    [(host, said, _)] = failing(host_checks.check_devices(hosts, [Host("a", 2), Host("b", 2)]))
    assert (host, said) == ("b", finding)


@pytest.mark.parametrize(
    ("ahead", "fails"), [(0.0, False), (4.0, False), (20.0, True), (-20.0, True)]
)
def test_a_clock_is_wrong_only_beyond_the_doubt_of_asking(ahead: float, fails: bool) -> None:
    answer = SshResult(0, f"{1000 + ahead + 3}\n", "", asked_at=1000.0, seconds=6.0)
    found = host_checks.check_clock("a", answer)
    assert bool(found.remedy) == fails
    assert ("ahead of" in found.finding) == (fails and ahead > 0)


def test_an_address_that_leads_nowhere_and_a_full_disk_are_refused() -> None:
    found = host_checks.check_rendezvous_address("b", {"address": "127.0.1.1"}, "a", several=True)
    assert (
        found.finding
        == "resolves a to 127.0.1.1, a loopback address, which does not reach other hosts"
    )
    assert "Give a its real address in /etc/hosts here" in found.remedy
    assert not host_checks.check_rendezvous_address(
        "a", {"address": "127.0.0.1"}, "a", several=False
    ).remedy
    full = host_checks.check_disk(
        "b",
        {"folder": {"free_bytes": 23 * GIB, "file_system": "nfs4"}},
        "/runs",
        parameters=GIB,
        checkpoints=1,
    )
    assert full.finding == "23.0 GiB are free at /runs, and 2 checkpoints take 24.0"


def test_a_port_in_use_is_refused_by_number() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            LlmsysError, match=rf"port {port} is not available .* Set another launch.port"
        ):
            host_probe.require_port(port)


def test_a_host_that_takes_too_long_is_left_and_noise_of_its_shell_is_passed_over() -> None:
    slow = run_on_host("localhost", "sleep 60", 1)
    assert (slow.status, slow.seconds < 30) == (124, True)
    answers = run_on_all_hosts(
        ["localhost", "127.0.0.1"], lambda host: f"""echo welcome; echo '{{"at": "{host}"}}'""", 30
    )
    assert [parse_last_json(one) for one in answers.values()] == [
        {"at": "localhost"},
        {"at": "127.0.0.1"},
    ]


def test_what_ssh_says_becomes_a_remedy() -> None:
    for said, remedy in (
        ("Permission denied (publickey)", "ssh-copy-id a"),
        ("never heard", "manually: ssh a true"),
    ):
        assert remedy in describe_ssh_remedy("a", SshResult(255, "", f"a: {said}", 0, 0))


def test_this_machine_alone_is_asked_without_ssh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy_dataset(tmp_path / "data")
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump(build_toy_config(tmp_path).model_dump(mode="json"))
    )
    words = ["preflight", str(tmp_path / "toy.yaml"), "nodes=localhost:2"]
    assert main([*words, "--json", "--patience=120"]) == 0
    said = json.loads(capsys.readouterr().out)
    checks = [
        "layout",
        "batch",
        "reach",
        "clock",
        "versions",
        "code",
        "devices",
        "network",
        "settings",
        "memory",
        "address",
        "disk",
        "dry batch",
    ]
    assert [one["check"] for one in said["findings"]] == [*checks, "data", "shared"]
    assert not any(one["fails"] for one in said["findings"])
    assert not (tmp_path / "run").exists()


def test_a_host_with_another_dataset_or_a_stale_file_of_another_is_named(tmp_path: Path) -> None:
    facts = {
        host: {"data": {"digest": digest, "file_systems": ["nfs4"]}}
        for host, digest in zip("abc", "112", strict=True)
    }
    [(host, finding, _)] = failing(host_checks.check_datasets(facts))
    assert (host, finding) == ("c", "has another dataset: manifests 2, on other hosts 1")
    write_toy_dataset(tmp_path / "data")
    config = build_toy_config(tmp_path)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    request = {"config": str(tmp_path / "toy.yaml"), "overrides": []}
    mine = host_probe.read_datasets(request)
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert host_probe.read_datasets(request)["digest"] != mine["digest"]
    manifest.unlink()
    with pytest.raises(
        LlmsysError, match=r"manifest.json cannot be read \(No such file or directory\). Prepare"
    ):
        host_probe.read_datasets(request)
    # on a folder that is not shared, a file of that name holds what an earlier preflight wrote
    preflight = PreflightRequest("", [], config, [Host("localhost", 1), Host("127.0.0.1", 1)], 25)
    found = {
        host: host_probe.write_marker(tmp_path / "run", "new", rank)
        for rank, host in enumerate(preflight.host_names)
    }
    both = {host: {"folder": folder} for host, folder in found.items()}
    assert not failing(run_preflight._check_sharing(preflight, both, "new", 25))
    (tmp_path / "run" / "new" / "1").write_text("old:1\n")
    problems = failing(run_preflight._check_sharing(preflight, both, "new", 25))
    assert {finding.partition(" wrote")[0] for _, finding, _ in problems} == {
        "does not see the files that 127.0.0.1"
    }


def test_what_does_not_divide_or_cannot_be_read_is_found_before_a_rank_is_there(
    tmp_path: Path,
) -> None:
    config = build_toy_config(tmp_path, train={"reproducibility": "fast"}, layout={"tensor": 2})
    batch = config.batch.model_copy(update={"sequences": 9})
    for ranks, changed, message in (
        (3, config, "3 ranks cannot be split into tensor=2 equal parts"),
        (
            4,
            config.model_copy(update={"batch": batch}),
            "batch.sequences=9 cannot be divided evenly over 2 data ranks",
        ),
    ):
        [(host, finding, remedy)] = failing(
            check_divisibility(PreflightRequest("", [], changed, [Host("a", ranks)], 25))
        )
        assert (host, finding) == ("all", message)
        assert re.match("Start a multiple of 2 processes|Use batch.sequences=8", remedy)
    request = {
        "config": "train/demo",
        "overrides": [f"data.folder={tmp_path}/no"],
        "ranks": 2,
        "first_rank": 1,
    }
    with pytest.raises(LlmsysError, match=f"{tmp_path}/no"):
        host_probe.read_first_batch(request)


@pytest.mark.parametrize("micro", [8, "auto"])
def test_a_model_that_does_not_fit_the_smallest_host_is_refused_there(
    micro: int | str, tmp_path: Path
) -> None:
    batch = {"sequence_length": 32, "sequences": 16, "micro_sequences": micro}
    config = build_toy_config(tmp_path, train={"reproducibility": "fast"}, batch=batch)
    small = GPU | {"total_bytes": 1 << 20}
    [(host, finding, remedy)] = failing(
        check_memory_fit(config, [Host("a", 1), Host("b", 1)], {"a": told(GPU), "b": told(small)})
    )
    assert (host, "out" in finding) == ("b", True)
    assert remedy
    assert not failing(check_memory_fit(config, [Host("a", 2)], {"a": told(GPU, GPU)}))


def test_the_table_joins_hosts_and_puts_the_remedy_below() -> None:
    well = [HostFinding(host, "reach", "answers") for host in ("a", "b")]
    assert format_host_findings(
        [*well, HostFinding("b", "clock", "is late", "Wind it up.")]
    ).splitlines()[1:] == [
        "ok    reach  a, b  answers",
        "FAIL  clock  b     is late",
        "                   → Wind it up.",
    ]


def test_a_preflight_without_hosts_says_how_to_name_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["preflight", "train/demo"]) == 2
    assert (
        "A preflight needs hosts. Give nodes=first:8,second:8, or nodes=HOSTFILE."
        in capsys.readouterr().err
    )


H100 = GPU | {"name": "NVIDIA H100 80GB HBM3"}
WANTED = DryRunWish(runs=True)


def test_a_dry_run_is_offered_with_a_command_for_the_accelerators_that_are_there() -> None:
    hosts, facts = [Host("a", 8), Host("b", 8)], {"a": told(H100), "b": told(H100)}
    [found] = check_dry_run("my config.yaml", ["train.tokens=5"], hosts, facts, DryRunWish())
    assert found.finding.endswith(
        "llmsys dryrun 'my config.yaml' train.tokens=5 nodes=2:8 device=h100-sxm"
    )
    assert not found.remedy
    assert not list(check_dry_run("c.yaml", [], hosts, {"a": told(), "b": told()}, DryRunWish()))
    [refused] = check_dry_run("c.yaml", [], hosts, {"a": told(GPU)}, WANTED)
    assert "the hosts have H100, and no device profile is known by that name" in refused.finding
    assert refused.remedy.startswith("Give device=NAME or device=FILE; names: a10, a100-40gb,")
    uneven = [Host("a", 8), Host("b", 4)]
    assert not list(check_dry_run("c.yaml", [], uneven, facts, DryRunWish()))
    [refused] = check_dry_run("c.yaml", [], uneven, facts, WANTED)
    assert "hosts have 4 to 8 devices, and a dry run needs equally many on each" in refused.finding


def test_a_dry_run_is_of_the_largest_rank_and_of_the_memory_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = {
        "world_size": RANKS, "device": "H100 SXM 80GB", "fits": True, "num_waits": 1,
        "needed_bytes": GIB,
        "capacity_bytes": 79 * GIB, "memory": {"peak_bytes": GIB // 2, "peak_phase": "evaluation"},
        "collective_check": {"differences": []}, "block_check": {"differences": []},
    }  # fmt: skip
    hosts, asked = [Host("a", RANKS)], []

    def run_with_a_large_third_rank(request: DryRunRequest) -> dict[str, Any]:
        asked.append((request.rank, request.device))
        parameters = {"largest_rank": 2, "imbalance": 1.5}
        return result | {"rank": request.rank, "parameters": parameters}

    monkeypatch.setattr(dry_run_check, "run_dry_run", run_with_a_large_third_rank)
    [found] = check_dry_run("c.yaml", [], hosts, {"a": told(H100)}, WANTED)
    assert asked == [(0, "h100-sxm"), (2, "h100-sxm")]
    assert (found.finding.startswith("rank 2 of 8 fits"), found.remedy) == (True, "")
    small = H100 | {"total_bytes": GIB - 1}
    [found] = check_dry_run("c.yaml", [], hosts, {"a": told(H100), "b": told(small)}, WANTED)
    assert "but an accelerator of the hosts has 1.0 GiB" in found.finding
    assert found.remedy.startswith("Shard more")
    [found] = check_dry_run("c.yaml", [], hosts, {"a": told()}, DryRunWish(True, "b200"))
    assert asked[-1] == (2, "b200")
    result["collective_check"] = {"differences": ["missing: all_reduce over tensor"]}
    result["block_check"] = {"differences": ["wait of the host in a block"]}
    [found] = check_dry_run("c.yaml", [], hosts, {"a": told(H100)}, WANTED)
    assert found.finding.endswith("; missing: all_reduce over tensor; wait of the host in a block")
    assert found.remedy.startswith("Training would send other messages, or do other work, than its")


def test_a_run_that_cannot_be_run_dry_may_be_trained_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = [
        str(write_tiny_config()),
        ["engine.kind=deepspeed"],
        [Host("a", RANKS)],
        {"a": told(H100)},
        WANTED,
    ]
    [found] = check_dry_run(*request)  # type: ignore[arg-type]
    assert found.finding.startswith(
        "not run: engine.kind=deepspeed cannot be run on a pretended device"
    )
    assert not found.remedy

    def crash(request: DryRunRequest) -> None:
        raise LaunchError(
            "the dry run ended with status 1. Report it with this output:\nTraceback\n  …"
        )

    monkeypatch.setattr(dry_run_check, "run_dry_run", crash)
    [found] = check_dry_run(*request)  # type: ignore[arg-type]
    assert (found.finding, "Traceback" in found.remedy) == (
        "the dry run ended with status 1",
        False,
    )
    assert "engine.kind=deepspeed nodes=1:8 device=h100-sxm" in found.remedy

"""Preflight reads InfiniBand, EFA, interfaces and GPUs of pretended hosts, and names what would
slow or end a run.
"""

from pathlib import Path
from typing import Any

import pytest

from llmsys.launch.preflight.hardware_checks import check_hardware, select_named
from llmsys.launch.preflight.hardware_probe import collect_hardware_facts

# As nvidia-smi 570 writes it for an H100, shortened.
GPU = """
<gpu id="00000000:{place}:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <pci><pci_gpu_link_info><link_widths>
    <max_link_width>16x</max_link_width><current_link_width>{width}x</current_link_width>
  </link_widths></pci_gpu_link_info></pci>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <ecc_errors>
    <volatile>
      <sram_correctable>7</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_uncorrectable>{ecc}</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate>
  </ecc_errors>
  <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
  <remapped_rows>
    <remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failed}</remapped_row_failure>
  </remapped_rows>
  <temperature><gpu_temp>61 C</gpu_temp></temperature>
</gpu>"""
WELL = {
    "place": "3B",
    "width": 16,
    "thermal": "Not Active",
    "ecc": 0,
    "pending": "No",
    "failed": "No",
}
DMESG = """[ 12.0] eth0: link up
[999.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.
[999.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=2, name=python, Ch 00000008, MMU fault
"""


def pretend_host(
    root: Path,
    *,
    ports: tuple[str, ...] = (),
    driver: str = "mlx5_core",
    gpu: dict[str, Any] | None = None,
    dmesg: str | None = "",
    **variables: str,
) -> dict[str, Any]:
    """Write a host's /sys and return its facts. `ports` are the states of one port of each
    device.
    """
    for name, state in (("eth0", "up"), ("ib0", "down"), ("lo", "unknown")):
        write(root / "sys/class/net" / name / "operstate", state)
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    for number, state in enumerate(ports):
        port = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        fields = {"state": f"4: {state}", "phys_state": "5: LinkUp", "link_layer": "InfiniBand"}
        for name, text in (fields | {"rate": "400 Gb/sec (4X NDR)"}).items():
            write(port / name, text)
        (port.parents[1] / "device").mkdir()
        (port.parents[1] / "device" / "driver").symlink_to(root / "drivers" / driver)
    xml = (
        f"<nvidia_smi_log>{GPU.format(**WELL | gpu)}</nvidia_smi_log>" if gpu is not None else None
    )
    answers = {"nvidia-smi": xml, "dmesg": dmesg}
    facts = collect_hardware_facts(root, lambda words: answers[words[0]], variables)
    return facts | {"memlock_bytes": None, "shared_memory_bytes": 64 << 30}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def list_findings(**hosts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (one.host, one.check, one.finding, one.remedy)
        for one in check_hardware({host: {"hardware": facts} for host, facts in hosts.items()})
    ]


def list_problems(**hosts: dict[str, Any]) -> list[tuple[str, str]]:
    """Host and finding of every failed check; each has a remedy."""
    return [(host, finding) for host, _, finding, remedy in list_findings(**hosts) if remedy]


def test_hosts_on_which_all_is_well_have_a_row_for_each_kind_of_hardware(tmp_path: Path) -> None:
    good = pretend_host(
        tmp_path, ports=("ACTIVE",) * 2, gpu={}, NCCL_SOCKET_IFNAME="=eth0", NCCL_API_KEY="hush"
    )
    assert list_findings(a=good) == [
        ("a", "network", "up: eth0", ""),
        ("a", "settings", "NCCL_SOCKET_IFNAME==eth0", ""),
        ("a", "fabric", "2 × InfiniBand 400 Gb/sec (4X NDR)", ""),
        ("a", "gpus", "1 without errors, repairs or slowdowns", ""),
    ]
    plain = pretend_host(tmp_path / "plain", dmesg=None)
    assert [one[1] for one in list_findings(a=plain)] == ["network", "settings"]


@pytest.mark.parametrize(
    ("variables", "finding"),
    [
        (
            {"NCCL_SOCKET_IFNAME": "ens"},
            "NCCL_SOCKET_IFNAME=ens names no interface of this host, which has eth0, ib0, lo",
        ),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth names no interface of this host"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth names no interface"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME=ib: ib0 is down"),
        ({"FI_PROVIDER": "efa"}, "FI_PROVIDER=efa, but there is no EFA device"),
        (
            {"NCCL_IB_HCA": "bnxt"},
            "NCCL_IB_HCA=bnxt names no device of this host, which has mlx5_0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_variable_that_names_nothing_is_reported(
    tmp_path: Path, variables: dict[str, str], finding: str
) -> None:
    facts = pretend_host(tmp_path, ports=("ACTIVE",)) | {"variables": variables}
    [(host, found)] = list_problems(a=facts)
    assert host == "a"
    assert found.startswith(finding)


@pytest.mark.parametrize(
    ("value", "prefixes", "chosen"),
    [
        ("eth", True, ["eth0", "eth1"]),
        ("=eth1", True, ["eth1"]),
        ("^docker,lo", True, ["eth0", "eth1"]),
        ("^=eth0", True, ["eth1", "docker0", "lo"]),
        ("eth0,lo", False, ["eth0", "lo"]),
        ("eth", False, []),
        ("eth1:1", True, ["eth1"]),
    ],
)
def test_names_are_selected_as_nccl_and_gloo_do(
    value: str, prefixes: bool, chosen: list[str]
) -> None:
    assert select_named(value, ["eth0", "eth1", "docker0", "lo"], prefixes=prefixes) == chosen


def test_the_host_with_a_dead_port_or_other_settings_is_named_and_not_the_others(
    tmp_path: Path,
) -> None:
    well = pretend_host(tmp_path / "well", ports=("ACTIVE",) * 2, NCCL_ALGO="Ring")
    odd = pretend_host(tmp_path / "odd", ports=("ACTIVE", "DOWN"))
    (tmp_path / "third" / "etc").mkdir(parents=True)
    (tmp_path / "third" / "etc" / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    third = pretend_host(
        tmp_path / "third", ports=("ACTIVE",) * 2, NCCL_ALGO="Ring", NCCL_SOCKET_IFNAME="eth0"
    )
    assert list_problems(a=odd, b=well, c=well, d=third) == [
        ("a", "NCCL_ALGO is not set, on other hosts Ring"),
        ("d", "/etc/nccl.conf differs from that of the other hosts"),
        (
            "a",
            "has 1 × InfiniBand 400 Gb/sec (4X NDR) (mlx5_1 DOWN), other hosts 2 × InfiniBand 400 "
            "Gb/sec (4X NDR)",
        ),
    ]


def test_a_host_with_another_setting_has_no_passing_line(tmp_path: Path) -> None:
    plain = pretend_host(tmp_path / "plain")
    found = list_findings(a=pretend_host(tmp_path / "a", NCCL_ALGO="Tree"), b=plain, c=plain)
    lines = [(one[0], bool(one[3])) for one in found if one[1] == "settings"]
    assert lines == [("a", True), ("b", False), ("c", False)]


def test_efa_needs_its_plugin_and_rdma_unlimited_memory(tmp_path: Path) -> None:
    bare = pretend_host(tmp_path / "bare", ports=("ACTIVE",) * 4, driver="efa", FI_PROVIDER="tcp")
    assert list_problems(a=bare | {"memlock_bytes": 64 << 10}) == [
        ("a", "FI_PROVIDER=tcp leaves 4 EFA devices unused"),
        ("a", "4 EFA devices, but no NCCL plugin for them (libnccl-net.so): NCCL would use TCP"),
        ("a", "only 64 KiB of memory can be locked, which RDMA needs without limit"),
    ]
    write(tmp_path / "whole" / "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so", "")
    assert not list_problems(
        a=pretend_host(tmp_path / "whole", ports=("ACTIVE",) * 4, driver="efa")
    )
    off = pretend_host(tmp_path / "off", ports=("ACTIVE",), NCCL_IB_DISABLE="1")
    [fabric] = [one for one in list_findings(a=off) if one[1] == "fabric"]
    assert fabric[2].endswith("; NCCL_IB_DISABLE=1 leaves them unused")


@pytest.mark.parametrize(
    ("gpu", "finding"),
    [
        ({"ecc": 2}, "2 uncorrectable ECC errors since the driver was loaded"),
        ({"pending": "Yes"}, "a repair of its memory waits for a reset"),
        ({"failed": "Yes"}, "a row of its memory could not be remapped"),
        ({"thermal": "Active"}, "lowers its clocks: hw_thermal_slowdown at 61 C"),
        ({"width": 8}, "its PCIe link has 8 of 16 lanes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_gpu_that_fails_or_slows_down_is_named_by_its_place(
    tmp_path: Path, gpu: dict[str, Any], finding: str
) -> None:
    [(_, found)] = list_problems(a=pretend_host(tmp_path, gpu=gpu))
    assert found.startswith("GPU 00000000:3B:00.0")
    assert found.endswith(finding)


def test_an_xid_of_the_hardware_is_reported_and_one_of_a_program_is_not(tmp_path: Path) -> None:
    [(_, found)] = list_problems(a=pretend_host(tmp_path, gpu={}, dmesg=DMESG))
    assert (
        found == "GPU 0000:3b:00: Xid 79 in the kernel's log (GPU has fallen off the bus), 1 times"
    )
    [gpus] = [
        one
        for one in list_findings(a=pretend_host(tmp_path / "b", gpu={}, dmesg=None))
        if one[1] == "gpus"
    ]
    assert gpus[2].endswith("the kernel's log is not readable, so Xid errors were not looked for")
    small = pretend_host(tmp_path / "c", gpu={}) | {"shared_memory_bytes": 64 << 20}
    assert list_problems(a=small) == [("a", "/dev/shm has 0.06 GiB, which NCCL and batches share")]


def test_this_host_is_read_without_an_error() -> None:
    facts = collect_hardware_facts()
    assert "lo" in facts["interfaces"]
    assert [one[1] for one in list_findings(a=facts)][:1] == ["network"]

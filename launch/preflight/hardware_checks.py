"""Turn what hardware_probe.py read on each host into findings of `llmsys preflight`. Pure
functions.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsys.launch.hosts.host_checks import GIB, Facts, HostFinding, select_most_common

ACTIVE, EFA = "ACTIVE", "efa"
MIN_SHARED_MEMORY_BYTES = 1 * GIB  # of a host with accelerators; containers have 64 MB by default
# Xid errors of the hardware or driver, by NVIDIA's catalogue; others are mostly faults of a
# program.
HARDWARE_XIDS = {
    48: "double-bit ECC error", 62: "internal error of the GPU", 63: "row remapped",
    64: "row remapping failed",
    74: "NVLink error", 79: "GPU has fallen off the bus", 92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error", 119: "the GPU's processor does not answer",
    120: "error of the GPU's processor",
    140: "unrecovered ECC error",
}  # fmt: skip
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_hardware(facts: Facts) -> Iterator[HostFinding]:
    """Yield the checks of network settings, InfiniBand, EFA, shared memory and accelerators of
    every host.

    Args:
        facts: Answers of the hosts' probes; hosts without `hardware` are left out.

    Yields:
        Findings of the checks `network`, `settings`, `fabric` and `gpus`; `fabric` and `gpus` only
        where a host has such devices.
    """
    hardware = {host: probe["hardware"] for host, probe in facts.items() if "hardware" in probe}
    for host, one in hardware.items():
        yield from _check_interfaces(host, one)
    yield from _check_settings(hardware)
    yield from _check_fabric(hardware)
    for host, one in hardware.items():
        yield from _check_gpus(host, one)


def _check_interfaces(host: str, one: Mapping[str, Any]) -> Iterator[HostFinding]:
    """Check that the interfaces that variables name exist and are up."""
    states, wrong = one["interfaces"], False
    for name in INTERFACE_VARIABLES:
        if not (value := one["variables"].get(name)):
            continue
        matched = select_named(value, list(states), prefixes=name.startswith("NCCL"))
        # a bridge or a tunnel may be `unknown` and work
        down = [interface for interface in matched if states[interface] == "down"]
        if not matched:
            wrong = True
            yield HostFinding(
                host,
                "network",
                f"{name}={value} names no interface of this host, which has {', '.join(states)}",
                f"Set {name} to the interface that leads to the other hosts, or unset it: it is "
                "then chosen by route.",
            )
        elif len(down) == len(matched):
            wrong = True
            yield HostFinding(
                host,
                "network",
                f"{name}={value}: {', '.join(down)} is down",
                f"Bring it up: ip link set {down[0]} up; or change {name}.",
            )
    if not wrong:
        up = [name for name, state in states.items() if state == "up"]
        yield HostFinding(host, "network", f"up: {', '.join(up) or 'no interface but loopback'}")


def select_named(value: str, names: Sequence[str], *, prefixes: bool) -> list[str]:
    """Return the names that a list of NCCL or gloo selects.

    Args:
        value: `a,b`; for NCCL a list of prefixes, `=` before exact names, `^` before excluded ones.
        names: What there is.
        prefixes: Follow NCCL's rule; otherwise names are exact.

    Returns:
        The selected names, in the order of `names`.
    """
    exclude, exact = value.startswith("^"), not prefixes
    rest = value.lstrip("^")
    if prefixes and rest.startswith("="):
        exact, rest = True, rest[1:]
    # a device may have a port after a colon: mlx5_0:1
    wanted = [part.strip().partition(":")[0] for part in rest.split(",") if part.strip()]
    chosen = [
        name
        for name in names
        if any(name == one if exact else name.startswith(one) for one in wanted)
    ]
    return [name for name in names if name not in chosen] if exclude else chosen


def _check_settings(hardware: Mapping[str, Mapping[str, Any]]) -> Iterator[HostFinding]:
    """Check that variables of NCCL, gloo and libfabric and NCCL's file of settings are equal on
    all hosts.
    """
    different: set[str] = set()
    for name in sorted({name for one in hardware.values() for name in one["variables"]}):
        values = {host: one["variables"].get(name, "") for host, one in hardware.items()}
        usual = select_most_common(list(values.values()))
        # hosts may name their interfaces differently
        for host, value in values.items() if name not in INTERFACE_VARIABLES else ():
            if value != usual:
                observation = f"{name} is {value or 'not set'}, on other hosts {usual or 'not set'}"
                different.add(host)
                yield HostFinding(
                    host, "settings", observation, f"Set {name} equally on every host, or nowhere."
                )
    usual = select_most_common([one["nccl_conf"] for one in hardware.values()]) if hardware else ""
    for host, one in hardware.items():
        if one["nccl_conf"] != usual:
            yield HostFinding(
                host,
                "settings",
                "/etc/nccl.conf differs from that of the other hosts",
                "Copy one /etc/nccl.conf to every host, or remove it.",
            )
        elif host not in different:
            given = [f"{name}={value}" for name, value in one["variables"].items()]
            yield HostFinding(
                host,
                "settings",
                ", ".join(given) or "no variable of NCCL, gloo or libfabric is set",
            )


def _check_fabric(hardware: Mapping[str, Mapping[str, Any]]) -> Iterator[HostFinding]:
    """Check the ports of InfiniBand and EFA, and the settings that use them."""
    active = {
        host: [port for port in one["ports"] if port["state"] == ACTIVE]
        for host, one in hardware.items()
    }
    usual = select_most_common([format_ports(ports) for ports in active.values()]) if active else ""
    for host, one in hardware.items():
        problems = [*_find_fabric_problems(one, active[host])]
        if (mine := format_ports(active[host])) != usual:
            down = [
                f"{port['device']} {port['state']}"
                for port in one["ports"]
                if port["state"] != ACTIVE
            ]
            problems.append(
                (
                    f"has {mine}{' (' + ', '.join(down) + ')' if down else ''}, other hosts "
                    f"{usual}",
                    "Check cable, switch and driver: ibstat, or the EFA interfaces of the "
                    "instance.",
                )
            )
        yield from (HostFinding(host, "fabric", *problem) for problem in problems)
        if not problems and one["ports"]:
            is_unused = bool(active[host]) and one["variables"].get("NCCL_IB_DISABLE") == "1"
            unused = "; NCCL_IB_DISABLE=1 leaves them unused" if is_unused else ""
            yield HostFinding(host, "fabric", f"{mine}{unused}")


def _find_fabric_problems(
    one: Mapping[str, Any], active: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield observation and remedy of each problem that a host has by itself."""
    variables, efa = one["variables"], [port for port in one["ports"] if port["driver"] == EFA]
    provider = variables.get("FI_PROVIDER", "")
    if provider == EFA and not efa:
        yield (
            "FI_PROVIDER=efa, but there is no EFA device",
            "Unset FI_PROVIDER, or attach EFA interfaces.",
        )
    if efa and provider not in ("", EFA):
        yield f"FI_PROVIDER={provider} leaves {len(efa)} EFA devices unused", "Set FI_PROVIDER=efa."
    if efa and not one["plugins"]:
        missing = (
            f"{len(efa)} EFA devices, but no NCCL plugin for them (libnccl-net.so): NCCL would "
            "use TCP"
        )
        yield missing, "Install aws-ofi-nccl, and add its lib folder to LD_LIBRARY_PATH."
    devices = sorted({port["device"] for port in one["ports"]})
    if (chosen := variables.get("NCCL_IB_HCA")) and not select_named(
        chosen, devices, prefixes=True
    ):
        there = ", ".join(devices) or "no device"
        yield (
            f"NCCL_IB_HCA={chosen} names no device of this host, which has {there}",
            "Correct or unset NCCL_IB_HCA.",
        )
    if active and one["memlock_bytes"] is not None:
        limit = (
            f"only {one['memlock_bytes'] // 1024} KiB of memory can be locked, which RDMA needs "
            "without limit"
        )
        yield (
            limit,
            "Set `memlock unlimited` in /etc/security/limits.conf, or --ulimit memlock=-1 for a "
            "container.",
        )


def format_ports(ports: Sequence[Mapping[str, str]]) -> str:
    """Return a count of ports by kind and rate.

    Args:
        ports: Active ports.

    Returns:
        Such as `8 × InfiniBand 400 Gb/sec (4X NDR)`.
    """
    kinds = Counter(
        f"{'EFA' if port['driver'] == EFA else port['layer']} {port['rate']}".strip()
        for port in ports
    )
    return (
        ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())) or "no active port"
    )


def _check_gpus(host: str, one: Mapping[str, Any]) -> Iterator[HostFinding]:
    """Check errors, repairs, slowdowns and links of a host's GPUs, and its shared memory."""
    if not (gpus := one["gpus"]):
        return
    problems = [problem for gpu in gpus for problem in _find_gpu_problems(gpu)]
    for (place, number), count in Counter(map(tuple, one["xids"] or ())).items():
        if number in HARDWARE_XIDS:
            observation = (
                f"GPU {place}: Xid {number} in the kernel's log ({HARDWARE_XIDS[number]}), "
                f"{count} times"
            )
            problems.append(
                (observation, "Reset or replace the GPU; see NVIDIA's catalogue of Xid errors.")
            )
    if one["shared_memory_bytes"] < MIN_SHARED_MEMORY_BYTES:
        observation = (
            f"/dev/shm has {one['shared_memory_bytes'] / GIB:.2f} GiB, which NCCL and batches share"
        )
        problems.append((observation, "Enlarge it: --ipc=host or --shm-size=16g for a container."))
    yield from (HostFinding(host, "gpus", *problem) for problem in problems)
    if not problems:
        log = (
            ""
            if one["xids"] is not None
            else "; the kernel's log is not readable, so Xid errors were not looked for"
        )
        yield HostFinding(host, "gpus", f"{len(gpus)} without errors, repairs or slowdowns{log}")


def _find_gpu_problems(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    name = f"GPU {gpu['place']}"
    if gpu["has_failed_repair"]:
        yield f"{name}: a row of its memory could not be remapped", "Replace the GPU."
    if gpu["uncorrected_errors"]:
        errors = (
            f"{name}: {gpu['uncorrected_errors']} uncorrectable ECC errors since the driver was "
            "loaded"
        )
        yield errors, "Reset the GPU (nvidia-smi --gpu-reset); replace it if they come back."
    if gpu["has_pending_repair"]:
        yield (
            f"{name}: a repair of its memory waits for a reset",
            "Reset it: nvidia-smi --gpu-reset, or restart.",
        )
    if gpu["slowdowns"]:
        active = f"{name} lowers its clocks: {', '.join(gpu['slowdowns'])} at {gpu['temperature']}"
        yield (
            active,
            "Check cooling and power of the host: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER.",
        )
    if 0 < gpu["link_width"] < gpu["max_link_width"]:
        link = f"{name}: its PCIe link has {gpu['link_width']} of {gpu['max_link_width']} lanes"
        yield link, "Reseat the GPU, or have the host checked."

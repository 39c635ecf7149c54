"""From what hosts said to what is well and what would fail: pure functions over facts, for `llmsys preflight`.

Reads answers and facts by host; gives `HostFinding`s, each with the host, what was found and, where a run would fail,
the remedy. Asks nobody anything.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launch.hosts.hostfile import Host
from launch.hosts.ssh import TIMED_OUT, SshResult, describe_ssh_remedy

MOST_SKEW_SECONDS = 2.0
"""Clocks that are further apart confuse time limits, heartbeats and file times; any time service keeps them closer."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: master weight and two moments in fp32."""
BUSY_SHARE = 0.1
"""An accelerator with more of its memory taken belongs to somebody."""
NO_ACCELERATOR = "no accelerator, ranks run on the CPU"
GIB = 1 << 30

Facts = Mapping[str, dict[str, Any]]


class HostFinding(NamedTuple):
    """One row of the table. An empty remedy means that all is well."""

    host: str
    check: str
    finding: str
    remedy: str = ""


def build_problem(host: str, check: str, message: str) -> HostFinding:
    """A message of ours, "value and rule. next step", as a row."""
    finding, _, remedy = " ".join(message.split()).partition(". ")
    return HostFinding(host, check, finding, remedy or "Look into it there.")


def check_ssh(host: str, answer: SshResult) -> HostFinding:
    """Whether ssh came through."""
    if answer.status == 0:
        return HostFinding(host, "reach", "answers")
    if answer.is_unreachable:
        return HostFinding(
            host, "reach", f"cannot be reached: {answer.last_error_line}", describe_ssh_remedy(host, answer)
        )
    if answer.status == TIMED_OUT:
        said = f"did not answer within {answer.seconds:.0f} s"
        return HostFinding(host, "reach", said, f"See what keeps it busy: ssh {host} uptime.")
    return HostFinding(
        host, "reach", f"answers, but runs no command: {answer.last_error_line}", f"Try it by hand: ssh {host} date."
    )


def check_clock(host: str, answer: SshResult) -> HostFinding:
    """How far a clock is from this host's; the time that the answer took is the doubt about it."""
    try:
        said = float(answer.output.split()[-1])
    except (ValueError, IndexError):
        return HostFinding(host, "clock", f"`date +%s.%N` says {answer.output.strip()!r}", "Give it GNU date.")
    doubt = answer.seconds / 2
    skew = said - (answer.asked_at + doubt)
    if abs(skew) - doubt > MOST_SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        return HostFinding(
            host,
            "clock",
            f"is {abs(skew):.1f} s {way} this host; {MOST_SKEW_SECONDS:g} s is the most that is allowed",
            "Set it by a time service: systemctl restart chrony, or systemd-timesyncd.",
        )
    return HostFinding(host, "clock", f"within {abs(skew) + doubt:.1f} s of this host")


def check_versions(facts: Facts) -> Iterator[HostFinding]:
    """Versions and code: what most hosts have is the measure, and the first host's where they are divided."""
    names = list(next(iter(facts.values()))["versions"])
    wanted = {name: _select_most_common([told["versions"][name] for told in facts.values()]) for name in names}
    code = _select_most_common([told["code"] for told in facts.values()])
    for host, told in facts.items():
        mine = told["versions"]
        other = [name for name in names if mine[name] != wanted[name]]
        for name in other:
            said = f"{name} is {mine[name]}, elsewhere {wanted[name]}"
            yield HostFinding(host, "versions", said, f"Install {name} {wanted[name]} there, or share one environment.")
        if not other:
            yield HostFinding(
                host, "versions", ", ".join(f"{name} {mine[name]}" for name in ("python", "llmsys", "torch"))
            )
        digest = f"digest {told['code']} {told['commit']}".strip()
        if told["code"] != code:
            said = f"files of code differ: {digest}, elsewhere {code}"
            yield HostFinding(host, "code", said, "Bring it to the same commit there, or share one checkout.")
        else:
            yield HostFinding(host, "code", digest)


def check_rendezvous_address(host: str, told: Mapping[str, Any], first: str, several: bool) -> HostFinding:
    """Whether the first host, where ranks meet, has an address that others can use."""
    if "address_problem" in told:
        return build_problem(host, "address", told["address_problem"])
    address = str(told["address"])
    if several and (address.startswith("127.") or address == "::1"):
        return HostFinding(
            host,
            "address",
            f"takes {first} for {address}, a loopback address that leads to no other host",
            f"Give {first} its real address in /etc/hosts here, or use addresses in nodes=.",
        )
    return HostFinding(host, "address", f"{first} is {address}")


def check_devices(facts: Facts, hosts: Sequence[Host]) -> Iterator[HostFinding]:
    """Accelerators: as many as slots, of one kind, and not somebody else's."""
    kinds = {host: _get_device_kind(told["devices"]) for host, told in facts.items() if "devices" in told}
    usual = _select_most_common(list(kinds.values())) if kinds else ""
    slots = {host.name: host.slots for host in hosts}
    for host, told in facts.items():
        if "devices_problem" in told:
            yield build_problem(host, "devices", told["devices_problem"])
            continue
        found = told["devices"]["accelerators"]
        if kinds[host] != usual:
            yield HostFinding(
                host, "devices", f"has {kinds[host]}, elsewhere {usual}", "Use hosts of one kind in a run."
            )
        elif found and len(found) < slots[host]:
            said = f"has {len(found)} accelerators for {slots[host]} slots"
            yield HostFinding(host, "devices", said, f"Use {host}:{len(found)}, or look at nvidia-smi there.")
        elif busy := [one for one in found if one["free_bytes"] < (1 - BUSY_SHARE) * one["total_bytes"]]:
            free, total = busy[0]["free_bytes"] / GIB, busy[0]["total_bytes"] / GIB
            said = f"{len(busy)} accelerators are in use; of one, {free:.0f} of {total:.0f} GiB are free"
            yield HostFinding(host, "devices", said, "End what runs there: nvidia-smi names it.")
        else:
            memory = told["devices"]["memory_bytes"] / GIB
            said = f"{len(found)} × {kinds[host]}" if found else kinds[host]
            yield HostFinding(host, "devices", f"{said}; {memory:.0f} GiB of host memory free")


def check_disk(host: str, told: Mapping[str, Any], folder: str, parameters: int, checkpoints: int) -> HostFinding:
    """Whether the run folder can be written and has room for the checkpoints that are kept, and one in the making."""
    if "folder_problem" in told:
        return build_problem(host, "disk", told["folder_problem"])
    free, wanted = told["folder"]["free_bytes"], parameters * BYTES_PER_PARAMETER * (checkpoints + 1)
    if free < wanted:
        said = f"{free / GIB:.1f} GiB are free at {folder}, and {checkpoints + 1} checkpoints take {wanted / GIB:.1f}"
        return HostFinding(host, "disk", said, "Free space, lower checkpoint.keep_last, or set run.folder elsewhere.")
    return HostFinding(host, "disk", f"{free / GIB:.1f} GiB free, {wanted / GIB:.1f} wanted")


def check_shared_folder(host: str, seen: set[str], hosts: Sequence[str], folder: str) -> HostFinding:
    """Whether this host sees the files that the others left."""
    unseen = [other for other in hosts if other not in seen]
    if unseen:
        return HostFinding(
            host,
            "shared",
            f"does not see in {folder} what {', '.join(unseen)} wrote there",
            "Mount one shared folder on all hosts, and set run.folder to a path in it.",
        )
    return HostFinding(host, "shared", f"sees what {len(hosts)} hosts wrote")


def _get_device_kind(told: Mapping[str, Any]) -> str:
    names = [str(one["name"]) for one in told["accelerators"]]
    return _select_most_common(names) if names else NO_ACCELERATOR


def _select_most_common(values: Sequence[str]) -> str:
    """The most frequent; of equally frequent ones the first."""
    return Counter(values).most_common(1)[0][0]

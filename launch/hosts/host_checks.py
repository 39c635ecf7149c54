"""Turn host probe results into preflight findings: host, observation, and a fix where the run would
fail.

Pure functions.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.hosts.ssh import TIMED_OUT, SshResult, describe_ssh_remedy

# Larger differences break timeouts, heartbeats and file times; any time service keeps clocks
# closer.
MOST_SKEW_SECONDS = 2.0
# Size of a checkpoint: master weight and two Adam moments in fp32.
BYTES_PER_PARAMETER = 12
# An accelerator with a larger share of its memory in use counts as busy.
BUSY_SHARE = 0.1
NO_ACCELERATOR = "no accelerator, ranks run on the CPU"
GIB = 1 << 30

Facts = Mapping[str, dict[str, Any]]


class HostFinding(NamedTuple):
    """One row of the preflight table. An empty remedy means that the check passed.

    `fit_probability` is that of the memory check: the fullest rank fits its accelerator.
    """

    host: str
    check: str
    finding: str
    remedy: str = ""
    fit_probability: float | None = None


def build_problem(host: str, check: str, message: str) -> HostFinding:
    """Return a failed check from one of our error messages.

    Args:
        host: Name of the host.
        check: Name of the check.
        message: "value and rule. next step": the first sentence becomes the finding, the rest the
            remedy.

    Returns:
        A finding with a remedy.
    """
    finding, _, remedy = " ".join(message.split()).partition(". ")
    return HostFinding(host, check, finding, remedy or "Check the host.")


def check_ssh(host: str, answer: SshResult) -> HostFinding:
    """Check that a host ran a command by ssh.

    Args:
        host: Name of the host.
        answer: Result of any command.

    Returns:
        One finding, check `reach`.
    """
    if answer.status == 0:
        return HostFinding(host, "reach", "answers")
    if answer.is_unreachable:
        return HostFinding(
            host,
            "reach",
            f"cannot be reached: {answer.last_error_line}",
            describe_ssh_remedy(host, answer),
        )
    if answer.status == TIMED_OUT:
        return HostFinding(
            host,
            "reach",
            f"did not answer within {answer.seconds:.0f} s",
            f"Check its load: ssh {host} uptime.",
        )
    return HostFinding(
        host,
        "reach",
        f"responds, but cannot run a command: {answer.last_error_line}",
        f"Try it manually: ssh {host} date.",
    )


def check_clock(host: str, answer: SshResult) -> HostFinding:
    """Check that a host's clock agrees with this host's.

    Half of the time that the answer took is the uncertainty of the difference.

    Args:
        host: Name of the host.
        answer: Result of a command whose last word is `date +%s.%N`.

    Returns:
        One finding, check `clock`; it fails beyond MOST_SKEW_SECONDS.
    """
    try:
        clock = float(answer.output.split()[-1])
    except (ValueError, IndexError):
        return HostFinding(
            host,
            "clock",
            f"`date +%s.%N` says {answer.output.strip()!r}",
            "Install GNU date there.",
        )
    # the clock was read at some time between the question and the answer
    uncertainty = answer.seconds / 2
    skew = clock - (answer.asked_at + uncertainty)
    if abs(skew) - uncertainty > MOST_SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        return HostFinding(
            host,
            "clock",
            f"is {abs(skew):.1f} s {way} this host; {MOST_SKEW_SECONDS:g} s is the maximum",
            "Synchronize it with a time service: systemctl restart chrony, or systemd-timesyncd.",
        )
    return HostFinding(host, "clock", f"within {abs(skew) + uncertainty:.1f} s of this host")


def check_versions(facts: Facts) -> Iterator[HostFinding]:
    """Check that every host has the most common versions and code; on a tie the first.

    Args:
        facts: what each host answered, by host.

    Yields:
        Findings of each host.
    """
    names = list(next(iter(facts.values()))["versions"])
    usual = {
        name: select_most_common([probe["versions"][name] for probe in facts.values()])
        for name in names
    }
    code = select_most_common([probe["code"] for probe in facts.values()])
    for host, probe in facts.items():
        mine = probe["versions"]
        other = [name for name in names if mine[name] != usual[name]]
        for name in other:
            yield HostFinding(
                host,
                "versions",
                f"{name} is {mine[name]}, on other hosts {usual[name]}",
                f"Install {name} {usual[name]} there, or share one environment.",
            )
        if not other:
            yield HostFinding(
                host,
                "versions",
                ", ".join(f"{name} {mine[name]}" for name in ("python", "llmsys", "torch")),
            )
        digest = f"digest {probe['code']} {probe['commit']}".strip()
        if probe["code"] != code:
            yield HostFinding(
                host,
                "code",
                f"files of code differ: {digest}, on other hosts {code}",
                "Check out the same commit there, or share one checkout.",
            )
        else:
            yield HostFinding(host, "code", digest)


def check_rendezvous_address(
    host: str, probe: Mapping[str, Any], first: str, several: bool
) -> HostFinding:
    """Check that the name of the first host resolves to an address that other hosts can use.

    Args:
        host: the host that resolved the name.
        probe: what it answered.
        first: name of the first host.
        several: the run has more than one host, which a loopback address does not reach.
    """
    if "address_problem" in probe:
        return build_problem(host, "address", probe["address_problem"])
    address = str(probe["address"])
    if several and (address.startswith("127.") or address == "::1"):
        return HostFinding(
            host,
            "address",
            f"resolves {first} to {address}, a loopback address, which does not reach other hosts",
            f"Give {first} its real address in /etc/hosts here, or use addresses in nodes=.",
        )
    return HostFinding(host, "address", f"{first} is {address}")


def check_devices(facts: Facts, hosts: Sequence[Host]) -> Iterator[HostFinding]:
    """Check the accelerators of every host: at least one per slot, all of one kind, and not in use.

    Args:
        facts: what each host answered, by host.
        hosts: hosts with their slots.

    Yields:
        A finding for each host.
    """
    kinds = {
        host: _get_device_kind(probe["devices"])
        for host, probe in facts.items()
        if "devices" in probe
    }
    usual = select_most_common(list(kinds.values())) if kinds else ""
    slots = {host.name: host.slots for host in hosts}
    for host, probe in facts.items():
        if "devices_problem" in probe:
            yield build_problem(host, "devices", probe["devices_problem"])
            continue
        found = probe["devices"]["accelerators"]
        if kinds[host] != usual:
            yield HostFinding(
                host,
                "devices",
                f"has {kinds[host]}, other hosts {usual}",
                "Use hosts of one kind in a run.",
            )
        elif found and len(found) < slots[host]:
            yield HostFinding(
                host,
                "devices",
                f"has {len(found)} accelerators for {slots[host]} slots",
                f"Use {host}:{len(found)}, or check nvidia-smi there.",
            )
        elif busy := [
            one for one in found if one["free_bytes"] < (1 - BUSY_SHARE) * one["total_bytes"]
        ]:
            free, total = busy[0]["free_bytes"] / GIB, busy[0]["total_bytes"] / GIB
            yield HostFinding(
                host,
                "devices",
                f"{len(busy)} accelerators are in use; of one, {free:.0f} of {total:.0f} GiB are "
                "free",
                "End the processes that nvidia-smi lists there.",
            )
        else:
            memory = probe["devices"]["memory_bytes"] / GIB
            observation = f"{len(found)} × {kinds[host]}" if found else kinds[host]
            yield HostFinding(
                host, "devices", f"{observation}; {memory:.0f} GiB of host memory free"
            )


def check_disk(
    host: str, probe: Mapping[str, Any], folder: str, parameters: int, checkpoints: int
) -> HostFinding:
    """Check that the run folder can be written and has space for the kept checkpoints and one more.

    Args:
        host: the host.
        probe: what it answered.
        folder: the run folder.
        parameters: parameters of the model.
        checkpoints: checkpoints that are kept.
    """
    if "folder_problem" in probe:
        return build_problem(host, "disk", probe["folder_problem"])
    free, wanted = (
        probe["folder"]["free_bytes"],
        parameters * BYTES_PER_PARAMETER * (checkpoints + 1),
    )
    if free < wanted:
        return HostFinding(
            host,
            "disk",
            f"{free / GIB:.1f} GiB are free at {folder}, and {checkpoints + 1} checkpoints take "
            f"{wanted / GIB:.1f}",
            "Free space, lower checkpoint.keep_last, or set run.folder elsewhere.",
        )
    kind = probe["folder"]["file_system"]
    return HostFinding(
        host, "disk", f"{free / GIB:.1f} GiB free on {kind}, {wanted / GIB:.1f} wanted"
    )


def check_datasets(facts: Facts) -> Iterator[HostFinding]:
    """Check that every host has the same manifests of datasets.

    Args:
        facts: what each host answered, by host; on a tie the first host is right.

    Yields:
        A finding for each host.
    """
    digests = {host: probe["data"]["digest"] for host, probe in facts.items() if "data" in probe}
    usual = select_most_common(list(digests.values())) if digests else ""
    for host, probe in facts.items():
        if "data_problem" in probe:
            yield build_problem(host, "data", probe["data_problem"])
        elif digests[host] != usual:
            yield HostFinding(
                host,
                "data",
                f"has another dataset: manifests {digests[host]}, on other hosts {usual}",
                "Copy one dataset to every host, or share its folder.",
            )
        else:
            yield HostFinding(
                host, "data", f"manifests {usual} on {', '.join(probe['data']['file_systems'])}"
            )


def check_shared_folder(
    host: str, seen: set[str], hosts: Sequence[str], folder: str
) -> HostFinding:
    """Check that a host sees the files that the others wrote.

    Args:
        host: the host.
        seen: hosts whose files it sees.
        hosts: all hosts of the run.
        folder: the run folder.
    """
    unseen = [other for other in hosts if other not in seen]
    if unseen:
        return HostFinding(
            host,
            "shared",
            f"does not see the files that {', '.join(unseen)} wrote to {folder}",
            "Mount one shared folder on all hosts, and set run.folder to a path in it.",
        )
    return HostFinding(host, "shared", f"sees the files of {len(hosts)} hosts")


def _get_device_kind(probe: Mapping[str, Any]) -> str:
    names = [str(one["name"]) for one in probe["accelerators"]]
    return select_most_common(names) if names else NO_ACCELERATOR


def select_most_common(values: Sequence[str]) -> str:
    """Return the most frequent value; on a tie the first.

    Args:
        values: One value per host, at least one.

    Returns:
        One of them.
    """
    return Counter(values).most_common(1)[0][0]

"""Offer or run a dry run in `llmsys preflight`: the step of the rank with the most parameters,
without a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmsys.dryrun.dry_run import run_dry_run
from llmsys.dryrun.dry_run_request import DryRunRequest, format_dry_run_command
from llmsys.dryrun.summary import format_fit
from llmsys.errors import ConfigError, LlmsysError
from llmsys.estimate.device_profile import (
    find_device_by_driver_name,
    list_device_names,
    load_device_profile,
)
from llmsys.launch.hosts.host_checks import GIB, Facts, HostFinding, build_problem
from llmsys.launch.hosts.hostfile import Host

CHECK, ALL = "dry run", "all"
REFUTED = (
    "Training would send other messages, or do other work, than its config asks for. Report it, or "
    "use another layout; in your own blocks mend what is named."
)
TOO_LARGE = "Shard more, or lower batch.micro_sequences; llmsys estimate lists what saves most."


@dataclass(frozen=True)
class DryRunWish:
    """The part of the command line that concerns the dry run.

    Attributes:
        runs: whether to run it here; otherwise its command is offered.
        device: name or file of a device profile; empty: that of the hosts' accelerators.
    """

    runs: bool = False
    device: str = ""


def check_dry_run(
    config: str, overrides: Sequence[str], hosts: Sequence[Host], facts: Facts, wish: DryRunWish
) -> Iterator[HostFinding]:
    """Yield the command of a dry run on the hosts' accelerators, or where it is asked for the
    verdict of a run.

    Args:
        config: config as it was given.
        overrides: values of the config as they were given.
        hosts: hosts of the run.
        facts: answers of the hosts' probes.
        wish: what the user asked for.

    Yields:
        One finding; none for hosts without a known accelerator, unless a run is asked for.
    """
    names = {
        one["name"]
        for probe in facts.values()
        for one in probe.get("devices", {}).get("accelerators", ())
    }
    device = wish.device or find_profile_name(names)
    slots = sorted({host.slots for host in hosts})
    if device is None or len(slots) > 1:
        if wish.runs and device is None:
            found = ", ".join(sorted(names)) or "no accelerator"
            message = f"the hosts have {found}, and no device profile is known by that name. "
            known = f"Give device=NAME or device=FILE; names: {', '.join(list_device_names())}."
            yield build_problem(ALL, CHECK, message + known)
        elif wish.runs:
            yield build_problem(
                ALL,
                CHECK,
                f"hosts have {slots[0]} to {slots[-1]} devices, and a dry run needs equally many "
                "on each. "
                "Give all hosts the same number of slots.",
            )
        return
    request = DryRunRequest(config, tuple(overrides), len(hosts), slots[0], rank=0, device=device)
    if wish.runs:
        yield _run_fullest_rank(request, _find_smallest_memory(facts))
    else:
        yield HostFinding(
            ALL, CHECK, f"not run; the step of one rank without a GPU: {_format_command(request)}"
        )


def _run_fullest_rank(request: DryRunRequest, memory_bytes: int | None) -> HostFinding:
    """Run rank 0, which knows the shards of all ranks, and then the largest rank if that is
    another one.
    """
    try:
        result = run_dry_run(request)
        if (largest := result["parameters"]["largest_rank"]) != request.rank and _is_uneven(result):
            result = run_dry_run(replace(request, rank=largest))
    except ConfigError as error:
        # Training may work all the same: DeepSpeed, for example, cannot run on a pretended device.
        return HostFinding(ALL, CHECK, f"not run: {' '.join(str(error).split())}")
    except LlmsysError as error:
        first = str(error).partition("\n")[0]
        return build_problem(ALL, CHECK, f"{first} For its output run {_format_command(request)}")
    finding = f"{format_fit(result)}; {result['num_waits']} waits of the host in a step"
    checks = (result["collective_check"], result["block_check"])
    if differences := [one for check in checks for one in check["differences"]]:
        return HostFinding(ALL, CHECK, f"{finding}; {'; '.join(differences)}", REFUTED)
    if result["fits"] and memory_bytes is not None and result["needed_bytes"] > memory_bytes:
        return HostFinding(
            ALL,
            CHECK,
            f"{finding}; but an accelerator of the hosts has {memory_bytes / GIB:.1f} GiB",
            TOO_LARGE,
        )
    return HostFinding(ALL, CHECK, finding, "" if result["fits"] else TOO_LARGE)


def _is_uneven(result: dict[str, Any]) -> bool:
    counts: float = result["parameters"]["imbalance"]
    return counts > 1


def _find_smallest_memory(facts: Facts) -> int | None:
    sizes = [
        one["total_bytes"]
        for probe in facts.values()
        for one in probe.get("devices", {}).get("accelerators", ())
    ]
    return min(sizes, default=None)


def _format_command(request: DryRunRequest) -> str:
    return format_dry_run_command(
        request.config, request.overrides, request.nodes, request.node_devices, request.device
    )


def find_profile_name(driver_names: set[str]) -> str | None:
    """Find the shipped profile of accelerators that are all alike."""
    if len(driver_names) != 1:
        return None
    found = find_device_by_driver_name(next(iter(driver_names)))
    return next((name for name in list_device_names() if load_device_profile(name) == found), None)

"""Offer or run a dry run of rank 0 in `llmsys preflight`, for hosts whose accelerator has a device profile."""

from collections.abc import Iterator, Sequence

from launch.hosts.host_checks import Facts, HostFinding, build_problem
from launch.hosts.hostfile import Host
from llmsys.dryrun.dry_run import run_dry_run
from llmsys.dryrun.dry_run_request import DryRunRequest, format_dry_run_command
from llmsys.dryrun.summary import format_fit
from llmsys.errors import LlmsysError
from llmsys.estimate.device_profile import find_device_by_driver_name, list_device_names, load_device_profile

CHECK, ALL = "dry run", "all"


def check_dry_run(
    config: str, overrides: Sequence[str], hosts: Sequence[Host], facts: Facts, *, runs: bool
) -> Iterator[HostFinding]:
    """Yield the command of a dry run on the hosts' accelerators, or with `runs` its verdict for rank 0.

    Args:
        config: config as it was given.
        overrides: values of the config as they were given.
        hosts: hosts of the run.
        facts: answers of the hosts' probes.
        runs: whether to run it here.

    Yields:
        One finding; none for hosts without accelerators, unless `runs` asks for it.
    """
    names = {one["name"] for probe in facts.values() for one in probe.get("devices", {}).get("accelerators", ())}
    device = find_profile_name(names)
    if device is None:
        if runs:
            found = ", ".join(sorted(names)) or "no accelerator"
            message = f"the hosts have {found}, and no device profile is known by that name. "
            yield build_problem(ALL, CHECK, f"{message}Run llmsys dryrun with device=FILE.")
        return
    slots = sorted({host.slots for host in hosts})
    if len(slots) > 1:
        if runs:
            rule = f"hosts have {slots[0]} to {slots[-1]} devices, and a dry run needs equally many on each. "
            yield build_problem(ALL, CHECK, f"{rule}Give all hosts the same number of slots.")
        return
    nodes, devices = len(hosts), slots[0]
    if not runs:
        command = format_dry_run_command(config, overrides, nodes, devices, device)
        yield HostFinding(ALL, CHECK, f"not run; the step of one rank without a GPU: {command}")
        return
    try:
        result = run_dry_run(DryRunRequest(config, tuple(overrides), nodes, devices, rank=0, device=device))
    except LlmsysError as error:
        yield build_problem(ALL, CHECK, str(error))
        return
    finding = f"{format_fit(result)}; {result['num_waits']} waits of the host"
    remedy = (
        "" if result["fits"] else "Shard more, or lower batch.micro_sequences; llmsys estimate lists what saves most."
    )
    yield HostFinding(ALL, CHECK, finding, remedy)


def find_profile_name(driver_names: set[str]) -> str | None:
    """Find the shipped profile of accelerators that are all alike."""
    if len(driver_names) != 1:
        return None
    found = find_device_by_driver_name(next(iter(driver_names)))
    return next((name for name in list_device_names() if load_device_profile(name) == found), None)

"""Check the cluster as a whole for `llmsys preflight`: collectives between all hosts, and memory of
the smallest one.

`check_collectives` starts one process of launch/preflight/collective_probe.py on each host by ssh.
`check_memory_fit` compares the estimated peak with the memory of a rank: its accelerator's, or its
share of the host's free memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.memory_residual import format_fit_probability, get_memory_residual
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.peak_memory import USABLE_SHARE, estimate_peak_memory, find_largest_micro_batch
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.launch.hosts.host_checks import Facts, HostFinding, build_problem
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.hosts.ssh import (
    SshResult,
    format_python_command,
    parse_last_json,
    run_on_all_hosts,
)


def check_collectives(
    names: Sequence[str], first: str, facts: Facts, patience_seconds: int
) -> list[HostFinding]:
    """Run an all-reduce and an all-to-all between all hosts.

    Args:
        names: names of the hosts.
        first: address of the first host, where ranks meet.
        facts: what each host answered, by host; the first one's has a free port.
        patience_seconds: seconds to wait for an answer.

    Returns:
        A finding for each host; none for a single host.
    """
    if len(names) < 2:
        return []
    if missing := [name for name in names if "free_port" not in facts.get(name, {})]:
        return [
            HostFinding(
                name,
                "exchange",
                f"the network was not tested, because {', '.join(missing)} did not respond",
                "Fix the findings above, and run preflight again.",
            )
            for name in missing
        ]
    port = facts[names[0]]["free_port"]
    # the rest is for starting, so that the probe itself can tell
    wait_seconds = max(1, patience_seconds * 3 // 5)

    def build_command(name: str) -> str:
        """Return the probe's command for a host. torch sees each host as a node with one
        process.
        """
        ranks = {
            "RANK": names.index(name),
            "WORLD_SIZE": len(names),
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
        }
        settings = {key: str(value) for key, value in ranks.items()} | {
            "MASTER_ADDR": first,
            "MASTER_PORT": str(port),
        }
        return format_python_command(
            "llmsys.launch.preflight.collective_probe", [str(wait_seconds)], settings
        )

    answers = run_on_all_hosts(names, build_command, patience_seconds)
    return [_build_finding(name, answer, f"{first}:{port}") for name, answer in answers.items()]


def _build_finding(name: str, answer: SshResult, endpoint: str) -> HostFinding:
    probe = parse_last_json(answer)
    if probe is not None and "problem" not in probe:
        return HostFinding(name, "exchange", _format_bandwidths(probe))
    observation = answer.last_error_line if probe is None else probe["problem"]
    return HostFinding(
        name,
        "exchange",
        f"could not communicate with the other hosts: {observation}",
        f"Allow TCP between the hosts (rendezvous at {endpoint}), or set the right interface in "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


def _format_bandwidths(probe: Mapping[str, Any]) -> str:
    speeds = (f"{title} {probe[key] / 1e6:,.0f} MB/s" for title, key in COLLECTIVES)
    return f"{', '.join(speeds)} sent by each host over {probe['interface']} ({probe['backend']})"


COLLECTIVES = (("all-reduce", "all_reduce"), ("all-to-all", "all_to_all"))


def check_memory_fit(
    config: RunConfig, hosts: Sequence[Host], facts: Facts
) -> Iterator[HostFinding]:
    """Yield the estimated peak against the memory of a rank on the smallest host; nothing where
    no host was probed.
    """
    each = {
        host.name: _compute_rank_bytes(facts, host)
        for host in hosts
        if "devices" in facts.get(host.name, {})
    }
    if not each:
        return
    scarce = min(each, key=lambda name: each[name])
    on_accelerators = bool(facts[scarce]["devices"]["accelerators"])
    probability = None
    system = MemoryProfile(device="cuda" if on_accelerators else "cpu")
    try:
        config = resolve_for_hosts(config, [facts[name]["devices"] for name in each])
        layout = config.resolve_layout(sum(host.slots for host in hosts))
        if config.batch.micro_sequences == "auto":
            observation = str(find_largest_micro_batch(config, layout, each[scarce], system))
        else:
            timeline = estimate_peak_memory(config, layout, system=system)
            verdict = timeline.compute_fit_result(int(USABLE_SHARE * each[scarce]))
            if not verdict.fits:
                yield build_problem(scarce, "memory", verdict.text)
                return
            observation = verdict.text
            if on_accelerators:  # no peak of a CPU is part of the error
                probability = get_memory_residual(layout.world_size).compute_fit_probability(
                    timeline, each[scarce]
                )
                chance = format_fit_probability(probability)
                observation += f" Of all {each[scarce] / GIB:.1f} GiB it {chance}"
    except LlmsysError as error:
        yield build_problem(scarce, "memory", str(error))
        return
    yield HostFinding(scarce, "memory", observation.rstrip("."), fit_probability=probability)


def resolve_for_hosts(config: RunConfig, devices: Sequence[dict[str, Any]]) -> RunConfig:
    """Return the config with bf16 instead of `auto` where every host multiplies it natively,
    else with fp32.
    """
    missing = [one["bf16"]["reason"] for one in devices if not one["bf16"]["is_native"]]
    return (
        config.resolve_precision("fp32", missing[0])
        if missing
        else config.resolve_precision("bf16")
    )


def _compute_rank_bytes(facts: Facts, host: Host) -> int:
    probe = facts[host.name]["devices"]
    if probe["accelerators"]:
        return min(int(one["total_bytes"]) for one in probe["accelerators"])
    return int(probe["memory_bytes"]) // host.slots

"""An all-reduce and an all-to-all between all hosts, one process of launch/probe.py on each, as findings.

Reads hosts and the facts of each; starts the processes by ssh, all at once, and waits as long as it is told.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.findings import Facts, HostFinding
from launch.ssh import SshResult, run_on_all_hosts, parse_last_json, format_python_command


def check_collectives(names: Sequence[str], first: str, facts: Facts, patience_seconds: int) -> list[HostFinding]:
    """A finding for each host; nothing where there is one host only."""
    if len(names) < 2:
        return []
    if missing := [name for name in names if "free_port" not in facts.get(name, {})]:
        said = f"no exchange was tried, because {', '.join(missing)} could not say what it has"
        return [HostFinding(name, "exchange", said, "Mend what stands above, and ask again.") for name in missing]
    port = facts[names[0]]["free_port"]
    wait_seconds = max(1, patience_seconds * 3 // 5)  # the rest is for starting, so that the probe itself can tell

    def build_command(name: str) -> str:
        """One process of each host, and to torch each is a node of its own."""
        places = {"RANK": names.index(name), "WORLD_SIZE": len(names), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        settings = {key: str(value) for key, value in places.items()} | {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
        return format_python_command("launch.probe", [str(wait_seconds)], settings)

    answers = run_on_all_hosts(names, build_command, patience_seconds)
    return [_build_finding(name, answer, f"{first}:{port}") for name, answer in answers.items()]


def _build_finding(name: str, answer: SshResult, meeting: str) -> HostFinding:
    told = parse_last_json(answer)
    if told is not None and "problem" not in told:
        return HostFinding(name, "exchange", _format_bandwidths(told))
    said = answer.last_error_line if told is None else told["problem"]
    return HostFinding(
        name,
        "exchange",
        f"could not exchange numbers with the other hosts: {said}",
        f"Open TCP between the hosts (they were to meet at {meeting}), or name the right interface in "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
    )


def _format_bandwidths(told: Mapping[str, Any]) -> str:
    speeds = (f"{title} {told[key] / 1e6:,.0f} MB/s" for title, key in _KINDS)
    return f"{', '.join(speeds)} sent by each host over {told['interface']} ({told['backend']})"


_KINDS = (("all-reduce", "all_reduce"), ("all-to-all", "all_to_all"))

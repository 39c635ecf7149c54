"""Whether a rank's share of the model fits the memory of the smallest host, by the estimate, for `llmsys preflight`.

Reads the config and the facts of hosts; gives one finding. A rank has an accelerator, or its part of what is free on
its host.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from launch.findings import Facts, HostFinding, build_problem
from launch.hosts import Host
from llmsys.config.run import RunConfig
from llmsys.errors import LlmsysError
from llmsys.estimate.memory_peak import estimate_peak_memory
from llmsys.estimate.micro import USABLE_SHARE, find_largest_micro_batch
from llmsys.estimate.system import MemoryProfile


def check_memory_fit(config: RunConfig, hosts: Sequence[Host], facts: Facts) -> Iterator[HostFinding]:
    """The estimated peak against the memory of a rank on the host that has least; nothing where nobody told."""
    each = {host.name: _compute_rank_bytes(facts, host) for host in hosts if "devices" in facts.get(host.name, {})}
    if not each:
        return
    scarce = min(each, key=lambda name: each[name])
    on_accelerators = bool(facts[scarce]["devices"]["accelerators"])
    system = MemoryProfile(device="cuda" if on_accelerators else "cpu")
    try:
        config = resolve_for_hosts(config, [facts[name]["devices"] for name in each])
        layout = config.resolve_layout(sum(host.slots for host in hosts))
        if config.batch.micro_sequences == "auto":
            said = str(find_largest_micro_batch(config, layout, each[scarce], system))
        else:
            verdict = estimate_peak_memory(config, layout, system=system).compute_fit_result(int(USABLE_SHARE * each[scarce]))
            if not verdict.fits:
                yield build_problem(scarce, "memory", verdict.text)
                return
            said = verdict.text
    except LlmsysError as error:
        yield build_problem(scarce, "memory", str(error))
        return
    yield HostFinding(scarce, "memory", said.rstrip("."))


def resolve_for_hosts(config: RunConfig, devices: Sequence[dict[str, Any]]) -> RunConfig:
    """Return the config with bf16 in place of `auto` where every host multiplies it natively, else with fp32."""
    missing = [one["bf16"]["reason"] for one in devices if not one["bf16"]["is_native"]]
    return config.with_precision("fp32", missing[0]) if missing else config.with_precision("bf16")


def _compute_rank_bytes(facts: Facts, host: Host) -> int:
    told = facts[host.name]["devices"]
    if told["accelerators"]:
        return min(int(one["total_bytes"]) for one in told["accelerators"])
    return int(told["memory_bytes"]) // host.slots

"""What a legal layout takes: whether its fullest rank fits, and the time of a step."""

from dataclasses import replace
from typing import Any

from llmsys.config.engine import Deepspeed
from llmsys.config.run import RunConfig
from llmsys.estimate.cluster import Cluster
from llmsys.estimate.device import read_device
from llmsys.estimate.memory_peak import peak_memory
from llmsys.estimate.plan.check import Named
from llmsys.estimate.precision import resolve_for_profile
from llmsys.estimate.software import COMPILED, software_of
from llmsys.estimate.system import OURS, System
from llmsys.estimate.time import step_time

PIPELINED = System(
    evaluation="none", loss="fused", head="columns", masks="none", selective="attention", gathered="again"
)


def verdict(config: RunConfig, named: Named, cluster: Cluster) -> dict[str, Any]:
    """Keys: fits, memory (a sentence), time (a sentence), step_seconds, peak_bytes.

    A pipeline is that of another trainer: state split as ZeRO-1 splits it, since every stage runs many times in a step,
    and fused kernels.
    """
    device = read_device(cluster.device)
    config = resolve_for_profile(config, device)
    system, software = OURS, software_of(config)
    if named.pipeline > 1:
        config = config.model_copy(update={"engine": Deepspeed(zero_stage=1)})
        system, software = replace(PIPELINED, pipeline=named.pipeline), COMPILED
    ledger = peak_memory(config, named.layout, system=system)
    found = ledger.verdict(int(device.memory_bytes))
    step = step_time(config, named.layout, device, pipeline=named.pipeline, software=software)
    seconds = step.seconds
    return {
        "fits": found.fits,
        "peak_bytes": ledger.peak_bytes + ledger.outside_bytes,
        "memory": found.text,
        "step_seconds": seconds.as_data(),
        "time": (
            f"a step takes {seconds.p50:.3g} s ({seconds.p10:.3g} to {seconds.p90:.3g}), "
            f"{step.tokens_per_second_per_device:,.0f} tokens/s/device, utilisation {step.model_utilisation:.1%}"
        ),
    }

"""Run the training step of one rank on fake tensors: build, two steps, an evaluation, and the copy
of a save.

Reads a request as JSON from standard input; writes the result as JSON to the file that the first
argument names. Runs in a separate process: `python -m llmsys.dryrun.rank_run RESULT`.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.guard_library import load_guard_library
from llmsys.errors import ConfigError, LlmsysError, RefutedStepError

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig
    from llmsys.estimate.device_profile import DeviceProfile

FAILED = 2
REFUTED = 3
"""Not 1, which is the status of a traceback."""


def main() -> int:
    """Run the request of standard input and write its result. 2 after an error that the user can
    fix, 3 after a step that ended with an exception.
    """
    request = DryRunRequest.from_dict(json.load(sys.stdin))
    try:
        result = run_rank(request)
    except LlmsysError as error:
        print(str(error), file=sys.stderr)
        return REFUTED if isinstance(error, RefutedStepError) else FAILED
    Path(sys.argv[1]).write_text(json.dumps(result))
    return 0


def run_rank(request: DryRunRequest) -> dict[str, Any]:
    """Run one rank and return what it found.

    Args:
        request: Config, cluster, rank and device.

    Returns:
        The result; rank_result.py lists its keys.

    Raises:
        LlmsysError: The config, the device or the engine cannot be run.
    """
    profile, config = resolve_request(request)
    guard = load_guard_library()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(request.node_devices)}
    import torch

    guard.llmsys_install_guard()
    torch.set_num_threads(1)
    return run_session(request, profile, config)


def run_session(
    request: DryRunRequest, profile: "DeviceProfile", config: "RunConfig"
) -> dict[str, Any]:
    """Run one rank in this process, whose device is pretended already.

    Args:
        request: Config, cluster, rank and device.
        profile: Of the device.
        config: Of the run.

    Returns:
        As `run_rank`.

    Raises:
        RefutedStepError: A step ended with an exception.
    """
    from llmsys.dryrun.failed_step import describe_failure
    from llmsys.dryrun.rank_result import build_rank_result
    from llmsys.dryrun.rank_session import RankSession

    session = RankSession(request, config, profile)
    try:
        outcome = session.run()
    except LlmsysError:
        raise
    except Exception as error:
        if not session.first_sizes:
            raise  # without an engine there is no step
        raise RefutedStepError(describe_failure(session, error)) from error
    return build_rank_result(session, outcome)


def resolve_request(request: DryRunRequest) -> "tuple[DeviceProfile, RunConfig]":
    """Resolve the names in a request.

    Args:
        request: Config, cluster, rank and device.

    Returns:
        The device profile and the config.

    Raises:
        ConfigError: One of them cannot be read, the device has no CUDA, the rank is none of the
            cluster, or the engine cannot be run.
    """
    from llmsys.config.loading.load import read_config
    from llmsys.estimate.device_profile import load_device_profile

    profile = load_device_profile(request.device)
    if profile.compute_capability is None:
        raise ConfigError(
            f"The profile of {profile.name} has no compute_capability, and a dry run pretends "
            "CUDA devices only. Use a profile such as h100-sxm, or give compute_capability in "
            "the profile."
        )
    # a bare model will do: no data are read
    config = read_config(request.config, list(request.overrides)).run
    require_supported_engine(config)
    if not 0 <= request.rank < request.world_size:
        raise ConfigError(
            f"rank={request.rank} is not a rank of {request.nodes} nodes with "
            f"{request.node_devices} devices. Use rank=0 to rank={request.world_size - 1}."
        )
    return profile, config


def require_supported_engine(config: "RunConfig") -> None:
    """Reject the engines that a pretended device cannot run.

    Args:
        config: The config of the run.

    Raises:
        ConfigError: With the reason.
    """
    from llmsys.config.base_optimizer import AdamWConfig
    from llmsys.config.engine import (
        AccelerateEngineConfig,
        DeepSpeedEngineConfig,
        TorchEngineConfig,
    )

    instead = "Use engine.kind=torch, or llmsys estimate for this one."
    match config.engine:
        case DeepSpeedEngineConfig():
            raise ConfigError(
                "engine.kind=deepspeed cannot be run on a pretended device: DeepSpeed flattens "
                "parameters into buffers that it addresses by data pointer, and fake tensors "
                f"have none. {instead}"
            )
        case AccelerateEngineConfig():
            raise ConfigError(
                "engine.kind=accelerate cannot be run on a pretended device: accelerate joins its "
                "own process group and reads its settings from the user's accelerate "
                f"config. {instead}"
            )
        case TorchEngineConfig():
            if config.train.reproducibility == "bitwise":
                raise ConfigError(
                    "train.reproducibility=bitwise computes expert by expert with the rows of "
                    "each rank, which are numbers that a dry run does not have. Use "
                    "train.reproducibility=fast, or llmsys estimate."
                )
        case unreachable:
            assert_never(unreachable)
    optimizer = config.optimizer
    if isinstance(optimizer, AdamWConfig) and optimizer.moments != "fp32":
        raise ConfigError(
            f"optimizer.moments={optimizer.moments} rounds at random, with a generator of the "
            "device, which a pretended one does not have. Use optimizer.moments=fp32 for the dry "
            "run, or llmsys estimate for the memory of the moments."
        )


if __name__ == "__main__":
    sys.exit(main())

"""Run dry runs in separate processes, for one rank or for one rank of every kind.

Reads a config. Starts `python -m llmsys.dryrun.rank_run`, because a pretended device must be
registered before torch is imported and changes torch for the whole process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmsys.config.loading.load import read_config
from llmsys.config.loading.trusted_run import require_trusted_run
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.estimate_comparison import compare_with_estimate
from llmsys.dryrun.rank_run import FAILED, REFUTED, resolve_request
from llmsys.errors import ConfigError, LaunchError, RefutedStepError


def run_dry_run(request: DryRunRequest) -> dict[str, Any]:
    """Run one rank in a separate process.

    Args:
        request: config, cluster, rank and device.

    Returns:
        Plain values with stable keys: see rank_result.py, and `estimate` from
        estimate_comparison.py.

    Raises:
        ConfigError: the config cannot be run on a pretended device.
        RefutedStepError: a step ended with an exception.
        LaunchError: the process failed; the message ends with its output.
    """
    # in this process first: a mistake is answered without starting another
    _, config = resolve_request(request)
    require_trusted_run(config, "step")
    # One thread: tensors have no numbers. No real device: the driver of a CUDA wheel would be asked
    # for it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        finished = subprocess.run(
            [sys.executable, "-m", "llmsys.dryrun.rank_run", str(path)],
            input=json.dumps(request.to_dict()),
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            check=False,
        )
        if finished.returncode == REFUTED:
            raise RefutedStepError(finished.stderr.strip())
        if finished.returncode == FAILED:
            raise ConfigError(finished.stderr.strip())
        if finished.returncode:
            raise LaunchError(
                f"the dry run of rank {request.rank} ended with status {finished.returncode}, "
                "which is a bug in llmsys or in its versions of torch. Report it with this "
                f"output:\n{finished.stderr[-4_000:]}"
            )
        result: dict[str, Any] = json.loads(path.read_text())
    return result | {"estimate": compare_with_estimate(result, config)}


def iter_dry_runs(request: DryRunRequest, *, all_kinds: bool) -> Iterator[dict[str, Any]]:
    """Yield the result of the requested rank, then those of one rank of every other kind, and of
    the last rank.

    Args:
        request: config, cluster, first rank and device.
        all_kinds: whether to run other ranks than the requested one.

    Yields:
        Results of `run_dry_run`; ranks of one kind have equal shards of every parameter.
    """
    first = run_dry_run(request)
    yield first
    if not all_kinds:
        return
    kinds = first["parameters"]["kinds"]
    own = first["parameters"]["own_kind"]
    others = [kind["first_rank"] for number, kind in enumerate(kinds) if number != own]
    layout = read_config(request.config, list(request.overrides)).run.resolve_layout(
        request.world_size
    )
    stage = request.rank // layout.ranks_per_stage
    others += [
        number * layout.ranks_per_stage for number in range(layout.pipeline) if number != stage
    ]
    for rank in dict.fromkeys([*others, request.world_size - 1]):
        if rank != request.rank:
            yield run_dry_run(replace(request, rank=rank))

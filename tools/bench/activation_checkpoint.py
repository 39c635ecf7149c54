"""Measure whole steps under the three policies of activation checkpointing, in turn in one process
with one thread.

    python tools/bench/activation_checkpoint.py [--model demo-moe] [--sequences 4] [--length 512]
    [--steps 9] [--json]

Seconds are medians of CPU time, which other work on the machine changes least. Saved bytes are the
estimate's; a test compares it with live tensors. fp32 master weights, bf16 matmuls, the torch
engine as `llmsys train` builds it. The run fails if losses differ between policies.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any, get_args

import torch

from llmsys.config.loading.load import load_model_config, load_run_config
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine
from llmsys.estimate.run_estimate import estimate_run
from llmsys.parallel.activation_checkpoint import ActivationCheckpointMode
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import init_process_group
from llmsys.train.build_engine import build_engine

POLICIES: tuple[ActivationCheckpointMode, ...] = get_args(ActivationCheckpointMode)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo-moe", help="a name below configs/model (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="default: %(default)s"
    )
    parser.add_argument("--sequences", type=int, default=4, help="of a step (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=9, help="timed steps of each policy (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with init_process_group():
        found, losses = measure_policies(
            {policy: build_policy_config(arguments, policy) for policy in POLICIES}, arguments.steps
        )
    print(json.dumps(found, indent=1) if arguments.json else format_table(found))
    if len(set(losses.values())) > 1:
        print(f"losses differ: {losses}", file=sys.stderr)
        return 1
    return 0


def build_policy_config(
    arguments: argparse.Namespace, policy: ActivationCheckpointMode
) -> RunConfig:
    """Return the demo's config with this model, batch and policy, on one process."""
    train = (f"train.activation_checkpoint={policy}", f"train.precision={arguments.precision}")
    demo = load_run_config("train/demo", ["layout.expert=1", "launch.processes=1", *train])
    batch = {"sequence_length": arguments.length, "sequences": arguments.sequences}
    given = {name: getattr(demo, name) for name in demo.model_fields_set}
    model = load_model_config(f"model/{arguments.model}")
    room = max(arguments.length, model.max_position_embeddings)
    return RunConfig.model_validate(
        given
        | {"model": model.model_copy(update={"max_position_embeddings": room}), "batch": batch}
    )


def measure_policies(
    configs: dict[ActivationCheckpointMode, RunConfig], steps: int
) -> tuple[dict[str, Any], dict[ActivationCheckpointMode, float]]:
    """Return one row per policy, and the last losses. Steps alternate between policies; the first
    of each is not
    timed.
    """
    device = torch.device("cpu")
    engines = {
        policy: build_engine(config, build_device_meshes(config.resolve_layout(1), device), device)
        for policy, config in configs.items()
    }
    seconds: dict[ActivationCheckpointMode, list[float]] = {policy: [] for policy in configs}
    losses: dict[ActivationCheckpointMode, float] = {}
    for step in range(steps + 1):
        for policy, engine in engines.items():
            taken, losses[policy] = measure_step(engine, step, configs[policy])
            seconds[policy] += [taken] if step else []
    rows = {
        policy: build_row(configs[policy], statistics.median(times))
        for policy, times in seconds.items()
    }
    return {"cores": os.cpu_count(), "torch": torch.__version__, "policies": rows}, losses


def measure_step(engine: Engine, step: int, config: RunConfig) -> tuple[float, float]:
    """Return CPU seconds and loss of one step on random tokens, the same for every policy."""
    shape = config.batch.sequences_per_step, config.batch.sequence_length + 1
    ids = torch.randint(
        0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step)
    )
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None)
    began = time.process_time()
    loss = engine.train_step([batch], 1e-4).loss
    return time.process_time() - began, loss


def build_row(config: RunConfig, seconds: float) -> dict[str, float]:
    """Return the printed values of one policy."""
    told = estimate_run(config)
    operations = told.flops.conventions["hardware"].forward_backward
    assert told.memory is not None, "the config is a run"
    kept = told.memory.activation_bytes_estimated["total"]
    return {"cpu_seconds": seconds, "kept_mib": kept / 2**20, "hardware_gflops": operations / 1e9}


def format_table(found: dict[str, Any]) -> str:
    """Return the table as text; times and FLOPs are relative to `none`."""
    rows, base = found["policies"], found["policies"]["none"]
    lines = [f"torch {found['torch']}, {found['cores']} cores, one thread"]
    for policy, one in rows.items():
        slower, more = (one[key] / base[key] for key in ("cpu_seconds", "hardware_gflops"))
        cost = f"{one['cpu_seconds']:7.3f} s of CPU a step {slower:5.2f}x, operations {more:5.2f}x"
        lines.append(f"{policy:<10}{cost}, kept {one['kept_mib']:7.1f} MiB (estimated)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

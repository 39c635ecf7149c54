"""Train small models for a few steps: does a step repeat itself, how long does it take, how much
memory does it hold.

The models are shipped configs with overrides, so that `llmsys dryrun` and `llmsys estimate` get the
same words.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

from llmsys.calibrate.training_steps import (
    build_step_engine,
    draw_batches,
    release_engine,
    run_step,
)
from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.doctor.check_row import CheckRow, build_row
from llmsys.engine.state_hash import hash_state
from llmsys.parallel.device_setup import trim_allocator
from llmsys.parallel.process_group import all_reduce_max, barrier, get_world_size
from llmsys.train.precision import choose_native_precision

# Steps of a speed check; the first one warms up.
NUM_STEPS = 6
# Relative difference of two equal steps outside of bitwise mode: atomic sums of a device may have
# another order.
LOSS_LIMIT = 1e-3


@dataclass(frozen=True)
class StepModel:
    """A model to train.

    Attributes:
        name: name in the table.
        config: shipped config.
        large: overrides on accelerators, for at most 24 GiB on one.
        small: overrides on CPUs.
    """

    name: str
    config: str
    large: tuple[str, ...]
    small: tuple[str, ...]

    def list_overrides(self, device_type: str, ranks: int, precision: str) -> tuple[str, ...]:
        """Return the overrides for a number of ranks: two sequences a micro-batch, two
        micro-batches.
        """
        common = (
            f"batch.sequences={4 * ranks}",
            "batch.micro_sequences=2",
            f"train.precision={precision}",
        )
        return (*(self.large if device_type == "cuda" else self.small), *common)


NARROW = ("model.hidden_size=64", "model.vocab_size=512", "batch.sequence_length=64")
NARROW_DENSE = (*NARROW, "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
                "model.num_key_value_heads=2", "model.head_dim=16")  # fmt: skip
MODELS = (
    StepModel(
        "dense", "model/llama3.2-1b", ("model.num_hidden_layers=8", "batch.sequence_length=4096"),
        NARROW_DENSE
    ),
    StepModel(
        "tied head", "model/qwen2.5-0.5b", ("model.num_hidden_layers=12",
            "batch.sequence_length=8192"), NARROW_DENSE
    ),
    StepModel(
        "experts",
        "model/olmoe-1b-7b",
        ("model.num_hidden_layers=2", "batch.sequence_length=4096"),
        (*NARROW, "model.num_hidden_layers=2", "model.num_attention_heads=4",
            "model.num_key_value_heads=4",
         "model.intermediate_size=32", "model.moe.num_experts=8",
         "model.moe.moe_intermediate_size=32"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class StepMeasurement:
    """A measured model.

    Attributes:
        model: index in `MODELS`.
        overrides: overrides of its config.
        seconds: median step of the slowest rank.
        peak_bytes: memory that tensors held in a step on the fullest rank; 0 where nothing counts
            it.
        losses: of each step.
    """

    model: int
    overrides: tuple[str, ...]
    seconds: float
    peak_bytes: int
    losses: tuple[float, ...]


def load_step_config(model: int, overrides: tuple[str, ...]) -> RunConfig:
    """Return the config of a step check.

    Args:
        model: index in `MODELS`.
        overrides: from `StepModel.list_overrides`.

    Returns:
        A config with its precision resolved; it reads no data.
    """
    return read_config(MODELS[model].config, list(overrides)).run


def measure_steps(model: int, device: torch.device) -> StepMeasurement:
    """Train a model for `NUM_STEPS` steps on all ranks. Collective.

    Args:
        model: index in `MODELS`.
        device: device of this rank.

    Returns:
        The measurement, equal on all ranks.
    """
    overrides = MODELS[model].list_overrides(
        device.type, get_world_size(), choose_native_precision(device)
    )
    config = load_step_config(model, overrides)
    engine, batches = build_step_engine(config, device), draw_batches(config)
    seconds, losses = [], []
    for step in range(NUM_STEPS):
        if step == 1 and device.type == "cuda":
            trim_allocator(device)
            torch.cuda.reset_peak_memory_stats(device)
        barrier()
        began = time.perf_counter()
        losses.append(run_step(engine, batches))  # reading the loss waits for the device
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    slowest, fullest = all_reduce_max(
        torch.tensor([median(seconds[1:]), peak], dtype=torch.float64)
    ).tolist()
    del engine
    release_engine(device)
    return StepMeasurement(model, overrides, slowest, int(fullest), tuple(losses))


def check_determinism(reproducibility: str, device: torch.device) -> list[CheckRow]:
    """Train the smallest model twice from its seed and compare losses and state. Collective.

    Args:
        reproducibility: value of `train.reproducibility`; bitwise promises equal bits, fast does
            not.
        device: device of this rank.

    Returns:
        One row.
    """
    model = 1
    bitwise = ("train.reproducibility=bitwise", "train.threads_per_process=1")
    overrides = MODELS[model].list_overrides(
        device.type, get_world_size(), choose_native_precision(device)
    )
    config = load_step_config(
        model, (*overrides, *(bitwise if reproducibility == "bitwise" else ()))
    )
    runs = []
    for _ in range(2):
        engine, batches = build_step_engine(config, device), draw_batches(config)
        losses = [run_step(engine, batches) for _ in range(2)]
        runs.append((losses, hash_state(engine.get_state())))
        del engine
        release_engine(device)
    apart = max(abs(a - b) / abs(b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    is_equal = runs[0][1] == runs[1][1]
    is_good = is_equal or (reproducibility == "fast" and apart < LOSS_LIMIT)
    found = (
        "equal bits after two steps" if is_equal else f"other bits; losses differ by {apart:.1e}"
    )
    rule = (
        "" if reproducibility == "bitwise" else f" (not promised; losses within {LOSS_LIMIT:.0e})"
    )
    row = build_row(
        "determinism",
        reproducibility,
        is_good,
        found + rule,
        is_equal=is_equal,
        loss_difference=apart,
    )
    return [row]

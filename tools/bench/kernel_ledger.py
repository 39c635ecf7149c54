"""Print the ledger of kernels of two runs: where a step goes by first principles, and what lies
before the goal.

Reads configs and the profile of a device. Prints the section of docs/measurements/dryrun.md.
Seconds are work over the rates of the profile, which are measured ones for the H100; the residual
of published steps is left out.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.config.loading.load import read_config
from llmsys.config.run import RunConfig
from llmsys.estimate.device_profile import DeviceProfile, load_device_profile
from llmsys.estimate.flops import count_flops
from llmsys.estimate.step_time import StepTime, estimate_step_time

BEGIN, END = "<!-- kernel ledger: begin -->", "<!-- kernel ledger: end -->"
# Share of the peak that grouped products of 128-row tiles reach on Hopper (DeepGEMM's tables).
GROUPED_GOAL = 0.65


@dataclass(frozen=True)
class LedgerStep:
    """One change on the way to a goal: settings of the config, or rates of the device."""

    name: str
    overrides: tuple[str, ...] = ()
    change_device: Callable[[DeviceProfile], DeviceProfile] = lambda device: device


def set_native_attention(device: DeviceProfile) -> DeviceProfile:
    """Return the device with attention kernels that were written for it."""
    rates, factor = device.efficiency, device.efficiency.native_attention
    faster = {
        "attention": rates.attention * factor,
        "attention_backward": rates.attention_backward * factor,
    }
    return device.model_copy(update={"efficiency": rates.model_copy(update=faster)})


def set_faster_experts(device: DeviceProfile) -> DeviceProfile:
    """Return the device with faster grouped products."""
    return device.model_copy(
        update={"efficiency": device.efficiency.model_copy(update={"grouped": GROUPED_GOAL})}
    )


@dataclass(frozen=True)
class LedgerRun:
    """A run on 64 H100, its goal, and the steps from what is there to it; each step keeps those
    before it.
    """

    title: str
    config: str
    overrides: tuple[str, ...]
    goal: float
    steps: tuple[LedgerStep, ...]


DENSE = LedgerRun(
    "Llama 3.1 8B, sequences of 8,192 tokens, one per forward pass, nothing recomputed, compiled "
    "blocks",
    "train/llama-8b-64xh100",
    ("batch.micro_sequences=1", "train.compile=block"),
    0.50,
    (
        LedgerStep("eager blocks", ("train.compile=none",)),
        LedgerStep("compiled blocks", ("train.compile=block",)),
        LedgerStep("FlashAttention-3 instead of 2", (), set_native_attention),
    ),
)
MIXTURE = LedgerRun(
    "Qwen3 30B-A3B, 16 sequences of 4,096 tokens, full recomputation, compiled blocks, experts "
    "gathered",
    "train/qwen3-30b-a3b-64xh100",
    ("train.compile=block",),
    0.35,
    (
        LedgerStep("eager blocks", ("train.compile=none",)),
        LedgerStep("compiled blocks", ("train.compile=block",)),
        LedgerStep("FlashAttention-3 instead of 2", (), set_native_attention),
        LedgerStep(
            f"grouped products at {GROUPED_GOAL:.0%} of the peak instead of 56 %",
            (),
            set_faster_experts,
        ),
    ),
)
WORLD_SIZE = 64


def estimate_ideal_step(
    run: LedgerRun, overrides: tuple[str, ...], device: DeviceProfile
) -> tuple[StepTime, RunConfig]:
    """Return the step without the residual of published steps, and its config."""
    config = read_config(run.config, [*run.overrides, *overrides]).run
    return estimate_step_time(config, config.resolve_layout(WORLD_SIZE), device), config


def iter_ledger_lines() -> Iterator[str]:
    """Yield the section of the page."""
    device = load_device_profile("h100-sxm")
    for run in (DENSE, MIXTURE):
        step, config = estimate_ideal_step(run, (), device)
        yield (
            f"**{run.title}**, {WORLD_SIZE} {device.name}: {step.mfu * step.factor:.1%} of the "
            "peak."
        )
        yield ""
        yield from _iter_part_lines(step, config, device)
        yield ""
        yield from _iter_step_lines(run, device)
        yield ""


def _iter_part_lines(step: StepTime, config: RunConfig, device: DeviceProfile) -> Iterator[str]:
    seconds = {name: value / step.factor for name, value in step.parts.items() if value}
    total, rates = sum(seconds.values()), device.efficiency
    batch, length = config.batch, config.batch.sequence_length
    flops = count_flops(config.model, length, batch.sequences_per_step)
    attention = 3.5 * flops.attention / WORLD_SIZE
    peak = device.peak_flops["bf16"]
    notes = {
        "products": f"{rates.products:.0%} of the peak, and bytes of thin matrices",
        "experts": (
            f"{rates.grouped:.0%} of the peak, or the bytes of all experts where they take longer"
        ),
        "attention": (
            f"{attention / seconds['attention'] / peak:.0%} of the peak over forward and backward"
        ),
        "elementwise": (
            f"{rates.memory:.0%} of {device.memory_bandwidth / 1e12:.2f} TB/s, each "
            "fused kernel once"
        ),
        "permutation": "rows of tokens sorted to their experts, weighted and summed",
        "recomputation": "the forward of every block again",
        "data": "gathers and reductions of weights that compute does not hide",
        "copies": "casts of masters, flat buffers and float32 sums, of FSDP2",
        "optimizer": "bytes of masters, moments and gradients",
    }
    yield "| part of a step | seconds | share | rate |"
    yield "|---|---|---|---|"
    for name, value in seconds.items():
        yield f"| {name} | {value:.2f} | {value / total:.1%} | {notes.get(name, '')} |"
    work = flops.forward_backward / WORLD_SIZE / 1e12
    yield f"| all | {total:.2f} | | {work:,.0f} TFLOP of the model on each device |"


def _iter_step_lines(run: LedgerRun, device: DeviceProfile) -> Iterator[str]:
    yield f"| on the way to {run.goal:.0%} | of the peak | with the residual of published steps |"
    yield "|---|---|---|"
    overrides: tuple[str, ...] = ()
    for one in run.steps:
        overrides, device = (*overrides, *one.overrides), one.change_device(device)
        step, _ = estimate_ideal_step(run, overrides, device)
        yield f"| {one.name} | {step.mfu * step.factor:.1%} | {step.mfu:.1%} |"


if __name__ == "__main__":
    print("\n".join(iter_ledger_lines()))

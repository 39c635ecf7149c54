"""Forward and backward of a dense and a mixture-of-experts model beside transformers' own, in turn in one run.

    python tools/bench/model_step.py [--rows 8] [--length 512] [--vocabulary 32000] [--precision fp32 bf16]
        [--runs 9] [--json]

Both sides have the same shapes, copied weights in one number type, batch, loss (a mean over the shifted tokens) and
gradients set to None before each step; the run fails if losses or norms of the gradients part. transformers takes SDPA
and no cache, as fast as it goes here, and Mixtral the quickest of the measured implementations of experts ("batched_mm"
copies the weights once per assignment and would need 70 GB). The dense layers are as wide as the two experts of a
token, so that both models spend equal FLOPs on a token but for the router, 0.1 % and less. 32,000 pieces are what both
classes have by default. Ratios are medians over the rounds of each round's.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from llmsys.estimate.flops import count_flops
from tools.bench.model_pair import Contender, build_model_config, build_contenders

# Rounding of bfloat16, and Mixtral's bfloat16 router, which sends a few tokens elsewhere than one in float32.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 3e-3, 3e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepRow:
    """One line of the table; `times` is the speed beside ours of the same kind: above 1, ours is faster."""

    kind: str
    name: str
    tokens_per_second: float
    times: float
    loss: float
    gradient_norm: float


def compute_gradient_norm(contender: Contender) -> float:
    """The norm over all parameters, from a step of its own."""
    contender.measure_step()
    gradients = [p.grad.float() for p in contender.model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def measure_contenders(kinds: dict[str, list[Contender]], num_tokens: int, runs: int, clock: Callable[[], float]) -> list[StepRow]:
    """Steps in turn, `runs` rounds after one that warms up and takes the norms."""
    everyone = [contender for kind in kinds.values() for contender in kind]
    norms = {contender.name: compute_gradient_norm(contender) for contender in everyone}
    rounds = [{contender.name: contender.measure_step(clock) for contender in everyone} for _ in range(runs)]
    rows = []
    for kind, members in kinds.items():
        for name in (member.name for member in members):
            speed = num_tokens / statistics.median(one[name][0] for one in rounds)
            times = statistics.median(one[name][0] / one[members[0].name][0] for one in rounds)
            rows.append(StepRow(kind, name, speed, times, rounds[-1][name][1], norms[name]))
    return rows


def build_summary(rows: list[StepRow], arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Everything that is printed, as plain values."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    ours = {row.kind: row for row in rows if row.name.startswith("llmsys")}
    clock = "CPU" if arguments.cpu_seconds else "wall"
    length, vocabulary = arguments.length, arguments.vocabulary
    flops = {kind: count_flops(build_model_config(kind, length, vocabulary), length, 1).flops_per_token for kind in ours}
    return {
        "machine": {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "clock": clock},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch": {"rows": arguments.rows, "length": length, "vocabulary": vocabulary},
        "precision": precision,
        "rows": [asdict(row) for row in rows],
        "ratio": {kind: min(r.times for r in rows if r.kind == kind and r is not ours[kind]) for kind in ours},
        "moe_to_dense": ours["moe"].tokens_per_second / ours["dense"].tokens_per_second,
        "flops_per_token": flops,
        "loss_apart": max(abs(row.loss / ours[row.kind].loss - 1) for row in rows),
        "gradient_norm_apart": max(abs(row.gradient_norm / ours[row.kind].gradient_norm - 1) for row in rows),
    }


def format_table(found: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{part}: {', '.join(f'{k} {v}' for k, v in found[part].items())}" for part in list(found)[:3]]
    title = f"{found['precision']}, forward and backward"
    lines.append(f"{'':<6} {title:<30} {'tokens/s':>8} {'ours is':>8} {'loss':>7} {'norm':>7}")
    for row in found["rows"]:
        speed = f"{row['tokens_per_second']:8.0f} {row['times']:7.2f}x"
        lines.append(f"{row['kind']:<6} {row['name']:<30} {speed} {row['loss']:7.4f} {row['gradient_norm']:7.4f}")
    flops = ", ".join(f"{kind} {count / 1e6:.1f}" for kind, count in found["flops_per_token"].items())
    lines.append(f"ours, moe to dense: {found['moe_to_dense']:.2f} at equal active MFLOPs per token ({flops})")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="sequences of the batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="pieces (default: %(default)s)")
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--runs", type=int, default=9, help="counted rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: %(default)s)")
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"], help="Mixtral's implementations")
    parser.add_argument("--cpu-seconds", action="store_true", help="for a shared machine: CPU time, with --threads 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, generator = (arguments.rows, arguments.length), torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, arguments.vocabulary, shape, generator=generator)
    clock = time.process_time if arguments.cpu_seconds else time.perf_counter
    every = []
    for precision in arguments.precision:
        kinds = {
            kind: build_contenders(kind, tokens_BT, arguments.vocabulary, arguments.experts, DTYPES[precision])
            for kind in ("dense", "moe")
        }
        every.append(build_summary(measure_contenders(kinds, tokens_BT.numel(), arguments.runs, clock), arguments, precision))
    print(json.dumps(every, indent=1) if arguments.json else "\n\n".join(map(format_table, every)))
    apart = any(
        found["loss_apart"] > LOSS_TOLERANCE or found["gradient_norm_apart"] > GRADIENT_TOLERANCE for found in every
    )
    if apart:
        print("losses or norms of the gradients do not agree: these are not the same models", file=sys.stderr)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())

"""Measure whole optimizer steps of the demo model under the torch engine next to common
alternatives, in turn.

    python tools/bench/train_step.py [--model demo-moe] [--sequences 4 16] [--precision fp32 bf16]
    [--steps 12]
        [--rounds 3] [--json]

Each contender is a process with one thread on a separate core (two for two processes), so that
figures do not depend on how threads share caches. All see the same random tokens, sequences of 512,
in each dtype with fp32 master weights. Costs that do not depend on tokens (gathering weights,
reducing gradients, AdamW) show in the ratio of step sizes.

* bare loop: our model, fp32 weights (bf16: under torch.autocast), torch's AdamW and clip, full
  logits;
* Trainer: transformers' Trainer on its own class of the same shapes (Qwen2Moe or Llama);
* ours: a step of `llmsys train`, on one process, and on two with FSDP2, with expert parallelism,
  and with DDP.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmsys.doctor.rank_pool import TaskFailure, run_tasks

LENGTH, WARM = 512, 2
ALONE = ("bare loop", "Trainer")
RANKS = {
    "bare loop": 1,
    "Trainer": 1,
    "ours, 1 process": 1,
    "ours, 2 processes": 2,
    "ours, 2, experts dealt": 2,
    "ours, 2, DDP": 2,
}
PRECISIONS = ("fp32", "bf16")


class Work(NamedTuple):
    """A model, a dtype, the sequences of a step, and the timed steps of every contender."""

    model: str
    precision: str
    sequences: int
    steps: int


def main() -> int:
    """Measure every contender in turn and print tokens per second and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo-moe", help="a name below configs/model (default: %(default)s)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[4, 16],
        help="windows of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=list(PRECISIONS),
        help="number types (default: both)",
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="timed steps of each turn (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each contender (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=RANKS, default=list(RANKS), help="contenders to run"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--alone", choices=ALONE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        work = Work(
            arguments.model, arguments.precision[0], arguments.sequences[0], arguments.steps
        )
        print(_measure_alone(arguments.alone, work))
        return 0
    found = {
        precision: {
            size: _measure_contenders(arguments, precision, size) for size in arguments.sequences
        }
        for precision in arguments.precision
    }
    if arguments.json:
        print(
            json.dumps(
                {
                    "machine": _describe_machine(),
                    "model": arguments.model,
                    "tokens_per_second": found,
                }
            )
        )
    else:
        print(
            "\n\n".join(
                format_table(by_size, arguments.model, precision)
                for precision, by_size in found.items()
            )
        )
    return 0


def _measure_contenders(
    arguments: argparse.Namespace, precision: str, sequences: int
) -> dict[str, float]:
    """Return tokens per second of each contender, the median of its turns. No contender runs
    twice in a row.
    """
    speeds: dict[str, list[float]] = {name: [] for name in arguments.only}
    work = Work(arguments.model, precision, sequences, arguments.steps)
    for _ in range(arguments.rounds):
        for name in arguments.only:
            speeds[name].append(_run_turn(name, work))
    return {name: statistics.median(turns) for name, turns in speeds.items()}


def format_table(found: dict[int, dict[str, float]], model: str, precision: str) -> str:
    """Return tokens per second, and the ratio to ours on one process, for each step size."""
    lines = [
        f"{_describe_machine()}; {model}, {precision}, one thread and core for each process",
        f"{'tokens a step':<24}",
    ]
    lines[-1] += "".join(f"{size * LENGTH:>18,}" for size in found)
    for name in next(iter(found.values())):
        cells = [
            f"{by[name]:,.0f} {by[name] / by.get('ours, 1 process', max(by.values())):.2f}"
            for by in found.values()
        ]
        lines.append(f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _run_turn(name: str, work: Work) -> float:
    if name in ALONE:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "tools.bench.train_step",
            "--alone",
            name,
            "--model",
            work.model,
        ]
        command += [
            "--steps",
            str(work.steps),
            "--sequences",
            str(work.sequences),
            "--precision",
            work.precision,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])
    job = partial(_measure_rank, name, work)
    [(_, result)] = run_tasks(job, [0], RANKS[name], timeout_seconds=900)
    if isinstance(result, TaskFailure):
        raise SystemExit(f"{name}: {result}")
    return float(result)


def _measure_rank(name: str, work: Work, _: int) -> float:
    """Return tokens per second of all ranks; runs in a process of each."""
    _pin_core(int(os.environ["RANK"]))
    return _measure_speed(_build_our_step(name, work), work)


def _measure_alone(name: str, work: Work) -> float:
    """Return tokens per second of a contender without ranks."""
    import torch

    _pin_core(0)
    torch.set_num_threads(1)
    if name == "bare loop":
        return _measure_speed(_build_bare_step(work), work)
    return _measure_trainer(work)


def _pin_core(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def _measure_speed(step: Callable[[int], None], work: Work) -> float:
    for number in range(WARM):
        step(number)
    began = time.perf_counter()
    for number in range(WARM, WARM + work.steps):
        step(number)
    return work.steps * work.sequences * LENGTH / (time.perf_counter() - began)


def _draw_tokens(vocabulary: int, sequences: int, number: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, vocabulary, (sequences, LENGTH + 1), generator=generator)


def _build_bare_step(work: Work) -> Callable[[int], None]:
    import torch

    from llmsys.model.initialization import initialize_parameters
    from llmsys.model.transformer import Transformer
    from llmsys.train.expert_load import update_expert_balance

    config = _load_model_config(work.model)
    module = Transformer(config)
    initialize_parameters(module, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def run_step(number: int) -> None:
        tokens = _draw_tokens(config.vocab_size, work.sequences, number)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.precision == "bf16"):
            logits = module(tokens[:, :-1].contiguous())
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_expert_balance(module)

    return run_step


def _measure_trainer(work: Work) -> float:
    """Return tokens per second of transformers' Trainer; the clock starts after the warm-up
    steps.
    """
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    config, times, steps = _load_model_config(work.model), [], work.steps

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    rows = [
        row
        for number in range(WARM + steps)
        for row in _draw_tokens(config.vocab_size, work.sequences, number)[:, :-1]
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, bf16=work.precision == "bf16", report_to=[],
            learning_rate=3e-4,
            weight_decay=0.1,
            per_device_train_batch_size=work.sequences, max_steps=WARM + steps, disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(
            model=_build_their_model(config),
            args=arguments,
            train_dataset=data,
            callbacks=[Clock()],
        ).train()
    return steps * work.sequences * LENGTH / (times[-1] - times[WARM - 1])


def _build_their_model(config: Any) -> Any:
    """Return transformers' model of the same shapes: Qwen2Moe with experts, because it has a
    shared expert too.
    """
    import transformers

    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    fields: dict[str, Any] = {name: getattr(config, name) for name in shared}
    fields |= {
        "max_position_embeddings": config.max_position_embeddings,
        "attn_implementation": "sdpa",
    }
    fields["tie_word_embeddings"] = config.tie_word_embeddings
    if config.moe is None:
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(intermediate_size=config.intermediate_size, **fields)
        )
    moe = config.moe
    fields |= {"num_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_tok}
    fields |= {
        "moe_intermediate_size": moe.moe_intermediate_size,
        "shared_expert_intermediate_size": moe.shared_expert_size,
    }
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**fields))


def _build_our_step(name: str, work: Work) -> Callable[[int], None]:
    from llmsys.config.run import RunConfig
    from llmsys.data.batch import Batch
    from llmsys.parallel.device_mesh import build_device_meshes
    from llmsys.parallel.process_group import get_local_device, get_rank
    from llmsys.train.build_engine import build_engine
    from llmsys.train.expert_load import update_expert_balance

    config = RunConfig.model_validate(
        {
            "model": _load_model_config(work.model),
            "train": {"precision": work.precision},
            "batch": {"sequence_length": LENGTH, "sequences": work.sequences},
            "layout": {"expert": 2 if "dealt" in name else 1},
            "engine": {"kind": "torch", "data_parallel": "ddp" if "DDP" in name else "fsdp"},
        }
    )
    layout = config.layout.resolve(RANKS[name], config.model)
    device = get_local_device()
    engine = build_engine(config, build_device_meshes(layout, device), device)
    share = work.sequences // layout.data_parallel_size
    rows = slice(get_rank() * share, (get_rank() + 1) * share)

    def run_step(number: int) -> None:
        tokens = _draw_tokens(config.model.vocab_size, work.sequences, number)[rows]
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.train_step([batch], 3e-4)
        update_expert_balance(engine.module)

    return run_step


def _load_model_config(model: str) -> Any:
    from llmsys.config.loading.load import load_model_config

    return load_model_config(f"model/{model}")


def _describe_machine() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return f"{os.cpu_count()} cores of {model}"


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure forward and backward of a dense and a mixture-of-experts model next to transformers' own,
in turn in one run.

    python tools/bench/model_step.py [--rows 8] [--length 512] [--vocabulary 32000] [--precision
    fp32 bf16]
        [--runs 9] [--json]

- Both sides have the same shapes, copied weights in one dtype, batch, loss (a mean over the shifted
  tokens) and gradients set to None before each step. The run fails if losses or gradient norms
  differ.
- transformers uses SDPA and no cache, its fastest setting here, and Mixtral the fastest of the
  measured implementations of experts ("batched_mm" copies the weights once per assignment and would
  need 70 GB).
- Dense layers are as wide as the two experts of a token, so that both models spend equal FLOPs per
  token but for the router, 0.1 % and less. 32,000 pieces are the default of both classes.
- Ratios are medians over the rounds of each round's ratio.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED
from llmsys.estimate.flops import count_flops
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.train.cross_entropy import build_training_loss

# B rows, T positions
WIDTH, LAYERS, HEADS, EXPERTS, CHOSEN, EXPERT_WIDTH = 512, 4, 8, 8, 2, 704
# Wide enough that the losses depend on every layer; at 0.02 any model gives the logarithm of the
# vocabulary.
DEVIATION = 0.05
NAMES = {
    "blocks.": "model.layers.",
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "attention_norm.": "input_layernorm.",
    "feed_forward_norm.": "post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.": ".mlp.",
}


@dataclass(frozen=True)
class Contender:
    """A model, and the function that runs it forward and returns the mean loss."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]

    def measure_step(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Return seconds and loss of one forward and backward."""
        start = clock()
        self.model.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return clock() - start, float(loss.detach())


def build_model_config(kind: str, length: int, vocabulary: int) -> ModelConfig:
    """Return the shapes of both sides as our config."""
    moe = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": EXPERT_WIDTH,
    }
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": CHOSEN * EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": length,
        "initializer_range": DEVIATION,
        "moe": moe | {"balance": {"kind": "none"}} if kind == "moe" else None,
    }
    return ModelConfig.model_validate(fields)


def build_their_model(config: ModelConfig, ours: Transformer) -> Any:
    """Return LlamaForCausalLM or MixtralForCausalLM in training mode, with our weights."""
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    fields: dict[str, Any] = {name: getattr(config, name) for name in shared}
    fields["max_position_embeddings"] = config.max_position_embeddings
    fields |= {
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    fields["attn_implementation"] = "sdpa"
    if config.moe is None:
        llama = transformers.LlamaConfig(intermediate_size=config.intermediate_size, **fields)
        theirs: Any = transformers.LlamaForCausalLM(llama)
    else:
        fields |= {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "intermediate_size": EXPERT_WIDTH,
        }
        mixtral = transformers.MixtralConfig(**fields)
        theirs = transformers.MixtralForCausalLM(mixtral)
    theirs.load_state_dict(convert_weights(ours.state_dict()))
    return theirs.train()


def convert_weights(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights in their names and layout: experts are stacked (expert, out, in), gate
    and up in one.
    """
    theirs = {}
    for name, weight in ours.items():
        if name.endswith((".experts.up_proj", ".balance_bias_E")):
            continue
        if ".experts." in name:
            if name.endswith("gate_proj"):
                weight = torch.cat([weight, ours[name.replace("gate_proj", "up_proj")]], dim=2)
            weight = weight.transpose(1, 2)
        for word, their_word in NAMES.items():
            name = name.replace(word, their_word)
        name = name.replace("experts.gate_proj", "experts.gate_up_proj")
        theirs["model.norm.weight" if name == "norm.weight" else name] = weight
    return theirs


def build_contenders(
    kind: str,
    tokens_BT: Tensor,
    vocabulary: int,
    experts: list[str],
    dtype: torch.dtype = torch.bfloat16,
) -> list[Contender]:
    """Return ours first, then theirs; all weights in `dtype`."""
    config = build_model_config(kind, tokens_BT.shape[1], vocabulary)
    ours = Transformer(config)
    initialize_parameters(ours, seed=0)
    theirs = build_their_model(config, ours).to(dtype)
    ours = ours.to(dtype).train()
    targets_BT = tokens_BT.roll(-1, dims=1)
    targets_BT[:, -1] = IGNORED
    num_targets = int((targets_BT != IGNORED).sum())
    in_training = build_training_loss(LossConfig())

    def compute_our_loss() -> Tensor:
        """Return the loss as an engine computes it: inside the head."""
        loss: Tensor = ours(
            tokens_BT, finish=lambda head, x_BTD, _: in_training(head, x_BTD, targets_BT)
        )
        return loss / num_targets

    def compute_their_loss(implementation: str | None) -> Tensor:
        if implementation is not None:
            theirs.set_experts_implementation(implementation)
        loss: Tensor = theirs(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        return loss

    found = [Contender(f"llmsys {kind}", ours, compute_our_loss)]
    if kind == "dense":
        return [*found, Contender("LlamaForCausalLM", theirs, partial(compute_their_loss, None))]
    return found + [
        Contender(f"MixtralForCausalLM {e}", theirs, partial(compute_their_loss, e))
        for e in experts
    ]


# Rounding of bfloat16, and Mixtral's bfloat16 router, which sends a few tokens elsewhere than one
# in float32.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 3e-3, 3e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepRow:
    """One line of the table; `times` is the speed relative to ours of the same kind: above 1,
    ours is faster.
    """

    kind: str
    name: str
    tokens_per_second: float
    times: float
    loss: float
    gradient_norm: float


def compute_gradient_norm(contender: Contender) -> float:
    """Return the norm over all parameters, from a separate step."""
    contender.measure_step()
    gradients = [p.grad.float() for p in contender.model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def measure_contenders(
    kinds: dict[str, list[Contender]], num_tokens: int, runs: int, clock: Callable[[], float]
) -> list[StepRow]:
    """Measure steps in turn: `runs` rounds after a warm-up round, which also takes the norms."""
    everyone = [contender for kind in kinds.values() for contender in kind]
    norms = {contender.name: compute_gradient_norm(contender) for contender in everyone}
    rounds = [
        {contender.name: contender.measure_step(clock) for contender in everyone}
        for _ in range(runs)
    ]
    rows = []
    for kind, members in kinds.items():
        for name in (member.name for member in members):
            speed = num_tokens / statistics.median(one[name][0] for one in rounds)
            times = statistics.median(one[name][0] / one[members[0].name][0] for one in rounds)
            rows.append(StepRow(kind, name, speed, times, rounds[-1][name][1], norms[name]))
    return rows


def build_summary(
    rows: list[StepRow], arguments: argparse.Namespace, precision: str
) -> dict[str, Any]:
    """Return every printed value."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    ours = {row.kind: row for row in rows if row.name.startswith("llmsys")}
    clock = "CPU" if arguments.cpu_seconds else "wall"
    length, vocabulary = arguments.length, arguments.vocabulary
    flops = {
        kind: count_flops(build_model_config(kind, length, vocabulary), length, 1).flops_per_token
        for kind in ours
    }
    return {
        "machine": {
            "cpu": model,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "clock": clock,
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch": {"rows": arguments.rows, "length": length, "vocabulary": vocabulary},
        "precision": precision,
        "rows": [asdict(row) for row in rows],
        "ratio": {
            kind: min(r.times for r in rows if r.kind == kind and r is not ours[kind])
            for kind in ours
        },
        "moe_to_dense": ours["moe"].tokens_per_second / ours["dense"].tokens_per_second,
        "flops_per_token": flops,
        "loss_apart": max(abs(row.loss / ours[row.kind].loss - 1) for row in rows),
        "gradient_norm_apart": max(
            abs(row.gradient_norm / ours[row.kind].gradient_norm - 1) for row in rows
        ),
    }


def format_table(found: dict[str, Any]) -> str:
    """Return the summary as text."""
    lines = [
        f"{part}: {', '.join(f'{k} {v}' for k, v in found[part].items())}"
        for part in list(found)[:3]
    ]
    title = f"{found['precision']}, forward and backward"
    lines.append(f"{'':<6} {title:<30} {'tokens/s':>8} {'ours is':>8} {'loss':>7} {'norm':>7}")
    for row in found["rows"]:
        speed = f"{row['tokens_per_second']:8.0f} {row['times']:7.2f}x"
        lines.append(
            f"{row['kind']:<6} {row['name']:<30} {speed} {row['loss']:7.4f} "
            f"{row['gradient_norm']:7.4f}"
        )
    flops = ", ".join(
        f"{kind} {count / 1e6:.1f}" for kind, count in found["flops_per_token"].items()
    )
    lines.append(
        f"ours, moe to dense: {found['moe_to_dense']:.2f} at equal active MFLOPs per token "
        f"({flops})"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=8, help="sequences of the batch (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=32_000, help="pieces (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both"
    )
    parser.add_argument("--runs", type=int, default=9, help="counted rounds (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch (default: %(default)s)"
    )
    parser.add_argument(
        "--experts", nargs="+", default=["eager", "grouped_mm"], help="Mixtral's implementations"
    )
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="for a shared machine: CPU time, with --threads 1",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, generator = (arguments.rows, arguments.length), torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, arguments.vocabulary, shape, generator=generator)
    clock = time.process_time if arguments.cpu_seconds else time.perf_counter
    every = []
    for precision in arguments.precision:
        kinds = {
            kind: build_contenders(
                kind, tokens_BT, arguments.vocabulary, arguments.experts, DTYPES[precision]
            )
            for kind in ("dense", "moe")
        }
        every.append(
            build_summary(
                measure_contenders(kinds, tokens_BT.numel(), arguments.runs, clock),
                arguments,
                precision,
            )
        )
    print(json.dumps(every, indent=1) if arguments.json else "\n\n".join(map(format_table, every)))
    apart = any(
        found["loss_apart"] > LOSS_TOLERANCE or found["gradient_norm_apart"] > GRADIENT_TOLERANCE
        for found in every
    )
    if apart:
        print(
            "losses or norms of the gradients do not agree: these are not the same models",
            file=sys.stderr,
        )
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())

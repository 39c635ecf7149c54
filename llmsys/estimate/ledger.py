"""Everything the estimate knows about a config: as plain data with stable keys, and as a page of text.

Time, money and energy depend on a device and are unknown without a measured profile of one; no other number is put in
their place.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.estimate.flops import CONVENTIONS, count_flops
from llmsys.estimate.memory import activation_bytes, planned_layout, state_bytes
from llmsys.estimate.parameters import count_parameters
from llmsys.estimate.tensors import model_tensors

CONTEXTS = (512, 2048, 8192, 32768, 131072)


def estimate(config: RunConfig, *, model_only: bool = False) -> dict[str, Any]:
    """Parameters, operations, memory and budget as nested plain values.

    Keys: parameters.{total, non_embedding, active.{all, without_input_embedding, without_embeddings}, by_component,
    per_layer, textbook}; batch; flops.{convention, forward, forward_backward, …} for one step of that batch; memory;
    run; unknown. Bytes are per rank. For a bare model there is no run and no memory: both are None.
    """
    return {
        "parameters": asdict(count_parameters(config.model)),
        "batch": {
            "sequence_length": config.batch.sequence_length,
            "sequences": config.batch.sequences_per_step,
            "tokens": config.batch.tokens_per_step,
        },
        "flops": _flops(config),
        "memory": None if model_only else _memory(config),
        "run": None if model_only else _run(config),
        "unknown": dict.fromkeys(("time", "money", "energy"), "needs a measured profile of the device"),
    }


def tensor_ledger(config: RunConfig) -> list[dict[str, Any]]:
    """One entry per tensor, equal ones of several blocks together; the counts sum to the total."""
    return [
        {
            "name": row.title,
            "shape": list(row.shape),
            "copies": row.copies,
            "component": row.component,
            "count": row.count,
        }
        for row in model_tensors(config.model)
    ]


def _flops(config: RunConfig) -> dict[str, Any]:
    length, sequences = config.batch.sequence_length, config.batch.sequences_per_step
    counts = {name: count_flops(config.model, length, sequences, name) for name in CONVENTIONS}
    every = {
        name: {
            "forward": one.forward,
            "forward_backward": one.forward_backward,
            "forward_backward_per_token": one.per_token,
            "attention_share": one.attention_share,
        }
        for name, one in counts.items()
    }
    chosen = config.flops.convention
    shares = {str(s): count_flops(config.model, s, 1, chosen).attention_share for s in CONTEXTS}
    return {"convention": chosen, **every[chosen], "conventions": every, "attention_share_by_length": shares}


def _memory(config: RunConfig) -> dict[str, Any]:
    layout = planned_layout(config)
    state, activations = state_bytes(config, layout), activation_bytes(config, layout)
    return {
        "ranks": layout.world_size,
        "layout": layout.model_dump(),
        "engine": config.engine.model_dump(),
        "state_bytes": {**asdict(state), "total": state.total},
        "activation_bytes_estimated": {**asdict(activations), "total": activations.total},
    }


def _run(config: RunConfig) -> dict[str, Any]:
    step = count_flops(
        config.model, config.batch.sequence_length, config.batch.sequences_per_step, config.flops.convention
    )
    return {
        "tokens": config.steps * config.batch.tokens_per_step,
        "steps": config.steps,
        "flops": config.steps * step.forward_backward,
        "tokens_per_parameter": config.steps * config.batch.tokens_per_step / count_parameters(config.model).active.all,
    }


def as_text(result: dict[str, Any], ledger: list[dict[str, Any]] | None = None) -> str:
    """The result of `estimate` for people; with a ledger, every tensor after it."""
    lines = [*_parameter_lines(result), *_flops_lines(result), *_memory_lines(result), *_run_lines(result)]
    if ledger is not None:
        lines += ["", *_ledger_lines(ledger, result["parameters"]["total"])]
    return "\n".join(lines)


def _parameter_lines(result: dict[str, Any]) -> Iterator[str]:
    counts = result["parameters"]
    active = counts["active"]
    yield _row("parameters", counts["total"], short(counts["total"]))
    for name, count in counts["by_component"].items():
        yield _row(f"  {name}", count, f"{count / counts['total']:.1%}")
    yield _row("non-embedding", counts["non_embedding"], "without embedding and head")
    yield _row("active per token", active["all"], "all that one token meets")
    yield _row("", active["without_input_embedding"], "without the input embedding")
    yield _row("", active["without_embeddings"], "without embedding and head")
    for rule in counts["textbook"]:
        yield _row("textbook", rule["value"], f"{rule['rule']} is {rule['error']:+.1%} off the non-embedding count")


def _flops_lines(result: dict[str, Any]) -> Iterator[str]:
    batch, flops = result["batch"], result["flops"]
    yield ""
    size = f"{batch['sequences']} sequences of {batch['sequence_length']} tokens"
    yield _row("FLOPs of a step", flops["forward_backward"], f"forward and backward of {size}, {flops['convention']}")
    for name, one in flops["conventions"].items():
        share = f"{short(one['forward_backward_per_token'])} per token, attention {one['attention_share']:.1%}"
        yield _row(f"  {name}", one["forward_backward"], share)
    shares = ", ".join(f"{int(s):,}: {share:.0%}" for s, share in flops["attention_share_by_length"].items())
    yield f"attention's share by length   {shares}"


def _memory_lines(result: dict[str, Any]) -> Iterator[str]:
    memory = result["memory"]
    if memory is None:
        return
    state, kept = memory["state_bytes"], memory["activation_bytes_estimated"]
    layout = ", ".join(f"{axis} {size}" for axis, size in memory["layout"].items())
    yield ""
    yield _row(
        "state per rank", state["total"], f"bytes, {memory['engine']['kind']} on {memory['ranks']} ranks: {layout}"
    )
    for name in ("weights", "masters", "gradients", "moments"):
        yield _row(f"  {name}", state[name], gib(state[name]))
    yield _row("activations per rank", kept["total"], "bytes, an estimate")
    for name in ("blocks", "probabilities", "logits", "gathered"):
        yield _row(f"  {name}", kept[name], gib(kept[name]))


def _run_lines(result: dict[str, Any]) -> Iterator[str]:
    run = result["run"]
    yield ""
    if run is not None:
        yield _row("tokens of the run", run["tokens"], f"{run['tokens_per_parameter']:.1f} per active parameter")
        yield _row("steps", run["steps"], "")
        yield _row("FLOPs of the run", run["flops"], f"{short(run['flops'])}, {result['flops']['convention']}")
    yield f"{', '.join(result['unknown'])}: unknown ({next(iter(result['unknown'].values()))})"


def _ledger_lines(ledger: list[dict[str, Any]], total: int) -> Iterator[str]:
    width = max(len(one["name"]) for one in ledger)
    for one in ledger:
        shape = " × ".join(map(str, one["shape"]))
        times = f" × {one['copies']} blocks" if one["copies"] > 1 else ""
        yield f"{one['name']:<{width}}  {one['count']:>18,}  {shape}{times}"
    yield f"{'total':<{width}}  {total:>18,}"


def _row(title: str, count: int, note: str) -> str:
    return f"{title:<22}{count:>26,}  {note}".rstrip()


def short(count: float) -> str:
    """A count with a decimal prefix: 10.0M, 1.2T, 3.1e18."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= count < 1000 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def gib(count: int) -> str:
    """Bytes in binary units."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

"""Reference page of every event in events.jsonl, from the calls in the source that write them.

Invariants:
- The kinds, the fields that a call names, and the files come from the source; a kind or field
  without a meaning below is an error, as is a meaning that no call uses.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.docs.markdown import format_table, format_text

ROOT = Path(__file__).resolve().parents[2]
WRITERS = {"log_event", "_log_event"}  # and EventWriter.write

KINDS = {
    "start": "The run began, or began again; `resumed_from` is then the step of its checkpoint.",
    "branch": (
        "The run began at a step of another run (`train.branch_from`), or with its weights "
        "(`train.init_from`)."
    ),
    "prediction": "The estimate of this run on this device.",
    "step": "An optimizer step, every `train.log_every_steps` and at the first and last step.",
    "profile": "A step was recorded with torch's profiler (`train.profile`).",
    "norms": "Norms by layer of a measured step (`train.norms_every_steps`), over all ranks.",
    "batch_growth": "The batch doubles from the next step on (`batch.ramp: {kind: noise_scale}`).",
    "budget": "The tokens of the run were planned anew, to end on time (`train.fit_minutes`).",
    "corruption_check": "A step was repeated on other ranks, and all gradients were equal "
    "(`train.corruption_check_every_steps`).",
    "idle_parameters": (
        "Routers and experts without a gradient in a logged step, because no token reached them."
    ),
    "experts": "Load of the experts in a logged step; lists have an entry per layer.",
    "evaluation": "An evaluation on held-out data.",
    "checkpoint": "A checkpoint was published.",
    "save_failed": "A checkpoint could not be written; older ones are as they were.",
    "state_hash": "Hashes of the state at a save, in bitwise mode.",
    "bad_step": "A step was skipped: its loss or gradient norm was not finite, or a spike.",
    "overflow": (
        "A step was skipped because gradients in fp16 overflowed; the loss scale was lowered."
    ),
    "rewind": "Training went back to a checkpoint (`train.on_bad_step: rewind`).",
    "hang": "A rank made no progress for `train.hang_timeout_seconds`.",
    "stopped": "The run saved and stopped because it was asked to.",
    "measured": "Time and memory of the run, for `llmsys reconcile`.",
    "samples": "Continuations of `generation.prompts`.",
    "finish": "The run ended after its last step.",
    "core": "Pages were extracted, by the compiled core or by Python (in the dataset folder).",
    "stage": "A stage of `llmsys prepare` ended (in the dataset folder).",
}
# Fields that a call passes as a mapping (`**fields`) instead of by name.
MAPPED = {
    "branch": "run checkpoint parent_steps tokens moments data_order changes grown new unused",
    "profile": "trace seconds shares kernels host_wait_seconds",
    "norms": "activation gradient update weight",
    "batch_growth": "tokens batch_tokens noise_scale_tokens doubled_after_steps steps",
    "budget": "tokens steps seconds tokens_done",
    "corruption_check": "hash ranks",
    "prediction": (
        "parameters memory device profile world_size step_seconds modelled_seconds why_no_time"
    ),
    "step": "tokens loss learning_rate gradient_norm batch_tokens seconds data_wait_seconds "
    "tokens_per_second utilisation utilisation_of memory_bytes memory_allocated_bytes "
    "batch_digest epochs attention_imbalance attention_imbalance_sequential sequence_length "
    "source_tokens target_tokens padding_share mean_depth encoder_mean_depth "
    "indexer_loss next_sentence_loss next_sentence_accuracy noise_scale_tokens "
    "noise_gradient_squared noise_covariance_trace",
    "experts": "load entropy dead imbalance balance router_z dropped busiest dead_experts",
    "evaluation": "loss perplexity bits_per_byte accuracy evaluated_tokens evaluated_targets "
    "evaluated_bytes gzip_bits_per_byte xz_bits_per_byte sources sets metrics "
    "next_sentence_loss next_sentence_accuracy",
    "checkpoint": "seconds stalled_seconds",
    "save_failed": "seconds stalled_seconds",
    "measured": "step_seconds steps peak_bytes peak_allocated_bytes",
    "bad_step": "sequences documents num_documents",
    "overflow": "sequences documents num_documents",
    "state_hash": "state_hash",
    "stage": "tasks failed retries eager",
    "core": "pages compiled_pages left_pages",
}
# Meanings of fields; `KIND.FIELD` where one kind of event means something else.
FIELDS = {
    "activation": "Root mean square of each block's output over real tokens and channels.",
    "accuracy": "Share of targets whose most likely class is right.",
    "attention_imbalance": (
        "Attention of the busiest rank over the mean, with packed documents; 1 is even."
    ),
    "attention_imbalance_sequential": "The same without `batch.assignment: balanced`.",
    "balance": "Load balancing loss, as Switch Transformer defines it; 1 is even.",
    "batch_digest": (
        "Hash of the tokens of the step over all ranks, which `llmsys replay` compares."
    ),
    "batch_tokens": "Tokens of this step over all ranks.",
    "bits_per_byte": "Bits that the model needs per UTF-8 byte of the held-out text.",
    "branch.tokens": "Tokens of the parent up to there.",
    "busiest": "Largest `imbalance` of a layer.",
    "changes": "Settings that differ from the parent's.",
    "checkpoint": "Checkpoint whose weights the run took.",
    "data": "Fingerprint, documents and tokens of the dataset; of a mixture by dataset.",
    "data_order": "Whether the data continue where the parent stopped.",
    "data_wait_seconds": "Longest wait of a rank for its batch.",
    "dead": "Experts that no token requested.",
    "dead_experts": "Sum of `dead`.",
    "device": "Device of the ranks, or the name of its profile.",
    "documents": "Documents of the step, by id.",
    "dropped": "Share of requests beyond the capacity of experts.",
    "doubled_after_steps": "All steps after which the batch has doubled, so far.",
    "eager": "Tasks of later stages that idle workers ran meanwhile.",
    "encoder_mean_depth": "The same of the encoder.",
    "engine": "`engine.kind`.",
    "entropy": "Entropy of the load over that of an even one; 1 is even.",
    "epochs": "Passes over the dataset so far; of a mixture by dataset.",
    "evaluated_bytes": "UTF-8 bytes of the held-out text.",
    "evaluated_targets": "Targets of the held-out data.",
    "evaluated_tokens": "Tokens of the held-out text.",
    "failed": "Tasks that failed in every attempt.",
    "folder": "Folder of the checkpoint.",
    "gradient": "Norm of each layer's gradient, before clipping.",
    "gradient_norm": "Norm of the gradient over all ranks, before clipping.",
    "grown": "Tensors that were made from smaller ones of the parent.",
    "gzip_bits_per_byte": "Bits per byte of `gzip -9` on the same text.",
    "hash": "Hash of the gradients of all ranks, before they are summed.",
    "host_wait_seconds": "Seconds in which the host waited for the device.",
    "imbalance": "Load of the busiest expert over the mean.",
    "indexer_loss": "Mean loss of the indexers of sparse attention, in nats per token and layer.",
    "init": "Version of the initial values.",
    "kernels": "The ten longest kernels: name, calls, share.",
    "learning_rate": "Learning rate of the step.",
    "load": "Share of each expert.",
    "loss": "Mean cross entropy over all ranks, in nats per target.",
    "mean_depth": "Mean number of steps of a position, where `model.recurrence` is adaptive.",
    "memory": (
        "Predicted `peak_bytes`, the `instant` of it, `evaluation_bytes`, `process_bytes` of them "
        "that are the process before the first step, and the `kind` of memory measured."
    ),
    "memory_allocated_bytes": "Peak bytes of tensors; accelerators only.",
    "memory_bytes": "Peak reserved memory of the fullest rank; on CPUs its resident set.",
    "metrics": "Value and digest of the source of each of `evaluation.metrics`, by name.",
    "modelled_seconds": "Predicted step time without the fitted residual.",
    "moments": "Whether the optimizer's moments are those of the parent, or why not.",
    "named": "Ranks that hang.",
    "names": "Parameters that had no gradient.",
    "new": "Tensors with initial values, which the parent lacks.",
    "next_sentence_accuracy": (
        "Share of right pairs of segments, with `objective.kind: masked_next_sentence`."
    ),
    "next_sentence_loss": "Loss of those pairs in nats per pair; no part of `loss`.",
    "noise_covariance_trace": "Trace of the covariance of a token's gradient.",
    "noise_gradient_squared": "Squared norm of the gradient without noise.",
    "noise_scale_tokens": (
        "Gradient noise scale: the batch size at which noise and gradient are equal."
    ),
    "packing": "Tokens, sequences, padding and unseen tokens of an epoch.",
    "padding_share": "Share of positions that are padding; pairs and labelled texts only.",
    "num_documents": "Number of documents of the step.",
    "parameters": "Parameters of the model.",
    "parameters_active": "Parameters that one token uses.",
    "parent_steps": "Step of the parent.",
    "peak_allocated_bytes": "Peak bytes of tensors; accelerators only.",
    "peak_bytes": (
        "Peak memory of the steps before the first evaluation or save, on the fullest rank: "
        "reserved by the allocator; on CPUs of the whole process."
    ),
    "perplexity": "`exp(loss)`.",
    "phase": "What the rank did last.",
    "policy": "`train.on_bad_step`.",
    "precision": "Number type of matmuls.",
    "problem": "Why the step was skipped.",
    "profile": "`flops.device`.",
    "profile.seconds": "Busy seconds of the device; without an accelerator those of the operators.",
    "ranks": "Data-parallel ranks that were compared.",
    "reason": "Why.",
    "reproducibility": "`train.reproducibility`.",
    "resumed_from": "Step of the checkpoint; null for a new run.",
    "retries": "Attempts after the first.",
    "router_z": "Mean squared log-sum-exp of the router's logits.",
    "run": "Folder of the parent.",
    "samples": "Prompts and texts.",
    "seconds": "Duration; of a step that of the slowest rank, with its wait for data.",
    "sequences": "First and last number of the step's sequences.",
    "sequence_length": "Tokens of a sequence in this step, with `batch.length_stages`.",
    "sets": "Results by evaluation task.",
    "shares": "Share of each kind of kernel in `seconds`.",
    "sources": "The same numbers by dataset of a mixture.",
    "source_tokens": "Tokens of the sources of the step's pairs.",
    "stage": "Name of the stage.",
    "pages": "Pages of all inputs, also of those that an earlier run extracted.",
    "compiled_pages": "Pages that the compiled core extracted.",
    "left_pages": "Pages that the compiled core left to Python.",
    "stalled_seconds": "Time that training stood still for the save.",
    "state_hash": "128 bits over weights, moments and buffers.",
    "step": "Optimizer steps done.",
    "step_seconds": "Predicted `p10`, `p50` and `p90`; in `measured` the median.",
    "steps": "Number of steps.",
    "target_tokens": "Tokens of the targets of the step's pairs.",
    "tasks": "Number of tasks.",
    "timeout_seconds": "`train.hang_timeout_seconds`.",
    "tokens": "Tokens of the run so far.",
    "tokens_done": "Tokens trained before a new budget.",
    "tokens_per_second": "Tokens of all ranks per second.",
    "tokens_per_step": "Tokens of a full step.",
    "trace": "File of the trace.",
    "unused": "Tensors of the parent that the model lacks.",
    "update": "Norm of the change of each layer's weights in this step.",
    "utilisation": "Share of the peak FLOP/s of all ranks; null where the device is unknown.",
    "utilisation_of": "FLOPs convention, device and dtype of `utilisation`.",
    "weight": "Norm of each layer's weights after this step.",
    "why_no_time": "Why there is no predicted time.",
    "world_size": "Number of ranks.",
    "xz_bits_per_byte": "Bits per byte of `xz -9` on the same text.",
}


class EventCall(NamedTuple):
    """A call in the source that writes an event."""

    kind: str
    file: str
    fields: tuple[str, ...]


def iter_event_calls(
    folders: tuple[str, ...] = ("llmsys", "data_pipeline", "launch"),
) -> Iterator[EventCall]:
    """Yield the calls that write events, in the order of files and lines."""
    for path in (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                named = {word.arg for word in node.keywords if word.arg}
                is_writer = (
                    node.func.attr == "write"
                    and bool(node.keywords)
                    and "event" in ast.unparse(node.func)
                )
                if node.func.attr in WRITERS or is_writer:
                    for kind in _list_kinds(node.args[0]):
                        yield EventCall(
                            kind, path.relative_to(ROOT).as_posix(), tuple(sorted(named))
                        )


def _list_kinds(argument: ast.expr) -> list[str]:
    """Return the kinds that an argument can be; none for a variable, whose callers are writers
    themselves.
    """
    branches = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
    return [
        one.value
        for one in branches
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]


def list_event_fields() -> dict[str, tuple[set[str], set[str]]]:
    """Return the fields and the files of each kind of event.

    Raises:
        ValueError: the source and the meanings in this file name different kinds or fields.
    """
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for call in iter_event_calls():
        fields, files = found[call.kind]
        fields.update(call.fields, MAPPED.get(call.kind, "").split())
        files.add(call.file)
    if found.keys() != KINDS.keys():
        raise ValueError(
            "KINDS of tools/docs/event_reference.py and the source differ: "
            f"{found.keys() ^ KINDS.keys()}"
        )
    used = {
        get_meaning_key(kind, name) for kind, (fields, _) in found.items() for name in fields
    } | {"step"}
    if used != FIELDS.keys():
        raise ValueError(
            f"FIELDS of tools/docs/event_reference.py and the source differ: {used ^ FIELDS.keys()}"
        )
    return dict(found)


def get_meaning_key(kind: str, field: str) -> str:
    """Return the key of a field's meaning in FIELDS."""
    own = f"{kind}.{field}"
    return own if own in FIELDS else field


def format_page() -> str:
    """Return the page."""
    found = list_event_fields()
    parts = [
        "# Events\n\n`events.jsonl` in a run folder has one JSON object a line: `time` (Unix "
        "seconds), `event` (the kind), in a run `step` (optimizer steps done), and the fields "
        "below. A field may be missing where it does not apply. The first line is an event "
        "`format` with `format_version`, the version of the file. Numbers that are not finite are "
        "null. After a crash steps are logged again: `llmsys.events.read_latest_events` keeps the "
        "last of each."
    ]
    for kind, text in KINDS.items():
        fields, files = found[kind]
        rows = [
            (f"`{name}`", format_text(FIELDS[get_meaning_key(kind, name)]))
            for name in sorted(fields)
        ]
        written = ", ".join(f"`{file}`" for file in sorted(files))
        parts.append(
            f"## {kind}\n\n{text} Written by "
            f"{written}.\n\n{format_table(('field', 'meaning'), rows)}"
        )
    return "\n\n".join(parts) + "\n"

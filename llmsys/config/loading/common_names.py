"""Names that other trainers use for keys and values of a config, for the messages about them.

Reads nothing; `validation_errors` names our word for a key or value that is not one of ours.
"""

import difflib
import re
from collections.abc import Sequence

# Our key by that of another trainer, or by the last part of it.
COMMON_KEYS = {
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "schedule.min_lr_factor",
    "wd": "optimizer.weight_decay",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "max_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "schedule.kind",
    "lr_scheduler": "schedule.kind",
    "lr_schedule": "schedule.kind",
    "warmup_ratio": "schedule.warmup_tokens",
    "warmup_iters": "schedule.warmup_tokens",
    "batch_size": "batch.sequences",
    "global_batch_size": "batch.sequences",
    "per_device_train_batch_size": "batch.micro_sequences",
    "micro_batch_size": "batch.micro_sequences",
    "gradient_accumulation_steps": "batch.sequences",
    "seq_len": "batch.sequence_length",
    "seq_length": "batch.sequence_length",
    "max_seq_len": "batch.sequence_length",
    "max_length": "batch.sequence_length",
    "block_size": "batch.sequence_length",
    "context_length": "batch.sequence_length",
    "tokens": "train.tokens",
    "max_steps": "train.tokens",
    "steps": "train.tokens",
    "train_steps": "train.tokens",
    "num_epochs": "train.tokens",
    "num_steps": "train.tokens",
    "num_train_epochs": "train.tokens",
    "epochs": "train.tokens",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "mixed_precision": "train.precision",
    "gradient_checkpointing": "train.activation_checkpoint",
    "recompute": "train.activation_checkpoint",
    "output_dir": "run.folder",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "evaluation.every_steps",
    "logging_steps": "train.log_every_steps",
    "resume_from_checkpoint": "train.init_from",
    "checkpoint.folder": "run.folder",
    "checkpoint.path": "run.folder",
    "num_gpus": "launch.processes",
    "nproc_per_node": "launch.processes",
    "gpus": "launch.processes",
    "devices": "launch.processes",
    "workers": "data.executor.workers",
    "num_workers": "data.executor.workers",
    "dp": "layout.replicate",
    "ddp": "layout.replicate",
    "fsdp": "layout.shard",
    "zero_stage": "engine.zero_stage",
    "tp": "layout.tensor",
    "tensor_parallel_size": "layout.tensor",
    "pp": "layout.pipeline",
    "pipeline_parallel_size": "layout.pipeline",
    "cp": "layout.context",
    "ep": "layout.expert",
    "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "d_ff": "model.intermediate_size",
    "rope_theta": "model.position.theta",
    "activation": "model.feed_forward.kind",
    "hidden_act": "model.feed_forward.kind",
    "num_experts": "model.moe.num_experts",
    "moe.top_k": "model.moe.num_experts_per_tok",
    "tie_embeddings": "model.tie_word_embeddings",
    "data.path": "data.inputs",
    "data.files": "data.inputs",
    "data.languages": "data.language.languages",
    "text_column": "data.read.text_field",
    "heldout_files": "data.heldout_inputs",
    "validation_files": "data.heldout_inputs",
    "wandb_project": "tracking.project",
}

# Keys that other trainers have and that decide nothing here, with what does.
NEEDLESS_KEYS = dict.fromkeys(
    ("train.device", "device", "accelerator", "train.accelerator", "use_cuda", "no_cuda"),
    "is not needed: a run takes the accelerators of its machine, or the CPU where it has none. "
    "Leave it out, or set CUDA_VISIBLE_DEVICES to choose some",
)

# Our value by that of another trainer, by key; the nearest where there is no equal one.
COMMON_VALUES = {
    "engine.kind": {"fsdp": "torch", "fsdp2": "torch", "ddp": "torch", "pytorch": "torch",
        "zero": "deepspeed"},
    "optimizer.kind": {"adamw_torch": "adamw", "adamw_fused": "adamw", "sgd": "adamw"},
    "schedule.kind": {"warmup_stable_decay": "wsd", "polynomial": "linear", "none": "constant"},
    "train.precision": {
        "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16-mixed": "bf16",
        "float32": "fp32", "32": "fp32",
    },
    "train.compile": {"yes": "block", "on": "block", "true": "block", "True": "block",
        "False": "none", "no": "none"},
    "train.activation_checkpoint": {"True": "full", "False": "none"},
    "checkpoint.mode": {"background": "async", "asynchronous": "async"},
    "tokenizer.kind": {"bpe": "sentencepiece", "unigram": "sentencepiece", "huggingface": "file",
        "hf": "file"},
    "tokenizer.model_type": {"wordpiece": "unigram"},
    "model.attention.kind": {
        "flash": "multi_head", "sdpa": "multi_head", "gqa": "multi_head", "mha": "multi_head",
        "mla": "latent",
    },
    "model.position.kind": {"rotary": "rope", "absolute": "learned", "t5": "relative_bias"},
    "data.kind": {"text": "crawl", "warc": "crawl", "jsonl": "crawl", "parquet": "crawl",
        "translation": "pairs"},
    "data.executor.kind": {"process": "local", "multiprocessing": "local", "spark": "ray"},
    "data.pii.kind": {"mask": "replace", "redact": "replace"},
    "data.extract.kind": {"readability": "article"},
}  # fmt: skip

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def suggest_value(key: str, value: str, legal: Sequence[str]) -> str | None:
    """Return the legal value that a wrong one probably means.

    Args:
        key: dotted key of the value.
        value: the wrong value.
        legal: the legal values.

    Returns:
        One of `legal`; None if nothing is close.
    """
    common = COMMON_VALUES.get(key, {}).get(value)
    same = [word for word in legal if word.lower() == value.lower()]
    begun = [word for word in legal if value and word.startswith(value)]
    close = difflib.get_close_matches(value, legal, n=1)
    return next(iter([*([common] if common in legal else []), *same, *begun, *close]), None)


def _join_decimals(found: re.Match[str]) -> str:
    return ".".join(part for part in found.groups() if part is not None)


def suggest_number(value: object, is_whole: bool = False) -> str | None:
    """Return the number that a text such as `1B`, `10k`, `1,5` or `5%` means, as YAML; None for
    another value.
    """
    text = str(value).strip().lower()
    if is_whole and text.endswith("%"):
        return None  # of what is not known here
    # A comma after a zero, or before anything but three digits, is a decimal one.
    text = re.sub(r"^(-?0),(\d+)$|^(-?\d+),(\d{1,2}|\d{4,})$", _join_decimals, text)
    text = text.replace(",", "")
    if is_whole and "." in text and text[-1].isdigit():
        return None
    digits, factor = text[:-1], _SUFFIXES.get(text[-1:], 0)
    try:
        if text.endswith("%"):
            return f"{float(digits) / 100:g}"
        if text[-1:].isdigit() and str(value) != text:
            return text if float(text) else None
        return f"{round(float(digits) * factor):_}" if factor else None
    except ValueError:
        return None

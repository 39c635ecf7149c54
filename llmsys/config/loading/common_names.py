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
    "objective.loss": "objective.kind",
    "loss.kind": "objective.kind",
    "data.paths": "data.inputs",
    "data.dataset": "data.inputs",
    "tokenizer.name": "tokenizer.path",
    "tokenizer.file": "tokenizer.path",
    "tokenizer.type": "tokenizer.model_type",
    "engine.stage": "engine.zero_stage",
    "layout.sequence": "layout.tensor",
    "layout.model": "layout.tensor",
    "layout.data": "layout.replicate",
    "model.model_type": "model.family",
    "model.type": "model.family",
    "run.dir": "run.folder",
    "run.path": "run.folder",
    "run.output": "run.folder",
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
    "project_name": "tracking.project",
    "optim": "optimizer.kind",
    "optimizer_type": "optimizer.kind",
    "max_grad_norm": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "adam_eps": "optimizer.eps",
    "lr_decay_style": "schedule.kind",
    "scheduler": "schedule.kind",
    "warmup_steps": "schedule.warmup_tokens",
    "warmup": "schedule.warmup_tokens",
    "lr_warmup_iters": "schedule.warmup_tokens",
    "lr_warmup_steps": "schedule.warmup_tokens",
    "lr_warmup_fraction": "schedule.warmup_tokens",
    "decay_steps": "schedule.decay_tokens",
    "lr_decay_iters": "schedule.decay_tokens",
    "decay_ratio": "schedule.decay_tokens",
    "per_device_eval_batch_size": "evaluation.micro_sequences",
    "eval_batch_size": "evaluation.micro_sequences",
    "train_batch_size": "batch.sequences",
    "local_batch_size": "batch.micro_sequences",
    "train_micro_batch_size_per_gpu": "batch.micro_sequences",
    "n_ctx": "batch.sequence_length",
    "max_seq_length": "batch.sequence_length",
    "max_sequence_length": "batch.sequence_length",
    "train_iters": "train.tokens",
    "max_iters": "train.tokens",
    "train_samples": "train.tokens",
    "num_train_steps": "train.tokens",
    "total_steps": "train.tokens",
    "max_train_steps": "train.tokens",
    "iterations": "train.tokens",
    "max_epochs": "train.tokens",
    "recompute_granularity": "train.activation_checkpoint",
    "activation_checkpointing": "train.activation_checkpoint",
    "save": "run.folder",
    "save_dir": "run.folder",
    "checkpoint_dir": "run.folder",
    "load": "train.init_from",
    "load_checkpoint": "train.init_from",
    "run_name": "run.name",
    "experiment": "run.name",
    "save_interval": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps",
    "train_time_interval": "checkpoint.every_minutes",
    "save_total_limit": "checkpoint.keep_last",
    "eval_interval": "evaluation.every_steps",
    "eval_every": "evaluation.every_steps",
    "log_interval": "train.log_every_steps",
    "log_every": "train.log_every_steps",
    "num_processes": "launch.processes",
    "n_gpus": "launch.processes",
    "n_gpu": "launch.processes",
    "num_workers_per_node": "launch.processes",
    "master_port": "launch.port",
    "main_process_port": "launch.port",
    "tensor_model_parallel_size": "layout.tensor",
    "tensor_parallel_degree": "layout.tensor",
    "pipeline_model_parallel_size": "layout.pipeline",
    "pipeline_parallel_degree": "layout.pipeline",
    "context_parallel_size": "layout.context",
    "context_parallel_degree": "layout.context",
    "expert_model_parallel_size": "layout.expert",
    "expert_parallel_degree": "layout.expert",
    "data_parallel_shard_degree": "layout.shard",
    "data_parallel_replicate_degree": "layout.replicate",
    "data_parallel_size": "layout.replicate",
    "n_layers": "model.num_hidden_layers",
    "ffn_hidden_size": "model.intermediate_size",
    "num_query_groups": "model.num_key_value_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "moe_router_topk": "model.moe.num_experts_per_tok",
    "top_k_experts": "model.moe.num_experts_per_tok",
    "rotary_base": "model.position.theta",
    "data_path": "data.inputs",
    "train_file": "data.inputs",
    "train_data": "data.inputs",
    "input": "data.inputs",
    "input_files": "data.inputs",
    "validation_file": "data.heldout_inputs",
    "val_data": "data.heldout_inputs",
    "language": "data.language.languages",
    "languages": "data.language.languages",
    "vocab_file": "tokenizer.path",
    "tokenizer_model": "tokenizer.path",
    "tokenizer_path": "tokenizer.path",
    "tokenizer_name": "tokenizer.path",
    "tokenizer_type": "tokenizer.kind",
    "max_tokens": "generation.max_new_tokens",
    "n_predict": "generation.max_new_tokens",
    "beams": "generation.num_beams",
}

_STEP = "batch.sequences times batch.sequence_length"
_STEPS = f"It counts tokens: steps times {_STEP}."
_EPOCHS = "It counts tokens: epochs times the train tokens that llmsys inspect DATASET prints."
_SHARE = "It counts tokens: the share times train.tokens."
_WHOLE_STEP = "It counts the sequences of a step on all ranks, with those that are accumulated."
_BETAS = "It has both: [0.9, 0.95]."

# What our key counts, by the name of another trainer whose value means something else.
OTHER_UNITS = {
    **dict.fromkeys(
        (
            "steps", "max_steps", "train_steps", "num_steps", "train_iters", "max_iters",
            "num_train_steps", "total_steps", "max_train_steps", "iterations", "warmup_iters",
            "warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "decay_steps", "lr_decay_iters",
        ),
        _STEPS,
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_fraction", "warmup", "decay_ratio"), _SHARE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), _BETAS),
    "train_samples": "It counts tokens: samples times batch.sequence_length.",
    "min_lr": "It is a share of optimizer.learning_rate, such as 0.1.",
    "gradient_accumulation_steps": _WHOLE_STEP,
    "language": "It is a list, such as [en].",
    "languages": "It is a list, such as [en].",
    "data_path": "It is a list of files, such as [crawl/*.warc.gz].",
    "train_file": "It is a list of files, such as [crawl/*.warc.gz].",
    "train_data": "It is a list of files, such as [crawl/*.warc.gz].",
    "input": "It is a list of files, such as [crawl/*.warc.gz].",
    "input_files": "It is a list of files, such as [crawl/*.warc.gz].",
}  # fmt: skip

# Our override by the switch of another trainer.
COMMON_SWITCHES = {
    "bf16": "train.precision=bf16",
    "fp16": "train.precision=fp16",
    "fp32": "train.precision=fp32",
    "fp8": "train.matmul_dtype=fp8",
    "compile": "train.compile=block",
    "torch_compile": "train.compile=block",
    "gradient_checkpointing": "train.activation_checkpoint=full",
    "recompute_activations": "train.activation_checkpoint=full",
    "deepspeed": "engine.kind=deepspeed",
    "use_deepspeed": "engine.kind=deepspeed",
    "use_fsdp": "layout.shard=2",
    "distributed_optimizer": "layout.shard=2",
    "use_distributed_optimizer": "layout.shard=2",
    "wandb": "tracking.wandb=true",
    "tensorboard": "tracking.tensorboard=true",
    "mlflow": "tracking.mlflow=true",
    "report_to": "tracking.wandb=true, tracking.tensorboard=true or tracking.mlflow=true",
    "untie_embeddings_and_output_weights": "model.tie_word_embeddings=false",
    "swiglu": "model.feed_forward.kind=swiglu",
}

# Names of other trainers that no key has, with what does their work.
NEEDLESS_KEYS = {
    **dict.fromkeys(
        ("train.device", "device", "accelerator", "train.accelerator", "use_cuda", "no_cuda"),
        "is not needed: a run takes the accelerators of its machine, or the CPU where it has none. "
        "Leave it out, or set CUDA_VISIBLE_DEVICES to choose some",
    ),
    **dict.fromkeys(
        ("resume", "auto_resume", "continue", "resume_training"),
        "is not needed: the same command continues from the newest checkpoint in run.folder. "
        "Leave it out, or set train.init_from to begin with the weights of another run",
    ),
    **dict.fromkeys(
        ("local_rank", "rank", "world_size", "node_rank", "machine_rank"),
        "is not needed: llmsys starts the ranks and numbers them. Leave it out, or give "
        "launch.processes=8",
    ),
    **dict.fromkeys(
        (
            "nnodes", "num_nodes", "num_machines", "nodes", "hostfile", "hosts", "master_addr",
            "main_process_ip", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "multi_gpu",
            "multi_node",
        ),
        "is for several hosts. Run llmsys launch CONFIG nodes=first:8,second:8, or give "
        "launch.processes=8 for those of this machine",
    ),
    **dict.fromkeys(
        ("dry_run", "dryrun", "print", "check"),
        "is a verb. Run llmsys show CONFIG for the resolved config, or llmsys estimate CONFIG for "
        "its memory and time",
    ),
    **dict.fromkeys(
        ("verbose", "v", "debug", "log_level", "quiet"),
        "is not needed: events.jsonl in run.folder has every step. Set train.log_every_steps for "
        "the lines that are printed",
    ),
    **dict.fromkeys(
        ("config", "config_file", "config_path"),
        "is not needed: the config is the word after the verb. Give it there",
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "pin_memory", "num_data_workers"),
        "is not needed: tokens are read from mapped files, without workers. Leave it out",
    ),
    **dict.fromkeys(
        ("overwrite_output_dir", "overwrite", "force"),
        "is not needed: no run is overwritten. Set run.folder to a new folder",
    ),
    **dict.fromkeys(
        ("use_flash_attn", "flash_attn", "attn_implementation", "flash_attention", "use_sdpa"),
        "is not needed: each device gets its fastest kernel. See which: llmsys show CONFIG "
        "--kernels",
    ),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "pretrained_model", "pretrained", "hf_model"),
        "is not a key: a model of Hugging Face is imported. Run llmsys init MODEL_FOLDER TEXTS, "
        "which writes the config",
    ),
}  # fmt: skip

# Our value by that of another trainer, by key; the nearest where there is no equal one.
COMMON_VALUES = {
    "engine.kind": {"fsdp": "torch", "fsdp2": "torch", "ddp": "torch", "pytorch": "torch",
        "zero": "deepspeed"},
    "optimizer.kind": {"adamw_torch": "adamw", "adamw_fused": "adamw", "sgd": "adamw"},
    "schedule.kind": {"warmup_stable_decay": "wsd", "polynomial": "linear", "none": "constant",
        "cosine_with_restarts": "cosine", "cosine_annealing": "cosine", "step": "wsd",
        "multistep": "wsd", "constant_with_warmup": "constant", "trapezoidal": "wsd"},
    "objective.kind": {"clm": "next_token", "causal_lm": "next_token", "causal": "next_token",
        "lm": "next_token", "mlm": "masked", "seq2seq": "translation", "t5": "span_corruption",
        "cross_entropy": "next_token"},
    "model.family": {"gpt": "decoder", "llama": "decoder", "causal": "decoder",
        "seq2seq": "encoder_decoder", "encoder-decoder": "encoder_decoder", "bert": "encoder"},
    "train.precision": {
        "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16-mixed": "bf16",
        "float32": "fp32", "32": "fp32",
    },
    "train.compile": {"yes": "block", "on": "block", "true": "block", "True": "block",
        "False": "none", "no": "none"},
    "train.activation_checkpoint": {"True": "full", "False": "none"},
    "checkpoint.mode": {"background": "async", "asynchronous": "async"},
    "tokenizer.kind": {"bpe": "sentencepiece", "unigram": "sentencepiece", "huggingface": "file",
        "hf": "file", "gpt2": "file", "tiktoken": "file", "GPT2BPETokenizer": "file",
        "HuggingFaceTokenizer": "file",
        "SentencePieceTokenizer": "sentencepiece"},
    "tokenizer.model_type": {"wordpiece": "unigram"},
    "model.attention.kind": {
        "flash": "multi_head", "sdpa": "multi_head", "gqa": "multi_head", "mha": "multi_head",
        "mla": "latent",
    },
    "model.feed_forward.kind": {"relu2": "squared_relu"},
    "model.position.kind": {"rotary": "rope", "absolute": "learned", "t5": "relative_bias"},
    "data.kind": {"hf": "crawl", "huggingface": "crawl", "text": "crawl",
        "warc": "crawl", "jsonl": "crawl", "parquet": "crawl",
        "translation": "pairs"},
    "data.executor.kind": {"process": "local", "multiprocessing": "local", "spark": "ray"},
    "data.pii.kind": {"mask": "replace", "redact": "replace"},
    "data.extract.kind": {"readability": "article"},
}  # fmt: skip

# Seconds and bytes of the units that people write.
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10,
    "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 10**3, "m": 10**6, "g": 10**9,
    "t": 10**12}  # fmt: skip
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def suggest_override(name: str, value: str | None) -> str | None:
    """Return what a name of another trainer means here, as the end of a message.

    Args:
        name: The name, with underscores.
        value: The value that was given to it; None for a switch.

    Returns:
        A question or sentences; None for a name that is not known.
    """
    last = name.rpartition(".")[2]
    for one in (name, last):
        if reason := NEEDLESS_KEYS.get(one):
            return f"It {reason}."
    key = COMMON_KEYS.get(name) or COMMON_KEYS.get(last)
    switch = COMMON_SWITCHES.get(last)
    if switch is not None and (key is None or value is None):
        return f"Did you mean {switch}?"
    if key is None:
        return None
    if unit := OTHER_UNITS.get(last):
        return f"Did you mean {key}=…? {unit}"
    given = "…" if value is None else COMMON_VALUES.get(key, {}).get(value, value)
    return f"Did you mean {key}={given}?"


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


def suggest_amount(name: str, value: object, is_whole: bool = False) -> str | None:
    """Return the number that a text with a unit means under a key that names its unit, such as
    `5m` of a key in seconds.

    Args:
        name: Last part of the key.
        value: The value.
        is_whole: Whether the number is whole.

    Returns:
        The number as YAML; that of `suggest_number` for another key or text.
    """
    text = str(value).strip().lower().replace(" ", "")
    seconds = {"seconds": 1, "minutes": 60, "hours": 3600}.get(name.rpartition("_")[2])
    if seconds is not None and (clock := re.fullmatch(r"(\d+):(\d\d)(?::(\d\d))?", text)):
        hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return f"{(hours * 3600 + minutes * 60 + rest) / seconds:g}"
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if found is not None and seconds is not None and found[2] in _SECONDS:
        return f"{float(found[1]) * _SECONDS[found[2]] / seconds:g}"
    if found is not None and name.endswith("bytes") and found[2] in _BYTES:
        return f"{round(float(found[1]) * _BYTES[found[2]]):_}"
    return suggest_number(value, is_whole)


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

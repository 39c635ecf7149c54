"""Rename old configuration keys and values, and back for stored or hashed records.

Invariants:
- An old name in a user's config is an error that names the new one (`validation_errors`).
- Recorded configs of runs and datasets are read with either spelling.
- Checkpoints, manifests and task keys keep the old spelling, so that equal settings stay equal to
  those of old runs.
"""

from pathlib import Path
from typing import Any

Keys = tuple[str, ...]

# Old key to new key, by section in its new spelling (`*`: any entry of a list).
RENAMED_KEYS: dict[str, dict[str, str]] = {
    "batch": {
        "attend": "attention_scope",
        "deal": "assignment",
        "length_groups": "num_length_buckets",
        "target_length": "target_sequence_length",
    },
    "batch.ramp": {"over_tokens": "ramp_tokens", "quantum_sequences": "increment_sequences"},
    "bitwise": {"deal": "assignment"},  # a section of checkpoint records alone
    "checkpoint": {"best_by": "best_metric"},
    "data.deduplicate": {
        "against": "earlier_datasets",
        "keys": "key_filter",
        "spans": "repeated_segments",
    },
    "data.decontaminate.sets.*": {
        "item": "id_field",
        "label": "label_fields",
        "query": "query_fields",
    },
    "data.documents": {"copies": "export_formats", "shards": "num_shards"},
    "data.executor": {"options": "sbatch_options", "tries": "max_attempts"},
    "data.language": {
        "keep": "languages",
        "minimum_score": "min_score",
        "sample_characters": "max_characters",
    },
    "data.pii": {"find": "kinds", "replace_with": "replacement", "same": "consistency"},
    "data.read": {
        "date": "date_field",
        "digests": "on_digest_mismatch",
        "id": "id_field",
        "text": "text_field",
        "tries": "max_attempts",
        "truncated": "on_truncation",
        "url": "url_field",
    },
    "data.rules.*": {
        "head_below": "head_max_perplexity",
        "pieces": "sentencepiece_model",
        "reader": "backend",
        "tail_above": "tail_min_perplexity",
        "words": "word_lists",
    },
    "data.stages.*": {"from_tokens": "start_tokens"},
    "data.url": {"allow": "allow_list"},
    "engine": {"gradients": "gradient_accumulation", "offload": "cpu_offload"},
    "evaluation": {"sets": "tasks"},
    "generation": {"beams": "num_beams", "opening": "prefix_pieces"},
    "objective": {
        "chosen_share": "mlm_probability",
        "masked_share": "mask_replace_prob",
        "random_share": "random_replace_prob",
    },
    "optimizer": {
        "embedding_rate_scale": "embedding_lr_multiplier",
        "gradient_clip": "max_grad_norm",
        "steps": "newton_schulz_steps",
    },
    "scale": {  # the keys of `llmsys scale`
        "energy_overhead": "pue",
        "experts": "num_experts",
        "mark": "highlight",
        "inference_tokens": "serve_tokens",
        "served_tokens": "serve_tokens",
    },
    "schedule": {"final_fraction": "min_lr_factor"},
    "tokenizer": {"newlines_and_tabs": "whitespace_symbols"},
    "train": {
        "average_half_life_tokens": "ema_half_life_tokens",
        "bad_step": "on_bad_step",
        "bad_steps_in_a_row": "max_consecutive_bad_steps",
        "products": "matmul_dtype",
        "recompute": "activation_checkpoint",
        "spike": "spike_detection",
        "start_from": "init_from",
    },
    "train.spike_detection": {
        "gradient_norm": "max_grad_norm_ratio",
        "loss": "max_loss_ratio",
        "window": "window_steps",
    },
}

# Old value to new value, by key in its new spelling.
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "batch.assignment": {"in_order": "sequential"},
    "bitwise.assignment": {"in_order": "sequential"},
    "schedule.kind": {"original": "noam"},
    "train.activation_checkpoint": {"block": "full"},
}

_OLD_KEYS = {
    section: {new: old for old, new in names.items()} for section, names in RENAMED_KEYS.items()
}
_OLD_VALUES = {
    key: {new: old for old, new in names.items()} for key, names in RENAMED_VALUES.items()
}
_RUN_FILES = ("environment.json", "events.jsonl", "checkpoints", "hostfile")


def to_current_names(values: Any, section: str = "") -> Any:
    """Return stored values with each old key and value in its new spelling.

    Args:
        values: plain mappings, lists and scalars, as parsed from YAML or JSON. New spellings are
            kept.
        section: key path of the values in a RunConfig, in the new spelling, such as `data.rules`;
            empty: the root.

    Returns:
        A copy of the values.
    """
    if isinstance(values, list):
        return [to_current_names(value, _join(section, "*")) for value in values]
    if not isinstance(values, dict):
        return find_new_value(section, values) or values
    names: dict[Any, Any] = {key: RENAMED_KEYS.get(section, {}).get(key, key) for key in values}
    return {
        names[key]: to_current_names(value, _join(section, names[key]))
        for key, value in values.items()
    }


def to_recorded_names(values: Any, section: str = "") -> Any:
    """Return values with each renamed key and value in its old spelling, for records, manifests and
    task keys.

    Args:
        values: result of `model_dump(mode="json")` of a section or a config.
        section: key path of the values in a RunConfig, in the new spelling; empty: the root.

    Returns:
        A copy of the values.
    """
    if isinstance(values, list):
        return [to_recorded_names(value, _join(section, "*")) for value in values]
    if not isinstance(values, dict):
        return (
            _OLD_VALUES.get(section, {}).get(values, values) if isinstance(values, str) else values
        )
    names = _OLD_KEYS.get(section, {})
    return {
        names.get(key, key): to_recorded_names(value, _join(section, key))
        for key, value in values.items()
    }


def to_current_keys(keys: Keys) -> Keys:
    """Return a key path with each old key in its new spelling."""
    current: list[str] = []
    section = ""
    for key in keys:
        current.append(RENAMED_KEYS.get(section, {}).get(key, key))
        section = _join(section, current[-1])
    return tuple(current)


def find_new_key(keys: Keys) -> str | None:
    """Return the new dotted name of an old key path; None when it was not renamed."""
    current = to_current_keys(keys)
    return None if current == keys else ".".join(current)


def find_new_value(key: str, value: object) -> str | None:
    """Return the new spelling of an old value of `key`, a dotted path in the new spelling; None
    when it has none.
    """
    return RENAMED_VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def is_recorded_config(path: Path) -> bool:
    """Return whether a file is the config.yaml that a run, a launch or a conversion wrote into
    its folder.
    """
    return path.name == "config.yaml" and any((path.parent / name).exists() for name in _RUN_FILES)


def _join(section: str, key: object) -> str:
    name = "*" if str(key).isdigit() else str(key)
    return f"{section}.{name}" if section else name

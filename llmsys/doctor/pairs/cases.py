"""Cases: values of all factors as the configs of a run, of its resumption and of its branch.

Whether a case is possible is what the config and the checks before a run say, so the array and the
config cannot disagree.

Invariants:
- The configs of a case are a function of the assignment, the seed and the folders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.config.batch import BatchConfig
from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.engine import AccelerateEngineConfig, DeepSpeedEngineConfig
from llmsys.config.objective import get_needs
from llmsys.config.run import RunConfig
from llmsys.config.section import fill_default_kinds
from llmsys.data.step_plan import RunPlan
from llmsys.doctor.pairs.factor import Assignment, Factor, Settings
from llmsys.doctor.pairs.factors import FACTORS, LENGTH, SEQUENCES
from llmsys.doctor.toy_dataset import VOCABULARY
from llmsys.errors import LlmsysError
from llmsys.parallel.fp8 import require_fp8
from llmsys.parallel.process_group import get_local_device
from llmsys.train.gradient_noise_scale import require_micro_batches

# Steps of a run, and those after a branch of it.
STEPS, BRANCH_STEPS = 9, 2

BASE: Settings = {
    "run.name": "pairs",
    "tokenizer": {"kind": "sentencepiece", "vocab_size": VOCABULARY},
    "model.vocab_size": VOCABULARY,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_attention_heads": 4,
    # The query stream of a permutation and the spans of T5 take further positions.
    "model.max_position_embeddings": 2 * LENGTH,
    "model.initializer_range": 0.1,
    "batch.sequence_length": LENGTH,
    "batch.sequences": SEQUENCES,
    "optimizer.learning_rate": 1e-2,
    "optimizer.max_grad_norm": 0.5,
    "optimizer.weight_decay": 0.1,
    "optimizer.embedding_lr_multiplier": 2.0,
    "train.threads_per_process": 1,
    "train.log_every_steps": 1,
    "train.hang_timeout_seconds": 0,
    "checkpoint.keep_last": 20,
    "evaluation.max_tokens": 4 * LENGTH,
}
# Keeps a gradient that is zero but for rounding from deciding the sign of an update.
EPS = 1e-6
HAS_NO_EPS = ("lion", "adafactor")

# Axes and engine of the process that resumes, from their defaults.
PLACEMENT = (
    "engine",
    "replicate",
    "shard",
    "expert axis",
    "tensor",
    "context",
    "pipeline",
    "schedule of stages",
)
RESUMED_AXES = {"expert": "expert axis", "tensor": "tensor", "pipeline": "pipeline"}

BRANCH_RATE_FACTOR = 0.5


@dataclass(frozen=True)
class Limits:
    """The limits of a machine.

    Attributes:
        processes: most processes of a case.
    """

    processes: int = 4


@dataclass(frozen=True)
class Part:
    """A part of a case: its config, and the number of its processes."""

    config: RunConfig
    ranks: int


@dataclass(frozen=True)
class PairCase:
    """A case: what it chooses, and the seed of its weights and data.

    Attributes:
        assignment: label of the value of each factor.
        seed: seed of weights, data and events.
    """

    assignment: tuple[tuple[str, str], ...]
    seed: int

    @property
    def labels(self) -> dict[str, str]:
        """Label by factor."""
        return dict(self.assignment)

    def replace_label(self, factor: str, label: str) -> "PairCase":
        """Return the case with another value of one factor."""
        return replace(self, assignment=tuple((self.labels | {factor: label}).items()))

    def list_choices(self, factors: Sequence[Factor] = FACTORS) -> dict[str, str]:
        """Return the labels of factors that act and are not at their defaults."""
        labels = self.labels
        chosen = {
            factor.name: labels[factor.name] for factor in factors if factor.is_active(labels)
        }
        return {
            factor.name: chosen[factor.name]
            for factor in factors
            if chosen.get(factor.name, factor.default) != factor.default
        }

    @property
    def title(self) -> str:
        """Choices other than defaults, for messages."""
        return (
            ", ".join(f"{name}={label}" for name, label in self.list_choices().items())
            or "every default"
        )


class RefusedError(Exception):
    """A combination that the config or a check before training refuses, with its message."""


def build_default_assignment(factors: Sequence[Factor] = FACTORS) -> dict[str, str]:
    """Return the default of every factor.

    Args:
        factors: the factors.

    Returns:
        Label by factor.
    """
    return {factor.name: factor.default for factor in factors}


def build_settings(assignment: Assignment, factors: Sequence[Factor] = FACTORS) -> Settings:
    """Return the settings of an assignment as nested sections, without folders and budget."""
    flat = BASE
    if assignment["optimizer"] not in HAS_NO_EPS:
        flat = flat | {"optimizer.eps": EPS}
    nested: Settings = {}
    for key, value in (flat | {"model.num_hidden_layers": count_layers(assignment)}).items():
        _set_key(nested, key, value)
    for factor in factors:
        if factor.is_active(assignment):
            for key, value in (
                factor.get_value(assignment[factor.name]).build_settings(assignment).items()
            ):
                _set_key(nested, key, value)
    if get_needs(assignment["objective"])[2][0] != "crawl":
        # Rows of texts are short, so a step of them has more; images are shorter still.
        tokens = SEQUENCES // 2 * LENGTH
        _set_key(nested, "batch.sequences", tokens // nested["batch"]["sequence_length"])
        nested["batch"].pop("micro_sequences", None)
    else:
        nested["batch"].pop("num_length_buckets", None)
    filled: Settings = fill_default_kinds(nested, [RunConfig])
    return filled


def count_layers(assignment: Assignment) -> int:
    """Return the layers of the model: one for each stage at least, and uneven where possible."""
    chunks = 2 if assignment["schedule of stages"] == "interleaved" else 1
    ranks = int(assignment["pipeline"])
    stages = ranks * chunks if ranks > 1 else 1
    resumed = 4 if assignment["kill"] == "4 pipeline" else 2
    return max(resumed, stages + (ranks == 2))


def _set_key(settings: Settings, key: str, value: Any) -> None:
    """Set a dotted key; sections between are made, or added to."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(settings.get(parent), dict):
            settings[parent] = {}
        settings = settings[parent]
    old = settings.get(last)
    # A kind replaces a section of another kind, and adds to one without.
    if (
        isinstance(value, dict)
        and isinstance(old, dict)
        and old.get("kind") in (None, value.get("kind"))
    ):
        settings[last] = old | value
    else:
        settings[last] = dict(value) if isinstance(value, dict) else value


def count_ranks(assignment: Assignment) -> int:
    """Return the processes of a case."""
    context = {"1": 1, "ulysses": 2, "ring": 2, "ulysses_ring": 4}[assignment["context"]]
    axes = (assignment[name] for name in ("replicate", "shard", "tensor", "pipeline"))
    total = context
    for size in axes:
        total *= int(size)
    return total


def build_part(
    assignment: Assignment,
    seed: int,
    root: Path,
    limits: Limits,
    factors: Sequence[Factor] = FACTORS,
) -> Part:
    """Return config and processes of the run of an assignment.

    Args:
        assignment: label by factor.
        seed: seed of weights and data.
        root: folder of the datasets and of the run.
        limits: what the machine has.
        factors: the factors.

    Raises:
        RefusedError: the config, or a check before training, refuses it.
    """
    settings = build_settings(assignment, factors)
    _set_key(settings, "run.seed", seed)
    _set_key(settings, "run.folder", str(root / "run"))
    kind = settings.get("data", {}).get("kind", "crawl")
    _set_key(settings, "data.kind", kind)
    if kind == "mixture":
        for source in settings["data"]["sources"]:
            source["folder"] = str(root.parent / source["folder"])
    else:
        folder = root.parent / kind
        _set_key(settings, "data.folder", str(folder))
        if kind == "chat":
            path = folder / "tokenizer" / "tokenizer.model"
            _set_key(settings, "tokenizer", {"kind": "file", "path": str(path)})
    if assignment["rewind"] == "yes":
        _set_key(settings, "train.on_bad_step", "rewind")
    ranks = count_ranks(assignment)
    if ranks > limits.processes:
        raise RefusedError(f"takes {ranks} processes, more than --processes {limits.processes}")
    try:
        batch = BatchConfig.model_validate(settings["batch"])
        _set_key(settings, "train.tokens", batch.count_tokens_before(STEPS))
        config = RunConfig.model_validate(settings)
        _check_run(config, ranks)
    except ValidationError as error:
        raise RefusedError(format_refusal(error)) from None
    except LlmsysError as error:
        raise RefusedError(str(error)) from None
    return Part(config, ranks)


def build_resumed_assignment(assignment: Assignment) -> dict[str, str]:
    """Return the assignment of the processes that resume a killed run: other axes or engine."""
    count, _, kind = assignment["kill"].partition(" ")
    changed = dict(assignment)
    defaults = build_default_assignment()
    for name in PLACEMENT:
        changed[name] = defaults[name]
    if kind in RESUMED_AXES:
        changed[RESUMED_AXES[kind]] = count
    if kind not in ("tensor", "pipeline"):
        changed["shard"] = count
    if kind != "fsdp" and kind not in RESUMED_AXES:
        changed["engine"] = kind
    return changed


def build_parts(
    assignment: Assignment,
    seed: int,
    root: Path,
    limits: Limits,
    factors: Sequence[Factor] = FACTORS,
) -> tuple[Part, ...]:
    """Return the part of a run, and where it is killed the part that resumes it.

    Args:
        assignment: label by factor.
        seed: seed of weights and data.
        root: folder of the datasets and of the run.
        limits: what the machine has.
        factors: the factors.

    Raises:
        RefusedError: one of them is refused.
    """
    part = build_part(assignment, seed, root, limits, factors)
    if assignment["kill"] == "no":
        return (part,)
    resumed = build_resumed_assignment(assignment)
    try:
        # The model is that of the run that was killed.
        other = build_part(resumed | {"kill": assignment["kill"]}, seed, root, limits, factors)
    except RefusedError as error:
        raise RefusedError(f"resumed as {assignment['kill']}: {error}") from None
    model = part.config.model
    other_config = other.config.model_copy(update={"model": model})
    try:
        other_config = RunConfig.model_validate(other_config.model_dump(exclude_unset=True))
        _check_run(other_config, other.ranks)
    except (ValidationError, LlmsysError) as error:
        text = format_refusal(error) if isinstance(error, ValidationError) else str(error)
        raise RefusedError(f"resumed as {assignment['kill']}: {text}") from None
    return part, Part(other_config, other.ranks)


def build_branch_config(config: RunConfig, step: int) -> RunConfig:
    """Return the config of a branch from a step: another folder, and half the learning rate."""
    changes: Mapping[str, Any] = {
        "run": {"folder": config.run.folder.parent / "branch"},
        "train": {
            "branch_from": f"{config.run.folder}@{step}",
            "tokens": config.batch.count_tokens_before(step + BRANCH_STEPS),
        },
        "optimizer": {"learning_rate": config.optimizer.learning_rate * BRANCH_RATE_FACTOR},
    }
    settings = config.model_dump(exclude_unset=True)
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return RunConfig.model_validate(settings)


def _check_run(config: RunConfig, ranks: int) -> None:
    """Run the checks that a run makes before a model is built, as far as they need no data."""
    layout = config.resolve_layout(ranks)
    windows, device = config.objective.uses_windows, get_local_device()
    is_bitwise = config.train.reproducibility == "bitwise"
    if is_bitwise:
        require_ranks(
            layout.data_parallel_size, list_micro_batch_counts(config.batch, windows=windows)
        )
    if windows:
        plan = RunPlan(config.batch, 1 if is_bitwise else layout.data_parallel_size, 0)
        if config.train.noise_scale_every_steps:
            shared = layout.data_parallel_size if is_bitwise else 1
            counts = [
                plan.get_step_plan(step)[1].num_micro_batches // shared for step in range(STEPS)
            ]
            require_micro_batches(min(counts), config, layout)
    for key in ("matmul_dtype", "expert_matmul_dtype"):
        if (recipe := getattr(config.train, key)) != "compute":
            require_fp8(device, recipe, f"train.{key}")
    if config.train.corruption_check_every_steps:
        from llmsys.train.corruption_check import require_comparable_gradients

        require_comparable_gradients(config, device)
    _check_device(config, device.type)


def _check_device(config: RunConfig, device: str) -> None:
    if device != "cpu" and config.model.dropout.attention:
        raise RefusedError(
            "model.dropout.attention is compared on CPUs only, since kernels of accelerators draw "
            "their own masks"
        )
    if (
        device == "cpu"
        and isinstance(config.engine, DeepSpeedEngineConfig)
        and config.train.precision == "fp16"
    ):
        raise RefusedError(
            "train.precision=fp16 under engine.kind=deepspeed needs a device with fp16"
        )
    if (
        device == "cpu"
        and isinstance(config.engine, AccelerateEngineConfig)
        and config.train.precision == "fp16"
    ):
        raise RefusedError(
            "train.precision=fp16 under engine.kind=accelerate needs a device with fp16"
        )


def format_refusal(error: ValidationError) -> str:
    """Return the messages of an error of the config, each with its key."""
    lines = []
    for one in error.errors():
        where = ".".join(str(part) for part in one["loc"])
        problems = one.get("ctx", {}).get("problems")
        if problems:
            lines += [f"{where}.{key}: {text}".lstrip(".") for key, text in problems]
        else:
            lines.append(f"{where}: {one['msg']}".lstrip(": "))
    return " | ".join(lines)

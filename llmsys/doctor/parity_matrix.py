"""The parity matrix: engine × layout × precision × recomputation, each legal combination once.

Legality is what the config accepts, so the matrix and the config cannot disagree. In fp32 without
recomputation every parity model is trained; each other combination takes the next one in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.run import RunConfig
from llmsys.doctor.parity_models import PARITY_MODELS, SEQUENCES, ParityModel
from llmsys.doctor.parity_reference import OPTIMIZER, SEED
from llmsys.doctor.parity_rows import GROUP_ROWS
from llmsys.errors import ConfigError, LayoutError
from llmsys.estimate.state_memory import resolve_planned_layout

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"kind": "torch", "data_parallel": "fsdp"},
    "ddp": {"kind": "torch", "data_parallel": "ddp"},
    "plain": {"kind": "torch", "data_parallel": "plain"},
    "bitwise": {"kind": "torch", "data_parallel": "fsdp"},
    "zero-0": {"kind": "deepspeed", "zero_stage": 0},
    "zero-1": {"kind": "deepspeed", "zero_stage": 1},
    "zero-2": {"kind": "deepspeed", "zero_stage": 2},
    "zero-3": {"kind": "deepspeed", "zero_stage": 3},
    "accelerate": {"kind": "accelerate"},
}
GPIPE = {"kind": "gpipe"}
INTERLEAVED = {"kind": "interleaved", "stages_per_rank": 2}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"replicate": 2},
    {"expert": 2},
    {"expert": 4},
    {"tensor": 2},
    {"context": 2},
    {"context": 2, "context_kind": "ring"},
    {"context": 4, "context_kind": "ulysses_ring"},
    {"tensor": 2, "context": 2},
    {"tensor": 2, "expert": 2},
    {"pipeline": 2},
    {"pipeline": 2, "pipeline_schedule": GPIPE},
    {"pipeline": 2, "pipeline_schedule": INTERLEAVED},
    {"pipeline": 2, "pipeline_schedule": INTERLEAVED, "expert": 2},
    {"pipeline": 2, "replicate": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "context": 2},
    {"pipeline": 2, "context": 2, "context_kind": "ring"},
    {"pipeline": 4},
    {"pipeline": 4, "pipeline_schedule": GPIPE},
    {"pipeline": 4, "pipeline_schedule": INTERLEAVED},
    {"pipeline": 4, "expert": 2},
    {"pipeline": 4, "tensor": 2},
    # Only on eight processes and more.
    {"pipeline": 2, "tensor": 2, "expert": 4},
    {"pipeline": 2, "pipeline_schedule": INTERLEAVED, "context": 2, "expert": 4},
    {"pipeline": 2, "tensor": 2, "context": 2, "expert": 4},
)
RECOMPUTE = ("none", "selective", "full", "offload")


@dataclass(frozen=True)
class ParityCase:
    """One run of the matrix. `micro_sequences` is the number of sequences in one forward pass of
    a rank.
    """

    ranks: int
    engine: str
    layout: tuple[tuple[str, Any], ...]
    precision: str
    recompute: str
    parity_model: ParityModel
    micro_sequences: int

    @property
    def placement(self) -> str:
        """Ranks, engine and layout."""
        values = (
            str(size["kind"]) if isinstance(size, dict) else f"{axis}={size}"
            for axis, size in self.layout
        )
        return " ".join([f"{self.ranks}", self.engine, *values])

    @property
    def title(self) -> str:
        """Every choice of the case, for messages."""
        return (
            f"{self.placement}, {self.precision}, recompute={self.recompute}, "
            f"{self.parity_model.name}"
        )

    def build_run_config(self) -> RunConfig:
        """Return the case as the config of a run.

        Raises:
            ValidationError, LayoutError, ConfigError: the combination is illegal.
        """
        train = {
            "precision": self.precision,
            "activation_checkpoint": self.recompute,
            "threads_per_process": 1,
        }
        if self.engine == "bitwise":
            train["reproducibility"] = "bitwise"
        length, windows = self.parity_model.length, self.parity_model.has_windows
        batch: dict[str, Any] = {"sequence_length": length, "sequences": SEQUENCES}
        if self.parity_model.model.mixes_documents:
            batch["attention_scope"] = "window"
        batch |= (
            {"micro_sequences": self.micro_sequences}
            if windows
            else {"num_length_buckets": len(GROUP_ROWS)}
        )
        config = RunConfig.model_validate(
            {
                "model": self.parity_model.model,
                "run": {"seed": SEED},
                "batch": batch,
                "objective": self.parity_model.objective,
                "optimizer": OPTIMIZER,
                "engine": ENGINES[self.engine],
                "layout": dict(self.layout),
                "launch": {"processes": self.ranks},
                "train": {**train, "tokens": 10 * length * SEQUENCES},
            }
        )
        layout = resolve_planned_layout(config)
        if layout.world_size != self.ranks:
            raise LayoutError(f"{self.placement} takes {layout.world_size} ranks")
        if not windows:
            if self.engine == "bitwise":
                require_ranks(self.ranks, list_micro_batch_counts(config.batch, windows=False))
            return config
        share = SEQUENCES // layout.data_parallel_size
        if SEQUENCES % layout.data_parallel_size or share % self.micro_sequences:
            raise LayoutError(
                f"{self.micro_sequences} sequences do not divide the {share} of a rank"
            )
        return config


def iter_parity_cases(
    ranks: int,
    precisions: tuple[str, ...],
    engines: tuple[str, ...] = tuple(ENGINES),
    parity_models: tuple[ParityModel, ...] = PARITY_MODELS,
) -> Iterator[ParityCase]:
    """List the legal combinations on a number of ranks.

    Args:
        ranks: number of ranks.
        precisions: precisions; every parity model is trained in the first one.
        engines: keys of `ENGINES`.
        parity_models: models to train.

    Yields:
        Cases, equal layouts once.
    """
    next_model, seen = 0, set()
    for engine, layout in product(engines, LAYOUTS):
        # Several entries of LAYOUTS may resolve to the same layout.
        if (key := _find_layout_key(ranks, engine, layout, parity_models)) is None or key in seen:
            continue
        seen.add(key)
        for precision, recompute in product(precisions, RECOMPUTE):
            plain = (precision, recompute) == (precisions[0], "none")
            legal_cases = [
                case
                for parity_model in parity_models
                if (
                    case := _find_legal_case(
                        ranks, engine, layout, precision, recompute, parity_model
                    )
                )
                is not None
            ]
            if legal_cases:
                yield from legal_cases if plain else [legal_cases[next_model % len(legal_cases)]]
                next_model += 1


def _find_layout_key(
    ranks: int, engine: str, layout: dict[str, Any], parity_models: tuple[ParityModel, ...]
) -> tuple[str, str] | None:
    """Return engine and resolved layout, or None if illegal: replicas of one shard are what DDP
    always has.
    """
    cases = [
        _find_legal_case(ranks, engine, layout, "fp32", "none", parity_model)
        for parity_model in parity_models
    ]
    found = next((case for case in cases if case is not None), None)
    return (
        None if found is None else (engine, str(resolve_planned_layout(found.build_run_config())))
    )


def _find_legal_case(
    ranks: int,
    engine: str,
    layout: dict[str, Any],
    precision: str,
    recompute: str,
    parity_model: ParityModel,
) -> ParityCase | None:
    """Return the case with the first legal micro-batch size, preferably 2, or None."""
    for micro in (2, 1, 4):
        case = ParityCase(
            ranks, engine, tuple(layout.items()), precision, recompute, parity_model, micro
        )
        try:
            case.build_run_config()
        except (ValidationError, LayoutError, ConfigError):
            continue
        return case
    return None

"""The matrix of parity: engine × layout × precision × recomputation, each legal combination once.

Legality is what the config refuses, so the matrix and the config cannot disagree. In fp32 without recomputation every
subject is tried; of the other combinations each takes the next subject in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from llmsys.config.bitwise import micro_batches, require_ranks
from llmsys.config.run import RunConfig
from llmsys.doctor.oracle import OPTIMIZER, SEED
from llmsys.doctor.rows import GROUP_ROWS
from llmsys.doctor.subjects import SEQUENCES, SUBJECTS, Subject
from llmsys.errors import ConfigError, LayoutError
from llmsys.estimate.memory import planned_layout

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"kind": "torch"},
    "ddp": {"kind": "torch", "data_parallel": "ddp"},
    "bitwise": {"kind": "torch"},
    "zero-0": {"kind": "deepspeed", "zero_stage": 0},
    "zero-1": {"kind": "deepspeed", "zero_stage": 1},
    "zero-2": {"kind": "deepspeed", "zero_stage": 2},
    "zero-3": {"kind": "deepspeed", "zero_stage": 3},
    "accelerate": {"kind": "accelerate"},
}
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"replicate": 2},
    {"expert": 2},
    {"expert": 4},
    {"tensor": 2},
    {"context": 2},
    {"tensor": 2, "context": 2},
    {"tensor": 2, "expert": 2},
)
RECOMPUTE = ("none", "selective", "block")


@dataclass(frozen=True)
class Cell:
    """One run of the matrix. `micro` are the sequences of one forward pass of a rank."""

    ranks: int
    engine: str
    layout: tuple[tuple[str, int], ...]
    precision: str
    recompute: str
    subject: Subject
    micro: int

    @property
    def where(self) -> str:
        """Ranks, engine and layout."""
        return " ".join([f"{self.ranks}", self.engine, *(f"{axis}={size}" for axis, size in self.layout)])

    @property
    def title(self) -> str:
        """All of it, for messages."""
        return f"{self.where}, {self.precision}, recompute={self.recompute}, {self.subject.name}"

    def config(self) -> RunConfig:
        """The cell as a run would be configured. Raises ValidationError or LayoutError for what is illegal."""
        train = {"precision": self.precision, "recompute": self.recompute, "threads_per_process": 1}
        if self.engine == "bitwise":
            train["reproducibility"] = "bitwise"
        length, windows = self.subject.length, self.subject.has_windows
        batch: dict[str, int] = {"sequence_length": length, "sequences": SEQUENCES}
        batch |= {"micro_sequences": self.micro} if windows else {"length_groups": len(GROUP_ROWS)}
        config = RunConfig.model_validate(
            {
                "model": self.subject.model,
                "run": {"seed": SEED},
                "batch": batch,
                "optimizer": OPTIMIZER,
                "engine": ENGINES[self.engine],
                "layout": dict(self.layout),
                "launch": {"processes": self.ranks},
                "train": {**train, "tokens": 10 * length * SEQUENCES},
            }
        )
        layout = planned_layout(config)
        if layout.world_size != self.ranks:
            raise LayoutError(f"{self.where} takes {layout.world_size} ranks")
        if not windows:
            if self.engine == "bitwise":
                require_ranks(self.ranks, micro_batches(config.batch, windows=False))
            return config
        share = SEQUENCES // layout.data_ranks
        if SEQUENCES % layout.data_ranks or share % self.micro:
            raise LayoutError(f"{self.micro} sequences do not divide the {share} of a rank")
        return config


def matrix(
    ranks: int,
    precisions: tuple[str, ...],
    engines: tuple[str, ...] = tuple(ENGINES),
    subjects: tuple[Subject, ...] = SUBJECTS,
) -> Iterator[Cell]:
    """Every legal cell on so many ranks."""
    turn, seen = 0, set()
    for engine, layout in product(engines, LAYOUTS):
        if (key := _fitted(ranks, engine, layout, subjects)) is None or key in seen:
            continue
        seen.add(key)
        for precision, recompute in product(precisions, RECOMPUTE):
            plain = (precision, recompute) == (precisions[0], "none")
            made = [
                cell
                for subject in subjects
                if (cell := _legal(ranks, engine, layout, precision, recompute, subject)) is not None
            ]
            if made:
                yield from made if plain else [made[turn % len(made)]]
                turn += 1


def _fitted(ranks: int, engine: str, layout: dict[str, int], subjects: tuple[Subject, ...]) -> tuple[str, str] | None:
    """Engine and layout as they come out: replicas of one shard are what DDP always has."""
    cells = [_legal(ranks, engine, layout, "fp32", "none", subject) for subject in subjects]
    found = next((cell for cell in cells if cell is not None), None)
    return None if found is None else (engine, str(planned_layout(found.config())))


def _legal(
    ranks: int, engine: str, layout: dict[str, int], precision: str, recompute: str, subject: Subject
) -> Cell | None:
    """The cell with the smaller of the micro-batches that the layout allows, two of them where it can."""
    for micro in (2, 1, 4):
        cell = Cell(ranks, engine, tuple(layout.items()), precision, recompute, subject, micro)
        try:
            cell.config()
        except (ValidationError, LayoutError, ConfigError):
            continue
        return cell
    return None

"""Read rows of reports that no table of the project used before, and draw the reports into halves.

Reads two draws of tests/data/estimate: reports.yaml and expert_reports.yaml (public facts, each
report with its address) with report_split.yaml and expert_report_split.yaml (the halves). Constants
may be fitted on the tuning halves; the others are priced alone.

Invariants:
- A report is in one half with all its rows: rows of one report share its machines and software.
- The halves are those of the seed, so nobody chose them.
- What the held half of an earlier draw says is not tuned on when a later one is priced.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmsys.config.loading.load import load_model_config
from llmsys.errors import ConfigError
from llmsys.estimate.flops import count_flops
from tools.bench.fits.published_row import DATA, MODELS, ROOT, PublishedRow, list_run_words

CLUSTERS = MODELS.parent / "clusters"
Half = Literal["tuning", "held_out", "shown"]


@dataclass(frozen=True)
class ReportDraw:
    """Reports that were drawn into halves together: what the draw is called, and its files."""

    title: str
    reports: Path
    split: Path


FIRST_DRAW = ReportDraw("29 November", DATA / "reports.yaml", DATA / "report_split.yaml")
EXPERT_DRAW = ReportDraw(
    "30 November", DATA / "expert_reports.yaml", DATA / "expert_report_split.yaml"
)
DRAWS = (FIRST_DRAW, EXPERT_DRAW)


class ReportRow(BaseModel):
    """One measured step, with what its report says of the run."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    model: str = Field(min_length=1)  # model/NAME, or a file of data/models
    overrides: tuple[str, ...] = ()  # sizes of the model
    gpus: int = Field(ge=1)
    layout: str = Field(min_length=1)
    length: int = Field(ge=1)  # tokens of a sequence
    sequences: int = Field(ge=1)  # of a step
    micro: int = Field(ge=1)  # sequences of a forward pass of a rank
    recompute: Literal["none", "selective", "full"] = "none"
    precision: Literal["bf16", "fp16"] = "bf16"
    matmul_dtype: str | None = None
    device: str | None = None
    cluster: str | None = None  # a file of data/clusters
    program: str
    # Why it is priced no more: what its report does not say, although its time depends on it.
    left_out: str = ""
    # The measured time is one of these.
    seconds: float | None = Field(None, gt=0)  # of a step
    tokens_per_second: float | None = Field(None, gt=0)  # of one device
    tflops: float | None = Field(None, gt=0)  # of one device, by `operations`
    operations: Literal["full", "causal"] = "full"

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        times = ("seconds", "tokens_per_second", "tflops")
        if sum(getattr(self, name) is not None for name in times) != 1:
            raise ValueError(f"give one of {', '.join(times)}")
        if (self.device is None) == (self.cluster is None):
            raise ValueError("give device or cluster")
        return self

    @property
    def model_words(self) -> list[str]:
        """CONFIG and its overrides."""
        if self.model.startswith("model/"):
            return [self.model, *self.overrides]
        return [str((MODELS / f"{self.model}.yaml").relative_to(ROOT)), *self.overrides]

    def build_published_row(self, report: str) -> PublishedRow:
        """Return the command and the measured seconds of a step.

        Args:
            report: name of the report, which is the source of the row.

        Returns:
            The row.
        """
        words = list_run_words(
            self.model_words,
            self.length,
            self.sequences,
            micro=self.micro,
            recompute=self.recompute,
            precision=self.precision,
        )
        words += ["--program", self.program, "--layout", self.layout]
        if self.device is not None:
            words += ["--device", self.device]
        else:
            words += ["--cluster", str((CLUSTERS / f"{self.cluster}.yaml").relative_to(ROOT))]
        words += ["--gpus", str(self.gpus)]
        words += ["--matmul-dtype", self.matmul_dtype] if self.matmul_dtype else []
        seconds = self._compute_seconds()
        return PublishedRow(f"{report} {self.name}", report, tuple(words), seconds)

    def _compute_seconds(self) -> float:
        if self.seconds is not None:
            return self.seconds
        if self.tokens_per_second is not None:
            return self.sequences * self.length / (self.gpus * self.tokens_per_second)
        assert self.tflops is not None, "the model has one of three times"
        config, *overrides = self.model_words
        place = config if config.startswith("model/") else str(ROOT / config)
        model = load_model_config(place, overrides)
        counted = count_flops(model, self.length, self.sequences, self.operations)
        return counted.forward_backward / (self.gpus * self.tflops * 1e12)


class Report(BaseModel):
    """A report: what it is, where it is, and its rows."""

    model_config = ConfigDict(extra="forbid")
    title: str = Field(min_length=1)
    url: str = Field(pattern=r"^https://")
    note: str = ""
    rows: tuple[ReportRow, ...] = Field(min_length=1)


class ReportSplit(BaseModel):
    """The halves, and the seed that drew them."""

    model_config = ConfigDict(extra="forbid")
    seed: int
    # Reports whose errors were known before the draw can only be tuned on.
    known: tuple[str, ...]
    tuning: tuple[str, ...]
    held_out: tuple[str, ...]
    # Priced once before the draw: neither drawn nor tuned on.
    shown: tuple[str, ...] = ()


def load_reports(path: Path = FIRST_DRAW.reports) -> dict[str, Report]:
    """Load the reports by name.

    Args:
        path: YAML file.

    Returns:
        The validated reports.

    Raises:
        ConfigError: a report or a row is wrong; it is named.
    """
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: _build_report(name, value, path) for name, value in values.items()}


def _build_report(name: str, value: Any, path: Path) -> Report:
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = list(first["loc"])
        if len(place) > 1 and place[0] == "rows":
            row = value["rows"][place[1]]
            titled = row.get("name", place[1]) if isinstance(row, Mapping) else place[1]
            place[:2] = [f"row {titled!r}"]
        where = ".".join(map(str, place)) or "the report"
        raise ConfigError(
            f"{path.name}: {name}: {where}: {first['msg']}. Correct that row; ReportRow in "
            "tools/bench/fits/report_rows.py says what each field means."
        ) from None


@cache
def load_report_split(path: Path = FIRST_DRAW.split) -> ReportSplit:
    """Load the halves.

    Args:
        path: YAML file.

    Returns:
        The committed draw.
    """
    return ReportSplit.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def draw_report_split(
    reports: Mapping[str, Report],
    seed: int,
    known: Iterable[str] = (),
    shown: Iterable[str] = (),
) -> ReportSplit:
    """Draw the reports into halves: those with mixtures of experts, and the others, each in two.

    Args:
        reports: the reports by name.
        seed: of the draw.
        known: reports whose errors were known before, which go to the tuning half.
        shown: reports that were priced before, which go to no half.

    Returns:
        The halves; of an odd number the tuning half has one more.
    """
    tuning: list[str] = []
    held_out: list[str] = []
    for is_mixture in (True, False):
        group = sorted(
            name
            for name, one in reports.items()
            if name not in shown and has_experts(one) == is_mixture
        )
        drawn = [name for name in group if name not in known]
        random.Random(seed).shuffle(drawn)
        ordered = [name for name in group if name in known] + drawn
        half = (len(ordered) + 1) // 2
        tuning += ordered[:half]
        held_out += ordered[half:]
    return ReportSplit(
        seed=seed,
        known=tuple(sorted(known)),
        tuning=tuple(sorted(tuning)),
        held_out=tuple(sorted(held_out)),
        shown=tuple(sorted(shown)),
    )


def has_experts(report: Report) -> bool:
    """Return whether a row of the report is a mixture of experts.

    Args:
        report: the report.

    Returns:
        True for one such row or more.
    """
    for row in report.rows:
        config, *overrides = row.model_words
        place = config if config.startswith("model/") else str(ROOT / config)
        if load_model_config(place, overrides).moe is not None:
            return True
    return False


def list_report_rows(half: Half, draws: Sequence[ReportDraw] = DRAWS) -> list[PublishedRow]:
    """List the rows of a half.

    Args:
        half: tuning, held_out, or shown.
        draws: whose.

    Returns:
        Rows with their commands, in the order of the files.
    """
    return [
        row.build_published_row(name)
        for draw in draws
        for name, report in load_reports(draw.reports).items()
        if name in getattr(load_report_split(draw.split), half)
        for row in report.rows
        if not row.left_out
    ]

"""The record of an ablation, `ablation.json`: what is done, and the results.

Reads and writes it. It is written whole after each step, so that a killed ablation goes on.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmsys.ablation.differences import Difference
from llmsys.ablation.plan import (
    BASE,
    HELDOUT_SECTIONS,
    AblationPlan,
    describe_choices,
    list_variant_changes,
)
from llmsys.config.data import CrawlConfig
from llmsys.config.run import BATCH_TRAJECTORY, TRAIN_TRAJECTORY
from llmsys.errors import ConfigError, DataError
from llmsys.log import redact_values
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.stored_formats import ABLATION, require_version
from llmsys.train.run_settings import list_changes

RECORD = "ablation.json"
# Sections that are part of it as a whole.
_RECIPE = ("model", "objective", "loss", "optimizer", "schedule", "factors")


class _Part(BaseModel):
    """A part of the record."""

    model_config = ConfigDict(extra="forbid")


class PreparedSet(_Part):
    """A held-out set.

    Attributes:
        documents: Its documents.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Tokens of them.
        left_out: Held-out pages that it lacks, because the crawl has copies of them.
        fingerprint: Fingerprint of its dataset.
    """

    documents: int
    text_bytes: int
    tokens: int
    left_out: int
    fingerprint: str


class PreparedVariant(_Part):
    """The dataset of a variant.

    Attributes:
        documents: Documents that remain, held-out ones too.
        text_bytes: UTF-8 bytes of their texts.
        train_tokens: Tokens that are trained on.
        passes: Tokens of the budget for each of them.
        fingerprint: Fingerprint of the dataset.
    """

    documents: int
    text_bytes: int
    train_tokens: int
    passes: float
    fingerprint: str


class Score(_Part):
    """A trained model on a held-out set."""

    bits_per_byte: float
    loss: float
    evaluated_tokens: int
    evaluated_bytes: int


class ScoredRun(_Part):
    """A run and its scores.

    Attributes:
        fingerprints: Fingerprints of the dataset that it was trained on ("") and of each set.
        scores: Score by held-out set.
    """

    fingerprints: dict[str, str]
    scores: dict[str, Score]


class VariantRecord(_Part):
    """A variant: its choices, and its changes as [value in the base, value here] by key."""

    choices: dict[str, Any]
    changes: dict[str, list[Any]]


class AblationRecord(_Part):
    """The record of an ablation.

    Attributes:
        shared: What all variants have in common: model, recipe, tokenizer and held-out pages.
        variants: The variants by name, the base first.
        sets: Held-out sets by name.
        datasets: Datasets by variant.
        runs: Runs by variant and seed.
        differences: Differences to the base, in bits per byte, by variant and set.
    """

    format_version: int = ABLATION.version
    shared: dict[str, Any]
    variants: dict[str, VariantRecord]
    sets: dict[str, PreparedSet] = {}
    datasets: dict[str, PreparedVariant] = {}
    runs: dict[str, dict[str, ScoredRun]] = {}
    differences: dict[str, dict[str, Difference]] = {}

    def get_scores(self, name: str, heldout: str) -> dict[int, float]:
        """Return the bits per byte of a variant on a held-out set, by seed."""
        return {
            int(seed): run.scores[heldout].bits_per_byte
            for seed, run in self.runs.get(name, {}).items()
            if heldout in run.scores
        }


def open_record(plan: AblationPlan) -> AblationRecord:
    """Return the record of an ablation that goes on, or a new one.

    Args:
        plan: The ablation.

    Returns:
        The record, with the variants of the plan first and only these.

    Raises:
        ConfigError: The folder has an ablation of another base, or a variant of it has changed.
        DataError: The record is damaged.
    """
    path = plan.folder / RECORD
    now = _build_record(plan)
    if not path.exists():
        return now
    before = load_record(path)
    if changes := list_changes(before.shared, now.shared):
        listed = "; ".join(f"{key} was {old}, now {new}" for key, old, new in changes[:4])
        raise ConfigError(
            f"{plan.folder} holds another ablation: {listed}. Give another folder with --output, "
            "or restore it."
        )
    for name, variant in now.variants.items():
        known = before.variants.get(name)
        if known is not None and known.choices != variant.choices:
            key, old, new = list_changes(known.choices, variant.choices)[0]
            raise ConfigError(
                f"{plan.folder} has a variant {name} in which data.{key} was {old}, and it is "
                f"{new} now. Give the file another name, or give another folder with --output."
            )
    return now.model_copy(update={"runs": before.runs, "datasets": before.datasets})


def load_record(path: Path) -> AblationRecord:
    """Load the record of an ablation.

    Args:
        path: The file.

    Returns:
        The record.

    Raises:
        FormatError: It has another version.
        DataError: It is damaged.
    """
    remedy = "Remove it, and give the same command again: datasets and runs are kept"
    try:
        values = json.loads(path.read_bytes())
        require_version(ABLATION, values, path)
        return AblationRecord.model_validate(values)
    except (ValueError, AttributeError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"{path} is damaged: {first}. {remedy}.") from None


def save_record(record: AblationRecord, folder: Path) -> None:
    """Write the record of an ablation.

    Args:
        record: The record.
        folder: Folder of the ablation.

    Raises:
        DataError: It cannot be written.
    """
    text = record.model_dump_json(indent=1)
    write_bytes_atomically(folder / RECORD, text.encode() + b"\n")


def _build_record(plan: AblationPlan) -> AblationRecord:
    base = plan.base
    assert isinstance(base.data, CrawlConfig)
    # Not its precision, which `auto` leaves to the device: each run folder has that.
    recipe = base.model_dump(
        mode="json",
        include={
            **dict.fromkeys(
                ("model", "objective", "loss", "optimizer", "schedule", "factors"), True
            ),
            "batch": set(BATCH_TRAJECTORY),
            "train": set(TRAIN_TRAJECTORY),
        },
    )
    shared = {
        "data": base.data.model_dump(mode="json", include={*HELDOUT_SECTIONS, "tokens"}),
        "tokenizer": base.tokenizer.model_dump(mode="json"),
        "evaluation": base.evaluation.model_dump(mode="json"),
        "recipe": recipe | {"tokens_per_step": base.batch.tokens_per_step},
        "heldout": dict(plan.heldout),
    }
    variants = {}
    for name, config in plan.variants.items():
        assert isinstance(config.data, CrawlConfig)
        variants[name] = VariantRecord(
            choices=redact_values(describe_choices(config.data)),
            changes=redact_values(list_variant_changes(base.data, config.data)),
        )
    assert next(iter(variants)) == BASE
    return AblationRecord(shared=redact_values(shared), variants=variants)

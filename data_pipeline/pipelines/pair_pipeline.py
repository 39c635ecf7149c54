"""Stages from files of lines to pairs of token sequences.

    read ─ tokenizer ─ encode ─ manifest

Reads the `data` and `tokenizer` sections of a run. Writes documents/ (both texts of every pair),
tokens/ (both token sequences) and dropped/ (unusable lines with their reasons).

Invariants:
    - The bytes do not depend on the number of workers or on interruptions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from llmsys.config.data import LabelledTextConfig, PairsConfig
from llmsys.config.tokenizer import (
    FileTokenizerConfig,
    NoTokenizer,
    PythonTokenizerConfig,
    TokenizerConfig,
)
from llmsys.data_pipeline.core.staging import find_output, get_write_path
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pairs.encode import PairLengthLimits, encode_pairs
from llmsys.data_pipeline.pairs.read import read_pairs
from llmsys.data_pipeline.pairs.train_tokenizer import train_pair_tokenizer
from llmsys.data_pipeline.pipelines.copy_tokenizer import build_copy_task
from llmsys.data_pipeline.pipelines.stage_code import PAIR_STAGES, compute_code_version
from llmsys.data_pipeline.tokenize.tokenizer_files import list_tokenizer_files
from llmsys.errors import DataError
from llmsys.log import get_logger

SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")

_log = get_logger(__name__)


@dataclass
class PairStageRecords:
    """Records of each stage. `tokenizer` and `encoded` stay empty if the preparation stops
    before them.
    """

    files: dict[str, list[tuple[Path, ...]]]
    read: dict[str, list[TaskRecord]] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    tokenizer: TaskRecord | None = None
    encoded: dict[str, list[TaskRecord]] = field(default_factory=dict)


class PairPipeline:
    """Stages of one dataset of pairs, in order. Each method is one stage."""

    def __init__(
        self,
        data: PairsConfig | LabelledTextConfig,
        tokenizer: TokenizerConfig,
        runner: StageRunner,
    ) -> None:
        self.data, self.tokenizer, self.runner = data, tokenizer, runner
        self.folder = data.folder

    def run_stages(self, until: Literal["documents", "tokenizer", "tokens"]) -> PairStageRecords:
        """Run the stages up to `until`. Raise DataError if a file is missing or invalid, or no
        pair of it is usable.
        """
        outcome = PairStageRecords(_list_files(self.data))
        outcome.read = self._run_read_stage(outcome.files)
        outcome.labels = self._resolve_labels(outcome)
        if until != "documents":
            outcome.tokenizer = self._run_tokenizer_stage(outcome.read["train"])
        if until == "tokens" and outcome.tokenizer is not None:
            outcome.encoded = self._run_encode_stage(
                outcome.read, outcome.tokenizer, outcome.labels
            )
        return outcome

    def _run_stage(self, name: str, tasks: Sequence[Task], unit: str) -> Sequence[TaskRecord]:
        return self.runner.run_stage(
            name, tasks, unit=unit, code=compute_code_version(PAIR_STAGES[name])
        )

    def _run_read_stage(
        self, files: dict[str, list[tuple[Path, ...]]]
    ) -> dict[str, list[TaskRecord]]:
        labels = self.data.labels if isinstance(self.data, LabelledTextConfig) else None
        tasks = []
        for split, number, paths in _iter_numbered_files(files):
            name = f"{split}-{number:05d}"
            outputs = [f"documents/{name}.arrow", f"dropped/{name}.lines.arrow"]
            job = partial(
                read_pairs,
                files=paths,
                output=get_write_path(self.folder, outputs[0]),
                dropped=get_write_path(self.folder, outputs[1]),
                labels=labels,
            )
            digests = [self.runner.journal.get_input_digest(path) for path in paths]
            depends_on = [[str(path) for path in paths], digests, labels]
            tasks.append(Task(f"read/{name}", depends_on, outputs, job, 1))
        records = iter(self._run_stage("read", tasks, "file"))
        read = {split: [next(records) for _ in files[split]] for split in files}
        for split, found in read.items():
            if not any(sum(record.result["rows"]) for record in found):
                raise DataError(_describe_empty_split(split, files[split], found))
        return read

    def _resolve_labels(self, outcome: PairStageRecords) -> tuple[str, ...] | None:
        if not isinstance(self.data, LabelledTextConfig):
            return None
        found = {
            split: sorted(
                {
                    label
                    for record in records
                    for label, count in record.result["labels"].items()
                    if count
                }
            )
            for split, records in outcome.read.items()
        }
        labels = self.data.labels or tuple(found["train"])
        for split, names in found.items():
            if strange := [name for name in names if name not in labels]:
                raise DataError(
                    f"{split} texts have the label {strange[0]!r}, but the labels are "
                    f"{', '.join(labels)}. Correct the file, or list every label in data.labels."
                )
        return labels

    def _run_tokenizer_stage(self, read: list[TaskRecord]) -> TaskRecord:
        if isinstance(self.tokenizer, FileTokenizerConfig | PythonTokenizerConfig):
            return self._run_stage(
                "tokenizer", [build_copy_task(self.runner, self.folder, self.tokenizer)], "file"
            )[0]
        assert not isinstance(self.tokenizer, NoTokenizer)  # a config of texts has one
        outputs = [f"tokenizer/{name}" for name in list_tokenizer_files(self.tokenizer)]
        folder, config = get_write_path(self.folder, "tokenizer"), self.tokenizer
        settings = config.model_dump(mode="json")
        # Labels are no text to learn a vocabulary from.
        sides = ("source",) if isinstance(self.data, LabelledTextConfig) else ("source", "target")
        sources = [find_output(self.folder, record.outputs[0].name) for record in read]
        job = partial(
            train_pair_tokenizer, sources=sources, folder=folder, config=config, sides=sides
        )
        rows = sum(sum(record.result["rows"]) for record in read)
        depends_on = [settings, [record.digests[0] for record in read], sides]
        return self._run_stage(
            "tokenizer", [Task("tokenizer/model", depends_on, outputs, job, rows)], "pair"
        )[0]

    def _run_encode_stage(
        self,
        read: dict[str, list[TaskRecord]],
        tokenizer: TaskRecord,
        labels: tuple[str, ...] | None,
    ) -> dict[str, list[TaskRecord]]:
        tasks, counts = [], dict.fromkeys(read, 0)
        for split, records in read.items():
            limits = self._build_limits(split)
            for record in records:
                for batches in _group_batches(record.result["rows"], self.data.shard_pairs):
                    number = counts[split]
                    counts[split] += 1
                    names = [
                        f"tokens/{split}-{number:05d}.arrow",
                        f"tokens/{split}_source-{number:05d}.arrow",
                    ]
                    outputs = [*names, f"dropped/{split}-{number:05d}.tokens.arrow"]
                    job = partial(
                        encode_pairs,
                        source=find_output(self.folder, record.outputs[0].name),
                        batches=batches,
                        outputs=tuple(get_write_path(self.folder, name) for name in outputs),
                        model=find_output(self.folder, tokenizer.outputs[0].name),
                        labels=labels,
                        limits=limits,
                    )
                    depends_on = [
                        record.digests[0],
                        list(batches),
                        tokenizer.result["fingerprint"],
                        labels,
                    ]
                    depends_on.append(tokenizer.result["eos_id"])
                    depends_on += [limits.max_length, limits.cut]
                    rows = sum(record.result["rows"][batch] for batch in batches)
                    tasks.append(
                        Task(f"encode/{split}-{number:05d}", depends_on, outputs, job, rows)
                    )
        done = iter(self._run_stage("encode", tasks, "pair"))
        encoded = {split: [next(done) for _ in range(count)] for split, count in counts.items()}
        if cut := sum(record.result["cut"] for found in encoded.values() for record in found):
            _log.warning(
                "%d texts were truncated to data.max_tokens=%d tokens", cut, self.data.max_tokens
            )
        return encoded

    def _build_limits(self, split: str) -> PairLengthLimits:
        if isinstance(self.data, LabelledTextConfig):
            return PairLengthLimits(self.data.max_tokens, cut=True)
        # Held-out pairs are scored as they are, whatever their length.
        return PairLengthLimits(self.data.max_tokens if split == "train" else 0, cut=False)


def _list_files(data: PairsConfig | LabelledTextConfig) -> dict[str, list[tuple[Path, ...]]]:
    """List the files of each split, in pairs or alone. Raise DataError if a split has none."""
    files: dict[str, list[tuple[Path, ...]]]
    if isinstance(data, LabelledTextConfig):
        files = {
            "train": [(path,) for path in data.inputs],
            "heldout": [(path,) for path in data.heldout_inputs],
        }
        names = {"train": "inputs", "heldout": "heldout_inputs"}
    else:
        train, heldout = (
            zip(data.source, data.target, strict=True),
            zip(data.heldout_source, data.heldout_target, strict=True),
        )
        files = {"train": list(train), "heldout": list(heldout)}
        names = {"train": "source", "heldout": "heldout_source"}
    for split, name in names.items():
        if not files[split]:
            raise DataError(
                f"data.{name} is empty. Name files, such as 'data.{name}=[corpus/{split}.en.gz]'."
            )
    return files


def _iter_numbered_files(
    files: dict[str, list[tuple[Path, ...]]],
) -> Iterator[tuple[str, int, tuple[Path, ...]]]:
    for split, entries in files.items():
        for number, paths in enumerate(entries):
            yield split, number, paths


def _group_batches(rows: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield runs of record batches of at most `limit` rows; a larger batch is a run of its own."""
    run: list[int] = []
    for batch, count in enumerate(rows):
        if run and sum(rows[one] for one in run) + count > limit:
            yield run
            run = []
        run.append(batch)
    if run:
        yield run


def _describe_empty_split(
    split: str, files: Sequence[tuple[Path, ...]], records: Sequence[TaskRecord]
) -> str:
    drops: list[dict[str, Any]] = [
        drop for record in records for drop in record.result["tally"]["drops"]
    ]
    reasons = (
        ", ".join(f"{drop['documents']} by {drop['test']}" for drop in drops)
        or "the files have no lines"
    )
    named = " and ".join(str(path) for path in files[0])
    return f"no {split} pair is left of {named}: {reasons}. Give other files."

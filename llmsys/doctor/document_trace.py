"""Trace documents: list those of a step with URL and crawl record, and the steps and checkpoints
that saw a document.

Reads a run's config, its token shards and documents, its events and checkpoints; writes nothing.
Both directions are functions of (fingerprints, seed, step), so no log of what was read is needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmsys.config.run import RunConfig
from llmsys.data.dataset_mixture import MixtureWindows
from llmsys.data.fitted_windows import FittedWindows
from llmsys.data.step_batches import BucketedStepBatches, StepBatches, WindowStepBatches
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.token_split import SideColumn, TokenShards
from llmsys.errors import DataError
from llmsys.events import read_latest_events, require_events
from llmsys.storage.arrow_file import read_batches
from llmsys.train.build_objective import build_step_batches
from llmsys.train.checkpoint_load import list_complete_checkpoints
from llmsys.train.checkpoint_record import read_record
from llmsys.train.recorded_changes import load_recorded_changes
from llmsys.train.run_data import open_run_data


@dataclass(frozen=True)
class DocumentLocation:
    """A document of a source, by its index in the source's token shards."""

    source: int
    document: int


class DocumentTracer:
    """The opened data of one run. Steps are counted from 1, as in the log."""

    def __init__(self, config: RunConfig) -> None:
        """Open the training data of a run, as one rank would read them.

        Args:
            config: Config of the run. Later doublings of the batch are loaded from its folder.
        """
        self.config = config = load_recorded_changes(config)
        self.dataset = open_run_data(config, "train")
        self.steps: StepBatches = build_step_batches(
            config.model_copy(update={"batch": _build_single_rank_batch_config(config)}), 1, 0
        )

    def list_step_documents(self, step: int) -> list[dict[str, Any]]:
        """List the documents with tokens in a step: source, id, url, file, offset.

        The URL is None if the document's text no longer exists, and empty if it has none.

        Raises:
            DataError: the run has no such step.
        """
        if not 1 <= step <= self.config.num_steps:
            raise DataError(
                f"step={step} is not a step of this run, which has {self.config.num_steps}. Use 1 "
                "or more."
            )
        places = list(dict.fromkeys(self._iter_locations(step - 1)))
        found = [self._describe_document(place) for place in places]
        urls = self._read_urls({entry["id"] for entry in found})
        return [entry | {"url": urls.get(entry["id"])} for entry in found]

    def locate_document(
        self, *, url: str | None = None, document: str | None = None
    ) -> list[DocumentLocation]:
        """Locate a document in the training shards, by its URL or its id.

        Args:
            url: Its URL, as the crawl has it.
            document: Its id.

        Returns:
            One location for each copy, in the order of the sources.

        Raises:
            DataError: It is in no training shard.
        """
        asked: dict[SideColumn, str | int] = {} if document is None else {"id": document}
        if url is not None:
            # Shards store the hash of a URL; the URL itself is in the kept documents.
            asked["url_hash"] = xxhash.xxh64_intdigest(url.encode())
        places = [
            DocumentLocation(source, number)
            for source, shards in enumerate(self.dataset.sources)
            for column, value in asked.items()
            for number in shards.select_documents(column, value)
        ]
        if not places:
            folder = self.config.data.folder
            raise DataError(
                f"{url or document} is not in the training shards of {folder}. It was dropped, "
                "held out for evaluation, or never crawled: llmsys report shows dropped "
                "documents with their reason."
            )
        return places

    def list_steps_with_document(self, place: DocumentLocation, steps_done: int) -> list[int]:
        """List the steps that saw tokens of a document: at least one per epoch.

        Args:
            place: From `locate_document`.
            steps_done: The last step of the run so far.

        Returns:
            Steps in order, counted from 1.
        """
        if isinstance(self.steps, WindowStepBatches):
            count = self.config.batch.count_sequences_before(steps_done)
            numbers = _list_sequence_numbers(self.steps.windows, place, count)
            return sorted({self.config.batch.find_step(number) + 1 for number in numbers.tolist()})
        assert isinstance(self.steps, BucketedStepBatches)
        rows = (self.steps.grouping.get_step_buckets(step) for step in range(steps_done))
        return [
            step
            for step, groups in enumerate(rows, 1)
            if any(place.document in group for group in groups)
        ]

    def _iter_locations(self, step: int) -> Iterator[DocumentLocation]:
        if isinstance(self.steps, WindowStepBatches):
            for number in np.unique(self.steps.get_assignment(step)).tolist():
                yield from (
                    DocumentLocation(*place) for place in self.steps.windows.list_documents(number)
                )
        elif isinstance(self.steps, BucketedStepBatches):
            yield from (
                DocumentLocation(0, int(row))
                for group in self.steps.grouping.get_step_buckets(step)
                for row in group
            )

    def _describe_document(self, place: DocumentLocation) -> dict[str, Any]:
        lineage = self._get_shards(place.source).get_lineage(place.document)
        return {"source": self.dataset.names[place.source]} | {
            key: lineage[key] for key in ("id", "file", "offset")
        }

    def _get_shards(self, source: int) -> TokenShards:
        # The lineage of a pair is stored with its target.
        return (
            self.steps.pairs.targets
            if isinstance(self.steps, BucketedStepBatches)
            else self.dataset.sources[source]
        )

    def _read_urls(self, ids: set[str]) -> dict[str, str]:
        """Return URLs by document id, read from the documents that `prepare` kept, where these
        still exist.
        """
        found: dict[str, str] = {}
        for shards in self.dataset.sources:
            for path in sorted((shards.folder / "documents").glob("*.arrow")):
                for batch in read_batches(path):
                    names = batch.column("id").to_pylist()
                    urls = (
                        batch.column("url").to_pylist()
                        if "url" in batch.schema.names
                        else [""] * len(names)
                    )
                    found |= {
                        one: url or "" for one, url in zip(names, urls, strict=True) if one in ids
                    }
                if len(found) == len(ids):
                    return found
        return found


def _build_single_rank_batch_config(config: RunConfig) -> Any:
    """Return the batch config for one rank: the assignment of rows to ranks does not matter
    here.
    """
    return config.batch.model_copy(update={"micro_sequences": 0, "assignment": "sequential"})


def _list_sequence_numbers(
    windows: object, place: DocumentLocation, count: int
) -> NDArray[np.int64]:
    """List the sequences among the first `count` of a run that have tokens of a document."""
    if isinstance(windows, MixtureWindows):
        seen = int(windows.order.count_by_source(count)[place.source])
        local = windows.sources[place.source].list_windows_with_document(place.document, seen)
        return windows.order.get_global_numbers(place.source, local)
    assert isinstance(windows, FittedWindows | StreamWindows)
    return windows.list_windows_with_document(place.document, count)


def read_progress(run_folder: Path) -> tuple[int, set[int]]:
    """Read the progress of a run from its events.

    Args:
        run_folder: folder of the run.

    Returns:
        (steps done, steps that were skipped and changed no weight), counted from 1.

    Raises:
        DataError: the folder has no events.
    """
    events = read_latest_events(require_events(run_folder))
    done = max(
        (event["step"] for event in events if event["event"] in ("step", "checkpoint")), default=0
    )
    return int(done), {
        int(event["step"]) for event in events if event["event"] in ("bad_step", "overflow")
    }


def list_checkpoints_after(run_folder: Path, steps: Sequence[int]) -> list[str]:
    """List the existing checkpoints that were saved at or after the first of `steps`.

    Args:
        run_folder: folder of the run.
        steps: steps in order; may be empty.

    Returns:
        Names of checkpoints, oldest first.
    """
    if not steps:
        return []
    names = list_complete_checkpoints(run_folder / "checkpoints")
    return [name.name for name in names if int(read_record(name)["steps"]) >= steps[0]]

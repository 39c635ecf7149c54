"""Datasets of an ablation: one for each variant, from one extraction, and the held-out sets.

Every preparation goes on where it was stopped; a new one takes over the finished tasks of the
dataset that shares most with it.
"""

from collections.abc import Callable
from pathlib import Path

from llmsys.ablation.plan import BASE, KEPT_PAGES, PAGES, AblationPlan
from llmsys.ablation.record import AblationRecord, PreparedSet, PreparedVariant
from llmsys.config.data import CrawlConfig
from llmsys.config.run import RunConfig
from llmsys.data_pipeline.graph.quarantine import read_quarantine
from llmsys.data_pipeline.pipelines.heldout_pages import (
    WrittenPages,
    build_pages_config,
    build_unfiltered_config,
    keep_all_documents,
    write_heldout_pages,
    write_kept_pages,
)
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.pipelines.shared_work import list_shared_stages, take_over_tasks
from llmsys.dataset.manifest import Manifest
from llmsys.errors import DataError
from llmsys.log import get_logger

# Dataset of all pages, from which the held-out ones are taken.
UNFILTERED = "all_pages"

log = get_logger(__name__)


class AblationDatasets:
    """Prepares the datasets of an ablation."""

    def __init__(self, plan: AblationPlan, record: AblationRecord) -> None:
        """Fill in the datasets and the held-out sets of a record.

        Args:
            plan: The ablation.
            record: Its record; `datasets` and `sets` are replaced.
        """
        self._plan = plan
        self._record = record
        self._prepared = list[CrawlConfig]()

    def prepare_all(self, announce: Callable[[str], None]) -> None:
        """Prepare the dataset of every variant, then the held-out sets.

        Args:
            announce: Called with the heading of each preparation.

        Raises:
            DataError: A dataset cannot be made, has nothing to train on, or equals another one.
        """
        self._record.datasets.clear()
        for name in self._plan.variants:
            announce(f"prepare {name}")
            self._record.datasets[name] = self._prepare_variant(name)
        self._require_different_documents()
        announce("prepare the held-out pages")
        self._record.sets.clear()
        self._record.sets.update(self._prepare_sets())

    def _prepare_variant(self, name: str) -> PreparedVariant:
        config = self._plan.build_config(name)
        try:
            manifest = self._prepare(config, "tokens")
        except DataError as error:
            raise DataError(f"variant {name}: {error}") from error
        train, heldout = (manifest.splits[split] for split in ("train", "heldout"))
        for purpose, tokens in (("train on", train.tokens), ("hold out", heldout.tokens)):
            if not tokens:
                raise DataError(
                    f"variant {name} keeps no document to {purpose} "
                    f"({manifest.funnel[-1].documents_out} documents remain). Leave it out, "
                    "or loosen its rules."
                )
        for entry in read_quarantine(config.data.folder):
            log.error("%s: in quarantine: task %s: %s", name, entry["task"], entry["message"])
        return PreparedVariant(
            documents=train.documents + heldout.documents,
            text_bytes=train.bytes + heldout.bytes,
            train_tokens=train.tokens,
            passes=config.train.tokens / train.tokens,
            fingerprint=manifest.fingerprint,
        )

    def _prepare(self, config: RunConfig, until: str) -> Manifest:
        """Prepare a dataset, with what an earlier one of this ablation has for it."""
        data = config.data
        assert isinstance(data, CrawlConfig)
        shared = [(list_shared_stages(source, data), source) for source in self._prepared]
        stages, source = max(shared, key=lambda one: len(one[0]), default=((), data))
        if stages:
            take_over_tasks(source.folder, data.folder, stages)
        manifest = prepare_dataset(config, until)
        self._prepared.append(data)
        return manifest

    def _require_different_documents(self) -> None:
        """Raise DataError for two variants whose rules have the same effect here."""
        seen = dict[str, str]()
        for name, dataset in self._record.datasets.items():
            other = seen.setdefault(dataset.fingerprint, name)
            if other != name:
                raise DataError(
                    f"variants {other} and {name} keep the same documents with the same texts, so "
                    "their models would be equal. Leave one out. Nothing was trained."
                )

    def _prepare_sets(self) -> dict[str, PreparedSet]:
        plan = self._plan
        base = plan.get_data(BASE)
        has_urls = all(plan.get_data(name).url == base.url for name in plan.variants)
        folder = plan.get_set_folder(UNFILTERED)
        unfiltered = build_unfiltered_config(base, folder, has_urls=has_urls)
        self._prepare(plan.build_config(BASE).model_copy(update={"data": unfiltered}), "documents")
        folder = plan.folder / "heldout"
        pages = folder / f"{PAGES}.parquet"
        written = write_heldout_pages(unfiltered, base.language, pages)
        if not written.documents:
            raise DataError(
                f"none of the held-out pages can be compared on: {written.left_out} of them have "
                "copies in the crawl, on which variants may train. Raise "
                f"data.split.heldout_fraction ({base.split.heldout_fraction:g}), or give more "
                "pages."
            )
        found = {PAGES: self._prepare_pages(PAGES, pages, written)}
        kept = folder / f"{KEPT_PAGES}.parquet"
        written = write_kept_pages(base.folder, pages, kept)
        if written.documents:
            found[KEPT_PAGES] = self._prepare_pages(KEPT_PAGES, kept, written)
        else:
            log.warning("the base keeps no held-out page, so that there is no set %s", KEPT_PAGES)
        for name, path in plan.heldout.items():
            data = keep_all_documents(base, plan.get_set_folder(name))
            data = data.model_copy(update={"heldout_inputs": (path,)})
            found[name] = self._prepare_set(name, data)
        return found

    def _prepare_pages(self, name: str, pages: Path, written: WrittenPages) -> PreparedSet:
        data = build_pages_config(self._plan.get_data(BASE), pages, self._plan.get_set_folder(name))
        found = self._prepare_set(name, data)
        if (found.documents, found.text_bytes) != (written.documents, written.text_bytes):
            raise DataError(
                f"{data.folder} has {found.documents} documents of {found.text_bytes} bytes, but "
                f"{pages} has {written.documents} of {written.text_bytes}. Raise "
                "data.extract.max_page_bytes if a page is longer; else report it."
            )
        return found.model_copy(update={"left_out": written.left_out})

    def _prepare_set(self, name: str, data: CrawlConfig) -> PreparedSet:
        plan = self._plan
        changes = {"data": data, "tokenizer": plan.build_shared_tokenizer()}
        config = plan.build_config(BASE).model_copy(update=changes)
        try:
            split = (manifest := prepare_dataset(config)).splits["heldout"]
        except DataError as error:
            raise DataError(f"held-out set {name}: {error}") from error
        return PreparedSet(
            documents=split.documents,
            text_bytes=split.bytes,
            tokens=split.tokens,
            left_out=0,
            fingerprint=manifest.fingerprint,
        )

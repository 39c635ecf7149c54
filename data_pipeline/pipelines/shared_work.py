"""Begin a dataset with the finished tasks of another one.

Datasets of the same crawl whose configs differ only after extraction need its texts once. Reads
journal/ and work/ of one dataset folder; writes those of another, which has none yet.

Invariants:
    - Keys decide: a task whose inputs or settings differ runs again, whatever was taken over.
    - Files are linked where the file system can, else copied. The bytes of a part of a pack never
      change, so that a later run of either dataset harms none of the other.
    - The journal comes last: a folder without one has nothing that counts.
"""

import os
import shutil
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.core.journal import RECORDS, Journal
from llmsys.data_pipeline.core.journal_file import connect_journal
from llmsys.data_pipeline.core.staging import JOURNAL
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.pack_files import parse_packed_name

# Sections of the config that decide the results of stages which write packs.
EXTRACTION_SECTIONS = frozenset({"inputs", "heldout_inputs", "read", "url", "extract"})
FILTER_SECTIONS = EXTRACTION_SECTIONS | {"unicode", "language", "rules", "documents"}
_EXTRACTION_STAGES = ("split_inputs", "extract")
_FILTER_STAGES = (*_EXTRACTION_STAGES, "filter", "signatures")


def list_shared_stages(source: CrawlConfig, target: CrawlConfig) -> Sequence[str]:
    """List the stages whose results are the same for two configs of a dataset.

    Args:
        source: The config of the dataset that is prepared.
        target: The config of the one that begins.

    Returns:
        Names of stages that write packs, in order; none where the texts differ. Where only rules
        differ, filtered files are among them: other thresholds start from what those hold.
    """
    for sections, stages in (
        (FILTER_SECTIONS, _FILTER_STAGES),
        (FILTER_SECTIONS - {"rules"}, (*_EXTRACTION_STAGES, "filter")),
        (EXTRACTION_SECTIONS, _EXTRACTION_STAGES),
    ):
        chosen = set(sections)
        if source.model_dump(include=chosen) == target.model_dump(include=chosen):
            return stages
    return ()


def take_over_tasks(source: Path, target: Path, stages: Collection[str]) -> int:
    """Give a new dataset the finished tasks of some stages of another one.

    Args:
        source: A prepared dataset folder. Its lock is held meanwhile.
        target: The dataset folder that begins. One with a journal is left as it is.
        stages: Stages whose outputs are all in packs.

    Returns:
        The number of tasks; 0 where the target has a journal.

    Raises:
        DataError: One of the folders is in use, or cannot be written.
    """
    with lock_folder(target), lock_folder(source):
        if (target / JOURNAL).exists():
            return 0
        # a killed one may have left some
        shutil.rmtree(target / "work", ignore_errors=True)
        aside = target / f".{JOURNAL}.new"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        packs = set[str]()
        journal = Journal(source)
        for stage in stages:
            for name in journal.iter_output_names(stage):
                part = parse_packed_name(name)
                assert part is not None, f"{name} of stage {stage} is in no pack"
                packs.add(part[0])
        journal.close()
        for name in sorted(packs):
            _link_file(source / name, target / name)
        count = _copy_records(source / JOURNAL / RECORDS, aside / RECORDS, stages, packs)
        aside.rename(target / JOURNAL)
    return count


def _link_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copy2(source, target)


def _copy_records(
    source: Path, target: Path, stages: Collection[str], packs: Collection[str]
) -> int:
    """Copy a journal with the records of some stages, and with the packs that they need."""
    with closing(connect_journal(source)) as whole, closing(sqlite3.connect(target)) as own:
        whole.backup(own)
    with closing(connect_journal(target)) as journal:
        journal.execute("begin")
        marks = ", ".join("?" * len(stages))
        journal.execute(f"delete from record where stage not in ({marks})", tuple(stages))
        kept = [(name,) for name in packs]
        journal.execute("create temporary table own_pack (name text primary key)")
        journal.executemany("insert into own_pack values (?)", kept)
        # Their files are not taken over, and their packs may not be.
        journal.execute("delete from earlier")
        journal.execute("delete from pack where name not in (select name from own_pack)")
        count = int(journal.execute("select count(*) from record").fetchone()[0])
        journal.execute("commit")
        journal.execute("vacuum")
    return count

"""Stages between collected and final documents: decontamination and replacement of personal data.

    collect ─ index ─ contamination ─ matches ─ clean

Reads the sections `decontaminate` and `pii` of the config. They add no stage if they are not
configured.
"""

from collections.abc import Sequence
from functools import partial

from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NgramDecontaminationConfig, NoFuzzyMatch
from llmsys.data_pipeline.core.staging import get_write_path
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.decontaminate.ngram_index import write_ngram_index
from llmsys.data_pipeline.graph.resource_files import compute_file_digests
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.stages.clean import ContaminationInput, clean_file
from llmsys.data_pipeline.stages.find_contamination import filter_matches, write_matches

INDEX = ("work/decontamination/ngrams.arrow", "work/decontamination/items.arrow")
FUZZY_INDEX = "work/decontamination/fuzzy.arrow"
MATCHES = "work/decontamination/matches.arrow"


def run_cleaning_stages(
    data: CrawlConfig, runner: StageRunner, stage: Stage, collected: Sequence[TaskRecord]
) -> Sequence[TaskRecord]:
    """Run the configured cleaning stages.

    Args:
        data: The crawl section of a run.
        runner: The stage runner.
        stage: Runs the tasks of one stage.
        collected: Records of collecting.

    Returns:
        Records of the final documents. Outputs: documents, dropped documents and, with
        decontamination, the report.
    """
    # Without decontamination there is no report.
    reports = isinstance(data.decontaminate, NgramDecontaminationConfig)
    folders = [*_FOLDERS, (REPORTS, ".jsonl")] if reports else _FOLDERS
    contamination: Sequence[ContaminationInput | None] = [None] * len(collected)
    digests: list[str] = []
    if isinstance(data.decontaminate, NgramDecontaminationConfig):
        contamination, digests = _run_contamination_stages(
            data.decontaminate, runner, stage, collected
        )
    settings = data.model_dump(mode="json", include={"decontaminate", "pii"})
    tasks = []
    for record, found in zip(collected, contamination, strict=True):
        documents, dropped = (runner.folder / output.name for output in record.outputs[:2])
        outputs = [f"{name}/{documents.stem}{end}" for name, end in folders]
        job = partial(
            clean_file,
            source=(documents, dropped),
            outputs=[get_write_path(runner.folder, output) for output in outputs],
            made=record.result,
            contamination=found,
            config=data,
        )
        depends_on = [record.digests, digests, settings]
        tasks.append(
            Task(
                f"clean/{documents.stem}", depends_on, outputs, job, record.result["documents_rows"]
            )
        )
    return stage("clean", tasks, "document")


_FOLDERS = [("documents", ".arrow"), ("dropped", ".arrow")]
REPORTS = "decontamination"


def _run_contamination_stages(
    config: NgramDecontaminationConfig,
    runner: StageRunner,
    stage: Stage,
    collected: Sequence[TaskRecord],
) -> tuple[list[ContaminationInput | None], list[str]]:
    """Find the matches in all documents. Return their location per file, and the digests that
    decide them.
    """
    folder = runner.folder
    index = _run_index_stage(config, runner, stage)
    ngrams, items, *fuzzy = (folder / output.name for output in index.outputs)
    passages = fuzzy[0] if fuzzy else None
    digest = index.digests[0] + "".join(index.digests[2:])
    tasks = []
    for record in collected:
        source = folder / record.outputs[0].name
        output = f"work/contamination/{source.name}"
        job = partial(
            write_matches,
            source=source,
            output=folder / output,
            index=ngrams,
            digest=digest,
            fuzzy=passages,
        )
        depends_on = [record.digests[0], digest]
        tasks.append(
            Task(
                f"contamination/{source.stem}",
                depends_on,
                [output],
                job,
                record.result["documents_rows"],
            )
        )
    scanned = stage("contamination", tasks, "document")
    sources = [folder / record.outputs[0].name for record in scanned]
    job = partial(
        filter_matches, sources=sources, output=folder / MATCHES, max_documents=config.max_documents
    )
    decided_by = [[record.digests for record in scanned], config.max_documents]
    matches = stage(
        "matches", [Task("matches/all", decided_by, [MATCHES], job, len(sources))], "file"
    )[0]
    about = {"sets": index.result["sets"], "exempt": matches.result["exempt"]}
    inputs: list[ContaminationInput | None] = [
        ContaminationInput(folder / MATCHES, number, ngrams, items, passages, digest, about)
        for number in range(len(collected))
    ]
    return inputs, [*index.digests, *matches.digests]


def _run_index_stage(
    config: NgramDecontaminationConfig, runner: StageRunner, stage: Stage
) -> TaskRecord:
    settings = config.model_dump(
        mode="json", include={"sets", "ngram_words", "min_item_words", "parts", "fuzzy"}
    )
    depends_on = [settings, compute_file_digests(runner.journal, config.files)]
    has_fuzzy = not isinstance(config.fuzzy, NoFuzzyMatch)
    outputs = [*INDEX, FUZZY_INDEX] if has_fuzzy else list(INDEX)
    job = partial(
        write_ngram_index,
        grams=runner.folder / INDEX[0],
        items=runner.folder / INDEX[1],
        config=config,
        fuzzy=runner.folder / FUZZY_INDEX if has_fuzzy else None,
    )
    return stage(
        "ngram_index",
        [Task("ngram_index/all", depends_on, outputs, job, len(config.sets))],
        "set",
    )[0]

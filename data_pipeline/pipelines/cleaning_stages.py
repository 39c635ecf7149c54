"""The stages between collected documents and final ones: evaluation items out, personal data out.

    collect ─ index ─ contamination ─ matches ─ clean

Reads the sections `decontaminate` and `pii`, gives the records of the final documents. Promises: what is not asked for
adds no stage; then the collected documents are the final ones.
"""

from collections.abc import Sequence
from functools import partial

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.staging import get_place_to_write
from data_pipeline.core.task import Stage, Task
from data_pipeline.decontaminate.contamination_report import merge_summaries
from data_pipeline.decontaminate.ngram_index import write_ngram_index
from data_pipeline.graph.resource_files import compute_file_digests
from data_pipeline.graph.stage_runner import StageRunner
from data_pipeline.stages.clean import ContaminationInput, clean_file
from data_pipeline.stages.find_contamination import filter_matches, write_matches
from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NgramDecontaminationConfig, NoDecontamination
from llmsys.config.migration import to_recorded_names
from llmsys.config.pii import NoPiiReplacement
from llmsys.manifest import DecontaminationSummary

INDEX = ("work/decontamination/ngrams.arrow", "work/decontamination/items.arrow")
MATCHES = "work/decontamination/matches.arrow"


def has_cleaning(data: CrawlConfig) -> bool:
    """Whether something is taken out of collected documents."""
    return not isinstance(data.decontaminate, NoDecontamination) or not isinstance(data.pii, NoPiiReplacement)


def get_collected_names(data: CrawlConfig, shard: int) -> list[str]:
    """Return where the collected documents of a shard lie, and the dropped ones."""
    name = f"part-{shard:05d}"
    if has_cleaning(data):
        return [f"work/collected/{name}.arrow", f"work/collected/{name}.dropped.arrow"]
    return [f"documents/{name}.arrow", f"dropped/{name}.arrow"]


def run_cleaning_stages(
    data: CrawlConfig, workshop: StageRunner, stage: Stage, collected: list[TaskRecord]
) -> list[TaskRecord]:
    """Return the records of the final documents: outputs are documents, dropped, and the report of decontamination."""
    reports = isinstance(data.decontaminate, NgramDecontaminationConfig)
    if not has_cleaning(data):
        return collected
    rooms = [*_ROOMS, (REPORTS, ".jsonl")] if reports else _ROOMS
    contamination: Sequence[ContaminationInput | None] = [None] * len(collected)
    digests: list[str] = []
    if isinstance(data.decontaminate, NgramDecontaminationConfig):
        contamination, digests = _run_contamination_stages(data.decontaminate, workshop, stage, collected)
    part = to_recorded_names(data.model_dump(mode="json", include={"decontaminate", "pii"}), "data")
    tasks = []
    for record, found in zip(collected, contamination, strict=True):
        documents, dropped = (workshop.folder / output.name for output in record.outputs[:2])
        outputs = [f"{room}/{documents.stem}{end}" for room, end in rooms]
        job = partial(
            clean_file,
            source=(documents, dropped),
            outputs=[get_place_to_write(workshop.folder, output) for output in outputs],
            made=record.result,
            contamination=found,
            config=data,
        )
        decides = [record.digests, digests, part]
        tasks.append(Task(f"clean/{documents.stem}", decides, outputs, job, record.result["documents_rows"]))
    return stage("clean", tasks, "document")


_ROOMS = [("documents", ".arrow"), ("dropped", ".arrow")]
REPORTS = "decontamination"


def _run_contamination_stages(
    config: NgramDecontaminationConfig, workshop: StageRunner, stage: Stage, collected: list[TaskRecord]
) -> tuple[list[ContaminationInput | None], list[str]]:
    """Find the matches of all documents; return where those of each file are, and what decided them."""
    folder = workshop.folder
    index = _run_index_stage(config, workshop, stage)
    ngrams, items = (folder / output.name for output in index.outputs)
    tasks = []
    for record in collected:
        source = folder / record.outputs[0].name
        output = f"work/contamination/{source.name}"
        job = partial(write_matches, source=source, output=folder / output, index=ngrams, digest=index.digests[0])
        decides = [record.digests[0], index.digests[0]]
        tasks.append(Task(f"contamination/{source.stem}", decides, [output], job, record.result["documents_rows"]))
    scanned = stage("contamination", tasks, "document")
    sources = [folder / record.outputs[0].name for record in scanned]
    job = partial(filter_matches, sources=sources, output=folder / MATCHES, max_documents=config.max_documents)
    decided = [[record.digests for record in scanned], config.max_documents]
    matches = stage("matches", [Task("matches/all", decided, [MATCHES], job, len(sources))], "file")[0]
    about = {"sets": index.result["sets"], "exempt": matches.result["exempt"]}
    places: list[ContaminationInput | None] = [
        ContaminationInput(folder / MATCHES, number, ngrams, items, index.digests[0], about)
        for number in range(len(collected))
    ]
    return places, [*index.digests, *matches.digests]


def _run_index_stage(config: NgramDecontaminationConfig, workshop: StageRunner, stage: Stage) -> TaskRecord:
    part = config.model_dump(mode="json", include={"sets", "ngram_words", "min_item_words", "parts"})
    part = to_recorded_names(part, "data.decontaminate")
    decides = [part, compute_file_digests(workshop.journal, config.files)]
    job = partial(write_ngram_index, grams=workshop.folder / INDEX[0], items=workshop.folder / INDEX[1], config=config)
    return stage("index", [Task("index/all", decides, list(INDEX), job, len(config.sets))], "set")[0]


def build_decontamination_summary(final: Sequence[TaskRecord]) -> DecontaminationSummary | None:
    """Say what was found of evaluation sets, None when there were none to look for."""
    about = next((record.result["contamination"] for record in final if "contamination" in record.result), None)
    if about is None:
        return None
    return merge_summaries(about["sets"], about["exempt"], [record.result["decontamination"] for record in final])

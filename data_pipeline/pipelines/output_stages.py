"""The stage after the final documents that also writes the formats of `data.documents.export_formats`.

Reads the records of final documents, gives one record per copied file; adds no stage when no copy is asked for.

The stage behind final documents that looks for those nearest to each threshold, one file of documents a task.

Reads the records of final documents, gives the `ThresholdReport`s of the manifest, which the report shows without
reading a document.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.staging import find_output, get_place_to_write
from data_pipeline.core.task import Stage, Task
from data_pipeline.inspection.near_thresholds import (
    LanguageThresholds,
    merge_threshold_reports,
    summarize_near_thresholds,
)
from data_pipeline.stages.export_documents import export_documents
from llmsys.config.data import CrawlConfig
from llmsys.config.migration import to_recorded_names
from llmsys.threshold_report import ThresholdReport


def run_export_stage(data: CrawlConfig, stage: Stage, documents: list[TaskRecord]) -> list[TaskRecord]:
    """Return the records of the copies, format by format."""
    tasks = []
    for format in data.documents.export_formats:
        for record in documents:
            source = find_output(data.folder, record.outputs[0].name)
            output = f"documents/{Path(source).stem}.{format}"
            place = get_place_to_write(data.folder, output)
            job = partial(export_documents, source=source, output=place, format=format)
            decides = [record.digests[0], format]
            name = f"copies/{Path(output).name}"
            tasks.append(Task(name, decides, [output], job, record.result["documents_rows"]))
    return stage("copies", tasks, "document") if tasks else []


def run_threshold_stage(
    data: CrawlConfig, rules: str, stage: Stage, final: Sequence[TaskRecord], stages: Sequence[str]
) -> tuple[ThresholdReport, ...]:
    """Return the documents nearest to each threshold of `serialize_rules_by_language`; `stages` are those of the
    funnel.
    """
    language = data.language.model_dump(mode="json", include={"languages", "min_score"})
    decides = [to_recorded_names(language, "data.language"), rules]
    tasks = []
    for record in final:
        documents, dropped = (find_output(data.folder, output.name) for output in record.outputs[:2])
        output = f"work/thresholds/{documents.stem}.json"
        job = partial(
            summarize_near_thresholds,
            documents=documents,
            dropped=dropped,
            output=data.folder / output,
            language=data.language,
            rules=rules,
        )
        rows = record.result["documents_rows"] + record.result["dropped_rows"]
        tasks.append(Task(f"thresholds/{documents.stem}", [record.digests[:2], decides], [output], job, rows))
    made = stage("thresholds", tasks, "document")
    return merge_threshold_reports(
        [data.folder / one.outputs[0].name for one in made], LanguageThresholds(data.language, rules), stages
    )

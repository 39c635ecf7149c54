"""Stages after final documents: export to other formats, and the documents nearest to each threshold."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.staging import find_output, get_write_path
from data_pipeline.core.task import Stage, Task
from data_pipeline.inspection.near_thresholds import (
    LanguageThresholds,
    merge_threshold_reports,
    summarize_near_thresholds,
)
from llmsys.config.data import CrawlConfig
from llmsys.config.migration import to_recorded_names
from llmsys.threshold_report import ThresholdReport


def run_export_stage(data: CrawlConfig, stage: Stage, documents: list[TaskRecord]) -> list[TaskRecord]:
    """Write final documents in the formats of `data.documents.export_formats`; no stage if there are none.

    Args:
        data: The crawl section of a run.
        stage: Runs the tasks of one stage.
        documents: Records of the final documents.

    Returns:
        One record per exported file, ordered by format.
    """
    if not data.documents.export_formats:
        return []
    from data_pipeline.stages.export_documents import export_documents

    tasks = []
    for format in data.documents.export_formats:
        for record in documents:
            source = find_output(data.folder, record.outputs[0].name)
            output = f"documents/{Path(source).stem}.{format}"
            path = get_write_path(data.folder, output)
            job = partial(export_documents, source=source, output=path, format=format)
            depends_on = [record.digests[0], format]
            name = f"copies/{Path(output).name}"
            tasks.append(Task(name, depends_on, [output], job, record.result["documents_rows"]))
    return stage("copies", tasks, "document")


def run_threshold_stage(
    data: CrawlConfig, rules: str, stage: Stage, final: Sequence[TaskRecord], stages: Sequence[str]
) -> tuple[ThresholdReport, ...]:
    """Find the documents nearest to each threshold, one file of documents per task.

    Args:
        data: The crawl section of a run.
        rules: Rules of each language, as `serialize_rules_by_language` writes them.
        stage: Runs the tasks of one stage.
        final: Records of the final documents.
        stages: Stages of the funnel, which order the reports.

    Returns:
        Reports for the manifest, so that `llmsys report` reads no document.
    """
    # Only these language settings are thresholds.
    language = data.language.model_dump(mode="json", include={"languages", "min_score"})
    depends_on = [to_recorded_names(language, "data.language"), rules]
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
        tasks.append(Task(f"thresholds/{documents.stem}", [record.digests[:2], depends_on], [output], job, rows))
    records = stage("thresholds", tasks, "document")
    return merge_threshold_reports(
        [data.folder / record.outputs[0].name for record in records], LanguageThresholds(data.language, rules), stages
    )

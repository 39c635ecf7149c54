"""The stage behind final documents that looks for those nearest to each threshold, one file of documents a task.

Reads the records of final documents, gives the `ThresholdReport`s of the manifest, which the report shows without reading a
document.
"""

from collections.abc import Sequence
from functools import partial

from data_pipeline.inspect.borders import LanguageThresholds, merge_threshold_reports, summarize_near_thresholds
from data_pipeline.journal import TaskRecord
from data_pipeline.staging import find_output
from data_pipeline.task import Stage, Task
from llmsys.config.data import CrawlConfig
from llmsys.threshold import ThresholdReport


def run_threshold_stage(
    data: CrawlConfig, rules: str, stage: Stage, final: Sequence[TaskRecord], stages: Sequence[str]
) -> tuple[ThresholdReport, ...]:
    """Return the documents nearest to each threshold of `serialize_rules_by_language`; `stages` are those of the funnel."""
    decides = [data.language.model_dump(mode="json", include={"keep", "minimum_score"}), rules]
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
    return merge_threshold_reports([data.folder / one.outputs[0].name for one in made], LanguageThresholds(data.language, rules), stages)

"""The stage behind final documents that writes them in other formats too, when `data.documents.copies` asks for it.

Reads the records of final documents, gives one record per copied file; adds no stage when no copy is asked for.
"""

from functools import partial
from pathlib import Path

from data_pipeline.journal import TaskRecord
from data_pipeline.stages.copy import export_documents
from data_pipeline.staging import find_output, get_place_to_write
from data_pipeline.task import Stage, Task
from llmsys.config.data import CrawlConfig


def run_export_stage(data: CrawlConfig, stage: Stage, documents: list[TaskRecord]) -> list[TaskRecord]:
    """Return the records of the copies, format by format."""
    tasks = []
    for format in data.documents.copies:
        for record in documents:
            source = find_output(data.folder, record.outputs[0].name)
            output = f"documents/{Path(source).stem}.{format}"
            place = get_place_to_write(data.folder, output)
            job = partial(export_documents, source=source, output=place, format=format)
            decides = [record.digests[0], format]
            name = f"copies/{Path(output).name}"
            tasks.append(Task(name, decides, [output], job, record.result["documents_rows"]))
    return stage("copies", tasks, "document") if tasks else []

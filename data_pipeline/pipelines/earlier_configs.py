"""Give tasks the results that an earlier config made of the same input, as a start.

Reads the journal. What a task is given decides nothing: its outputs are the same without it.

Invariants:
    - An earlier result is recognized by its key, which is computed from the settings and the input
      that it would have been made from. So nothing but the journal says where it comes from.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.core.journal import EncodedJson, compute_json_digest
from llmsys.data_pipeline.core.task_record import FollowingJob, TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.pipelines.stage_code import DOCUMENT_STAGES, compute_code_version


def iter_results(runner: StageRunner, name: str) -> Iterator[TaskRecord]:
    """Yield the present result of a task, which another config may have made, then earlier ones.

    Args:
        runner: The stage runner.
        name: STAGE/ITEM.

    Yields:
        Records whose outputs are unchanged.
    """
    present = runner.earlier.find_present(name)
    if present is not None:
        yield present
    yield from runner.earlier.iter_results(name)


class EarlierFilterings:
    """Results of the stage `filter` under settings that differ in thresholds alone."""

    def __init__(self, runner: StageRunner, settings: str) -> None:
        """Find the settings of earlier configs that are near enough.

        Args:
            runner: The stage runner.
            settings: Settings of this config, as JSON in the keys of tasks.
        """
        self._runner = runner
        self._code = compute_code_version(DOCUMENT_STAGES["filter"])
        own: dict[str, Any] = json.loads(settings)
        rules = own.pop("rules")
        self._known = list[tuple[EncodedJson, str]]()
        for text in runner.earlier.save_setting("filter", settings):
            # where there were other settings alone
            from llmsys.data_pipeline.stages.changed_thresholds import compare_rules

            values: dict[str, Any] = json.loads(text)
            before = values.pop("rules")
            if values == own and compare_rules(before, rules) is not None:
                self._known.append((EncodedJson(text), before))

    def add_result(self, job: FollowingJob, extracted: TaskRecord, name: str) -> FollowingJob:
        """Give a job what an earlier config kept and dropped of the same texts.

        Args:
            job: The job that filters a block.
            extracted: Record of the extracted block.
            name: Name of the block.

        Returns:
            The job, unchanged where there is no such result.
        """
        if not self._known:
            return job
        from llmsys.data_pipeline.stages.changed_thresholds import EarlierFiltering

        task = f"filter/{name}"
        digests = extracted.digests[:1]
        keys = {
            compute_json_digest(self._code, task, [digests, settings]): rules
            for settings, rules in self._known
        }
        for record in iter_results(self._runner, task):
            if record.key in keys:
                earlier = EarlierFiltering(keys[record.key], record.result)
                files = dict(zip(("kept", "dropped"), _list_names(record), strict=True))
                return _add_arguments(job, {"earlier": earlier}, {"earlier_files": files})
        return job


def add_earlier_signatures(
    runner: StageRunner, job: FollowingJob, name: str, settings: dict[str, Any]
) -> FollowingJob:
    """Give a job the keys that an earlier config computed of a filtered block.

    Args:
        runner: The stage runner.
        job: The job that computes the keys of a block.
        name: Name of the block.
        settings: Settings of the stage, as they are in the keys of its tasks.

    Returns:
        The job, unchanged where there is no such result.
    """
    if not runner.earlier.has_results(f"{job.stage}/{name}"):
        return job
    code = compute_code_version(DOCUMENT_STAGES[job.stage])
    task = f"{job.stage}/{name}"
    sources = {
        compute_json_digest(code, task, [one.digests[0], [], settings]): one.outputs[0].name
        for one in iter_results(runner, f"filter/{name}")
    }
    for record in iter_results(runner, task):
        if record.key in sources:
            documents, *keys = _list_names(record)
            relations = job.job.paths["keys"]
            assert isinstance(relations, dict)
            files = {"source": sources[record.key], "documents": documents}
            files |= {f"keys.{one}": key for one, key in zip(relations, keys, strict=True)}
            return _add_arguments(job, {}, {"earlier": files})
    return job


def find_earlier_tokens(
    runner: StageRunner, folder: Path, name: str, settings: list[Any]
) -> Path | None:
    """Find the token rows that an earlier config wrote of a document file with the same tokenizer.

    Args:
        runner: The stage runner.
        folder: Dataset folder.
        name: Name of the document file.
        settings: What the keys of the stage have beside the documents.

    Returns:
        The encoded file; None where there is no such result.
    """
    task = f"encode/{name}"
    if not runner.earlier.has_results(task):
        return None
    code = compute_code_version(DOCUMENT_STAGES["encode"])
    documents = iter_results(runner, f"collect/{name}")
    keys = {compute_json_digest(code, task, [one.digests[0], *settings]) for one in documents}
    for record in iter_results(runner, task):
        if record.key in keys:
            return folder / record.outputs[0].name
    return None


def _list_names(record: TaskRecord) -> list[str]:
    return [output.name for output in record.outputs]


def _add_arguments(
    job: FollowingJob, own: dict[str, Any], paths: dict[str, str | dict[str, str]]
) -> FollowingJob:
    call = replace(job.job, own=job.job.own | own, paths=job.job.paths | paths)
    return replace(job, job=call)

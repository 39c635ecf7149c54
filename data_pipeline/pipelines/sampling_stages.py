"""Stages that sample encoded documents by the columns of `data.sampling`.

    encode ─ (sampling_keys ─ sampling_cutoffs) ─ sampling ─ tokens

The stages in brackets are those of caps: a map over files, and a shuffle by ranges of keys.
"""

from collections.abc import Sequence
from functools import partial

from llmsys.config.data import CrawlConfig
from llmsys.config.sampling import CapConfig
from llmsys.data_pipeline.core.staging import find_output
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.stages.sample_documents import (
    RANGE_KEYS,
    Sampler,
    sample_file,
    write_cap_keys,
    write_cutoffs,
)
from llmsys.dataset.manifest_section import SampledColumn, SampledGroup
from llmsys.errors import DataError


def check_sampling(data: CrawlConfig, collected: Sequence[TaskRecord]) -> None:
    """Check that the documents have the columns of all rules.

    Args:
        data: The section `data`.
        collected: Records of the collected documents.

    Raises:
        ConfigError: A rule names no column of the documents, or buckets of texts.
    """
    path = find_output(data.folder, collected[0].outputs[0].name)
    Sampler(data.sampling, data.tokens.seed).check_columns(path)


def run_sampling_stages(
    data: CrawlConfig,
    stage: Stage,
    collected: Sequence[TaskRecord],
    encoded: Sequence[TaskRecord],
) -> Sequence[TaskRecord]:
    """Leave out and repeat encoded documents.

    Args:
        data: The section `data`.
        stage: Runs the tasks.
        collected: Records of the collected documents.
        encoded: Records of the encoded documents, one for each of `collected`.

    Returns:
        One record per encoded file, in place of `encoded`.

    Raises:
        DataError: No training document is left.
    """
    sampler = Sampler(data.sampling, data.tokens.seed)
    rules = data.model_dump(mode="json", include={"sampling": True, "tokens": {"seed"}})
    cutoffs = _run_cap_stages(data, sampler, rules, stage, collected, encoded)
    paths = [data.folder / record.outputs[0].name for record in cutoffs]
    tasks = []
    for documents, rows in zip(collected, encoded, strict=True):
        source = find_output(data.folder, documents.outputs[0].name)
        output = f"work/sampled/{source.name}"
        job = partial(
            sample_file,
            documents=source,
            encoded=data.folder / rows.outputs[0].name,
            cutoffs=paths,
            output=data.folder / output,
            sampler=sampler,
        )
        depends_on = [
            documents.digests[0],
            rows.digests[0],
            rules,
            [record.digests[0] for record in cutoffs],
        ]
        count = documents.result["documents_rows"]
        tasks.append(Task(f"sampling/{source.stem}", depends_on, [output], job, count))
    sampled = stage("sampling", tasks, "document")
    if not any(record.result["training"] for record in sampled):
        raise DataError(
            "data.sampling leaves no document to train on: every weight is 0. Raise a weight."
        )
    return sampled


def _run_cap_stages(
    data: CrawlConfig,
    sampler: Sampler,
    rules: dict[str, object],
    stage: Stage,
    collected: Sequence[TaskRecord],
    encoded: Sequence[TaskRecord],
) -> Sequence[TaskRecord]:
    """Return records of the files of cut-offs, one per range of keys; none without caps."""
    if not any(isinstance(rule, CapConfig) for rule in data.sampling):
        return []
    tasks = []
    for documents, rows in zip(collected, encoded, strict=True):
        source = find_output(data.folder, documents.outputs[0].name)
        output = f"work/sampling_keys/{source.name}"
        job = partial(
            write_cap_keys,
            documents=source,
            encoded=data.folder / rows.outputs[0].name,
            output=data.folder / output,
            sampler=sampler,
        )
        depends_on = [documents.digests[0], rows.digests[0], rules]
        count = documents.result["documents_rows"]
        tasks.append(Task(f"sampling_keys/{source.stem}", depends_on, [output], job, count))
    keyed = stage("sampling_keys", tasks, "document")
    total = sum(record.result["keys"] for record in keyed)
    ranges = max(1, -(-total // RANGE_KEYS))
    sources = [data.folder / record.outputs[0].name for record in keyed]
    digests = [record.digests[0] for record in keyed]
    cutoff_tasks = []
    for number in range(ranges):
        output = f"work/sampling_cutoffs/range-{number:05d}.arrow"
        job = partial(
            write_cutoffs,
            sources=sources,
            output=data.folder / output,
            number=number,
            ranges=ranges,
            sampler=sampler,
        )
        whole = [digests, rules, number, ranges]
        name = f"sampling_cutoffs/range-{number:05d}"
        cutoff_tasks.append(Task(name, whole, [output], job, total // ranges))
    return stage("sampling_cutoffs", cutoff_tasks, "document")


def summarize_sampling(
    data: CrawlConfig, sampled: Sequence[TaskRecord]
) -> tuple[SampledColumn, ...]:
    """Sum what the training split held before and after sampling.

    Args:
        data: The section `data`.
        sampled: Records of `run_sampling_stages`.

    Returns:
        The section of the manifest, one entry per rule; groups with most tokens first.
    """
    columns = []
    for number, rule in enumerate(data.sampling):
        sums: dict[str, list[int]] = {}
        for record in sampled:
            for label, own in record.result["rules"][number].items():
                before = sums.setdefault(label, [0, 0, 0, 0])
                sums[label] = [a + b for a, b in zip(before, own, strict=True)]
        order = sorted(sums, key=lambda label: (-sums[label][1], label))
        groups = [
            SampledGroup(
                value=label,
                documents=sums[label][0],
                tokens=sums[label][1],
                sampled_documents=sums[label][2],
                sampled_tokens=sums[label][3],
            )
            for label in order
        ]
        columns.append(SampledColumn(column=rule.column, rule=rule.kind, groups=tuple(groups)))
    return tuple(columns)

"""Stages that find documents which say the same.

    embeddings (per file) ─ centroids ─ assigned (per file) ─ semantic_duplicates (per range)

Reads the section `deduplicate.semantic` of the config. What does not decide the outputs of a stage
is not in its keys: another threshold repeats the last stage alone, other clusters the last three.
"""

from collections.abc import Sequence
from functools import partial

from llmsys.config.deduplication import (
    ColumnEmbeddingsConfig,
    EncoderEmbeddingsConfig,
    SemanticDedupConfig,
)
from llmsys.data_pipeline.core.journal import compute_json_digest, compute_sequence_digest
from llmsys.data_pipeline.core.task_record import TaskRecord, write_file_list
from llmsys.data_pipeline.dedup.dedup_index import DocumentFiles
from llmsys.data_pipeline.dedup.duplicate_decisions import SEMANTIC
from llmsys.data_pipeline.dedup.embeddings import build_assigned_schema
from llmsys.data_pipeline.executors.base import LazySequence
from llmsys.data_pipeline.graph.resource_files import (
    compute_file_digests,
    list_embedding_libraries,
)
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState
from llmsys.data_pipeline.pipelines.earlier_configs import iter_results
from llmsys.data_pipeline.pipelines.repeat_removal_stages import ComparisonStages
from llmsys.data_pipeline.stages.cluster_embeddings import (
    write_assigned_embeddings,
    write_centroids,
)
from llmsys.data_pipeline.stages.embed_documents import write_embeddings
from llmsys.data_pipeline.stages.find_semantic_duplicates import (
    ClusterRange,
    write_semantic_duplicates,
)
from llmsys.errors import DataError
from llmsys.log import get_logger

_log = get_logger(__name__)


def find_semantic_duplicates(
    plan: ComparisonStages, runner: StageRunner, state: DatasetState, documents: DocumentFiles
) -> Sequence[TaskRecord]:
    """Find the documents that are near a longer one of their cluster.

    Args:
        plan: Runs the stages of a comparison.
        runner: The stage runner.
        state: The documents, which pending decisions may drop.
        documents: Signature files of the same documents.

    Returns:
        Records of decisions, one per range of clusters; none without embeddings.

    Raises:
        DataError: No document has the column of embeddings, or embeddings differ in length.
    """
    config = plan.config.semantic
    assert isinstance(config, SemanticDedupConfig)
    embedded = _run_embedding_stage(plan, runner, state, config)
    total = _count_embeddings(config, embedded, state.names)
    centroids = _run_centroid_stage(plan, config, embedded, total)
    assigned = _run_assignment_stage(plan, config, state, embedded, centroids)
    sources = plan.group_files(
        write_file_list(plan.folder, "assigned", (record.outputs[0].name for record in assigned)),
        state,
        assigned,
        0,
        build_assigned_schema(config.precision),
    )
    ranges = max(1, min(centroids.result["clusters"], -(-total // config.documents_per_task)))
    digest = compute_sequence_digest(record.digests for record in assigned)

    def build_task(number: int) -> Task:
        name = f"{number:05d}-of-{ranges:05d}"
        output = f"work/{SEMANTIC}/{name}.arrow"
        job = partial(
            write_semantic_duplicates,
            cluster_range=ClusterRange(sources, number, ranges),
            config=config,
            documents=documents,
            output=plan.folder / output,
        )
        return Task(
            f"{SEMANTIC}/{name}", [digest, config.threshold, number, ranges], [output], job, 1
        )

    return plan.run_stage(SEMANTIC, LazySequence(ranges, build_task), "range")


def _run_embedding_stage(
    plan: ComparisonStages, runner: StageRunner, state: DatasetState, config: SemanticDedupConfig
) -> Sequence[TaskRecord]:
    model = ""
    source = config.embeddings
    if isinstance(source, EncoderEmbeddingsConfig):
        files = compute_file_digests(runner.journal, source.files)
        values = source.model_dump(
            mode="json", include={"pooling", "prefix", "max_tokens", "device"}
        )
        names = [path.name for path in source.files]
        model = compute_json_digest(values, config.precision, names, files)
    settings = [
        model or source.model_dump(mode="json"),
        config.precision,
        list_embedding_libraries(config),
    ]

    def build_task(number: int) -> Task:
        record = state.kept[number]
        name = state.names[number]
        decisions = state.select_decisions(number)
        output = f"work/embeddings.packs/{name}"
        job = partial(
            write_embeddings,
            source=plan.get_output_paths([record])[0],
            number=number,
            dropped=plan.get_output_paths(decisions),
            output=plan.folder / output,
            config=config,
            model=model,
            earlier=[
                plan.folder / one.outputs[0].name
                for one in iter_results(runner, f"embeddings/{name}")
                if model and one.result["model"] == model
            ],
        )
        depends_on = [record.digests[0], [each.digests for each in decisions], number, settings]
        rows = sum(rows for _, rows in record.result["kept_batches"])
        return Task(f"embeddings/{name}", depends_on, [output], job, rows)

    return plan.run_stage("embeddings", LazySequence(len(state.names), build_task), "document")


def _count_embeddings(
    config: SemanticDedupConfig, embedded: Sequence[TaskRecord], names: Sequence[str]
) -> int:
    """Return the number of embeddings, and warn of documents without one."""
    total = 0
    missing = 0
    numbers = 0
    first = ""
    for name, record in zip(names, embedded, strict=True):
        result = record.result
        total += result["embeddings"]
        missing += result["missing"]
        own = result["numbers"]
        if own and numbers and own != numbers:
            raise DataError(
                f"embeddings of {name} have {own:,} numbers, and those of {first} {numbers:,}. "
                "Embed all documents by one model."
            )
        if own and not numbers:
            numbers = own
            first = name
    if missing and not total and isinstance(config.embeddings, ColumnEmbeddingsConfig):
        raise DataError(
            f"data.deduplicate.semantic.embeddings.column: none of {missing:,} documents has a "
            f"list of numbers in the column {config.embeddings.column}. Give the name of the "
            "column with the embeddings, or kind: encoder, which computes them."
        )
    if missing:
        _log.warning(
            "%s of %s documents have no embedding, and stay: they were not compared by "
            "data.deduplicate.semantic",
            f"{missing:,}",
            f"{missing + total:,}",
        )
    return total


def _run_centroid_stage(
    plan: ComparisonStages, config: SemanticDedupConfig, embedded: Sequence[TaskRecord], total: int
) -> TaskRecord:
    output = "work/centroids/centroids.arrow"
    job = partial(
        write_centroids,
        sources=write_file_list(
            plan.folder, "embeddings", (record.outputs[0].name for record in embedded)
        ),
        documents=total,
        config=config,
        output=plan.folder / output,
    )
    settings = config.model_dump(mode="json", include={"clusters", "sample", "iterations", "seed"})
    depends_on = [compute_sequence_digest(record.digests for record in embedded), settings]
    task = Task("centroids/all", depends_on, [output], job, len(embedded))
    return plan.run_stage("centroids", [task], "file")[0]


def _run_assignment_stage(
    plan: ComparisonStages,
    config: SemanticDedupConfig,
    state: DatasetState,
    embedded: Sequence[TaskRecord],
    centroids: TaskRecord,
) -> Sequence[TaskRecord]:
    def build_task(number: int) -> Task:
        record = embedded[number]
        name = state.names[number]
        output = f"work/assigned.packs/{name}"
        job = partial(
            write_assigned_embeddings,
            source=plan.get_output_paths([record])[0],
            centroids=plan.get_output_paths([centroids])[0],
            config=config,
            output=plan.folder / output,
        )
        depends_on = [record.digests, centroids.digests]
        return Task(f"assigned/{name}", depends_on, [output], job, record.result["embeddings"])

    return plan.run_stage("assigned", LazySequence(len(state.names), build_task), "document")

"""Build the step batches and the evaluator of a config's objective.

The one file that maps an objective to its data. Everything is opened and checked before a model is
built.
"""

from typing import assert_never

from llmsys.config.batch import BatchConfig
from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.objective import (
    ClassificationConfig,
    MaskedLmConfig,
    NextSentenceConfig,
    NextTokenConfig,
    PermutationConfig,
    SpanCorruptionConfig,
    TranslationConfig,
)
from llmsys.config.run import RunConfig
from llmsys.data.dataset_mixture import MixtureWindows
from llmsys.data.fill_in_middle import MiddleFiller
from llmsys.data.fitted_windows import FittedWindows
from llmsys.data.heldout_batches import HeldoutPairs, MaskedHeldoutWindows
from llmsys.data.images import ImageCollator, build_image_layout
from llmsys.data.length_buckets import LengthBuckets
from llmsys.data.packed_windows import SourceWindows, WindowDataset
from llmsys.data.sequence_pairs import (
    ClassificationCollator,
    MakeBatch,
    SequencePairs,
    TranslationCollator,
    open_pairs,
)
from llmsys.data.step_batches import (
    BucketedStepBatches,
    StepBatches,
    StridedStepBatches,
    WindowStepBatches,
)
from llmsys.data.step_plan import RunPlan
from llmsys.data.stream_windows import StreamWindows
from llmsys.dataset.paged_token_shards import require_paged
from llmsys.dataset.token_shards import TokenShards
from llmsys.errors import ConfigError
from llmsys.train.build_transform import (
    HidingObjective,
    PairObjective,
    build_augmentation,
    build_middle_filler,
    build_transform,
    get_start_token,
)
from llmsys.train.chat_data import get_stored_chats
from llmsys.train.evaluator import ALONE, Evaluator, HeldoutRows, RowRanks, TargetEvaluator
from llmsys.train.heldout_evaluator import HeldoutEvaluator, MixtureEvaluator, build_heldout_windows
from llmsys.train.multiple_choice_evaluator import build_task_evaluator
from llmsys.train.python_metric import load_python_metrics
from llmsys.train.run_data import RunData, get_mixture, open_first_source, open_run_data
from llmsys.vocabulary.tokenizer import Tokenizer


def build_step_batches(config: RunConfig, ranks: int, data_rank: int) -> StepBatches:
    """Build the micro-batches of one data rank for every step.

    Args:
        config: the config of the run.
        ranks: number of data ranks.
        data_rank: index of this data rank.

    Returns:
        Micro-batches by step. In bitwise mode they are independent of the number of ranks.

    Raises:
        ConfigError: config, data and tokenizer do not fit each other.
        DataError: the data are missing or damaged.
    """
    if config.train.reproducibility == "bitwise":
        require_ranks(
            ranks, list_micro_batch_counts(config.batch, windows=config.objective.uses_windows)
        )
        # A rank takes every ranks-th micro-batch of a single rank's plan, so their content does not
        # depend on `ranks`.
        return StridedStepBatches(_build_sharded_steps(config, 1, 0), ranks, data_rank)
    return _build_sharded_steps(config, ranks, data_rank)


def _build_sharded_steps(config: RunConfig, ranks: int, data_rank: int) -> StepBatches:
    match config.objective:
        case NextTokenConfig():
            return _build_window_steps(config, None, ranks, data_rank)
        case (
            MaskedLmConfig()
            | NextSentenceConfig()
            | PermutationConfig()
            | SpanCorruptionConfig() as objective
        ):
            return _build_window_steps(config, objective, ranks, data_rank)
        case TranslationConfig() | ClassificationConfig() as objective:
            _, tokenizer = open_first_source(config, "train")
            pairs = _open_checked_pairs(config, objective, "train")
            return BucketedStepBatches(
                pairs,
                _build_length_buckets(config, objective, pairs),
                _build_collator(config, objective, tokenizer),
                data_ranks=ranks,
                data_rank=data_rank,
                augmentation=build_augmentation(config, objective, pairs),
            )
        case unreachable:
            assert_never(unreachable)


def _build_window_steps(
    config: RunConfig, hidden: HidingObjective | None, ranks: int, data_rank: int
) -> WindowStepBatches:
    dataset = open_run_data(config, "train")
    windows = _build_windows(config, dataset)
    masking = None
    chats = get_stored_chats(config, dataset)
    if hidden is not None:
        key = (windows.fingerprint, config.run.seed)
        masking = build_transform(config, hidden, dataset.tokenizer, key, windows.get_rows)
    return WindowStepBatches(
        windows,
        build_run_plan(config, ranks, data_rank),
        separate_documents=config.batch.attention_scope == "document",
        masking=masking,
        deal=config.batch.assignment,
        chats=chats,
        names_documents=config.train.record_document_losses,
    )


def build_evaluator(config: RunConfig, row_ranks: RowRanks = ALONE) -> Evaluator:
    """Build the evaluator of held-out data for the objective, with the evaluation tasks of the
    config.

    Args:
        config: the config of the run.
        row_ranks: the ranks that compute the logits of a row together; they get the same rows.

    Returns:
        An evaluator whose `evaluate` is collective.

    Raises:
        ConfigError: config, data and tokenizer do not fit each other.
        DataError: the data or a task's file are missing or damaged.
    """
    match config.objective:
        case NextTokenConfig():
            return _build_text_evaluator(config, None, row_ranks)
        case (
            MaskedLmConfig()
            | NextSentenceConfig()
            | PermutationConfig()
            | SpanCorruptionConfig() as objective
        ):
            return _build_text_evaluator(config, objective, row_ranks)
        case TranslationConfig() | ClassificationConfig() as objective:
            _, tokenizer = open_first_source(config, "heldout")
            pairs = _open_checked_pairs(config, objective, "heldout")
            make = _build_collator(config, objective, tokenizer)
            heldout_pairs = HeldoutPairs(pairs, make, max_tokens=config.evaluation.max_tokens)
            return _build_target_evaluator(config, heldout_pairs, row_ranks)
        case unreachable:
            assert_never(unreachable)


def _build_text_evaluator(
    config: RunConfig, hidden: HidingObjective | None, row_ranks: RowRanks
) -> Evaluator:
    dataset = open_run_data(config, "heldout")
    evaluators = {
        name: _build_source_evaluator(config, hidden, shards, dataset.tokenizer, row_ranks)
        for name, shards in zip(dataset.names, dataset.sources, strict=True)
    }
    is_mixture = get_mixture(config.data) is not None
    heldout = MixtureEvaluator(evaluators) if is_mixture else next(iter(evaluators.values()))
    return build_task_evaluator(heldout, config, dataset.tokenizer, row_ranks)


def _build_source_evaluator(
    config: RunConfig,
    hidden: HidingObjective | None,
    shards: TokenShards,
    tokenizer: Tokenizer,
    row_ranks: RowRanks,
) -> Evaluator:
    if hidden is None:
        return HeldoutEvaluator(config, shards, tokenizer, row_ranks)
    windows = build_heldout_windows(config, shards, tokenizer)
    masking = build_transform(
        config, hidden, tokenizer, ("heldout", shards.fingerprint), windows.get_rows
    )
    return _build_target_evaluator(config, MaskedHeldoutWindows(windows, masking), row_ranks)


def _build_target_evaluator(
    config: RunConfig, heldout: HeldoutRows, row_ranks: RowRanks
) -> TargetEvaluator:
    metrics = load_python_metrics(config.evaluation.metrics, config.model.vocab_size)
    return TargetEvaluator(heldout, row_ranks, config.evaluation_sequences, metrics)


def _build_windows(config: RunConfig, dataset: RunData) -> WindowDataset:
    """Return the training windows of a dataset, or of a mixture; its stages begin at whole
    sequences.
    """
    length = config.batch.sequence_length
    packed = [
        build_source_windows(
            shards,
            config.batch,
            config.run.seed,
            build_middle_filler(config, shards, dataset.tokenizer),
        )
        for shards in dataset.sources
    ]
    if (mixture := get_mixture(config.data)) is None:
        return packed[0]
    # rounded up
    stages = [(-(-tokens // length), weights) for tokens, weights in mixture.stage_weights]
    return MixtureWindows(packed, dataset.names, stages)


def build_source_windows(
    shards: TokenShards, batch: BatchConfig, seed: int, middle: MiddleFiller | None = None
) -> SourceWindows:
    """Build the windows of a dataset.

    Args:
        shards: the training split.
        batch: the `batch:` section.
        seed: seed of the order.
        middle: rearranges documents for fill-in-the-middle.

    Returns:
        The windows of all epochs.

    Raises:
        DataError: the split has too few tokens for a window.
    """
    length = batch.sequence_length
    if batch.packing != "concatenate":
        return FittedWindows(
            require_paged(shards), length=length, seed=seed, packing=batch.packing, middle=middle
        )
    rows = batch.sequences_per_step if batch.window_order == "consecutive" else 0
    return StreamWindows(require_paged(shards), length=length, seed=seed, rows=rows)


def build_run_plan(config: RunConfig, ranks: int, data_rank: int) -> RunPlan:
    """Build the assignment of windows to ranks in every step.

    Args:
        config: the config of the run.
        ranks: number of data ranks.
        data_rank: index of this data rank.

    Returns:
        The plan of this data rank.

    Raises:
        ConfigError: a step cannot be divided among the ranks.
    """
    return RunPlan(config.batch, ranks, data_rank)


def _open_checked_pairs(config: RunConfig, objective: PairObjective, split: str) -> SequencePairs:
    layout = build_image_layout(config)
    pairs = open_pairs(config.data.folder, split, None if layout is None else layout.num_positions)
    match objective:
        case TranslationConfig():
            pairs.require_lengths(
                config.batch.sequence_length, config.batch.counted_sequence_length
            )
        case ClassificationConfig():
            if layout is None:
                pairs.require_lengths(config.batch.sequence_length, 1)
            else:
                layout.require_values(pairs)
            _check_labels(config, pairs)
        case unreachable:
            assert_never(unreachable)
    return pairs


def _check_labels(config: RunConfig, pairs: SequencePairs) -> None:
    labels = pairs.targets.manifest.labels
    outputs = getattr(config.model.head, "num_labels", 0)
    if len(labels) != outputs:
        raise ConfigError(
            f"model.head.num_labels={outputs}, and {config.data.folder} has {len(labels)} labels "
            f"({', '.join(labels[:5])}). Set model.head.num_labels={len(labels)}."
        )


def _build_length_buckets(
    config: RunConfig, objective: PairObjective, pairs: SequencePairs
) -> LengthBuckets:
    match objective:
        case TranslationConfig():  # counted in target tokens (Vaswani 2017, 5.1)
            counted = pairs.targets.lengths
            other = pairs.source_lengths
        case ClassificationConfig():  # counted in tokens of text; a label is no sequence
            counted = pairs.source_lengths
            other = pairs.targets.lengths
        case unreachable:
            assert_never(unreachable)
    batch = config.batch
    key = (pairs.fingerprint, config.run.seed)
    return LengthBuckets(counted, other, batch.tokens_per_step, batch.num_length_buckets, key)


def _build_collator(config: RunConfig, objective: PairObjective, tokenizer: Tokenizer) -> MakeBatch:
    match objective:
        case TranslationConfig():
            return TranslationCollator(get_start_token(config))
        case ClassificationConfig():
            layout = build_image_layout(config)
            return (
                ClassificationCollator(tokenizer.eos_id)
                if layout is None
                else ImageCollator(layout)
            )
        case unreachable:
            assert_never(unreachable)

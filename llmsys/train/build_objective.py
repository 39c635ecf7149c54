"""From a config's objective to what is trained on and what is measured: the steps of a rank, and the evaluator.

The one place that knows which data belong to which objective. Everything is opened and checked here, before a model is
built.
"""

from typing import cast

from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.mixture import MixtureConfig
from llmsys.config.objective import MaskedLmConfig
from llmsys.config.run import RunConfig
from llmsys.data.dataset_mixture import MixtureWindows
from llmsys.data.heldout_batches import HeldoutPairs, MaskedHeldoutWindows
from llmsys.data.length_buckets import LengthBuckets
from llmsys.data.masking import TokenMasker
from llmsys.data.packed_windows import PackedDocuments, WindowDataset
from llmsys.data.sequence_pairs import ClassificationCollator, MakeBatch, SequencePairs, TranslationCollator, open_pairs
from llmsys.data.step_batches import BucketedStepBatches, StepBatches, StridedStepBatches, WindowStepBatches
from llmsys.data.step_plan import RunPlan
from llmsys.errors import ConfigError
from llmsys.token_shards import TokenShards
from llmsys.tokenizer import Tokenizer
from llmsys.train.evaluator import Evaluator, TargetEvaluator
from llmsys.train.heldout_evaluator import HeldoutEvaluator, MixtureEvaluator, build_heldout_windows
from llmsys.train.multiple_choice_evaluator import build_task_evaluator
from llmsys.train.run_data import RunData, open_first_source, open_run_data


def build_step_batches(config: RunConfig, ranks: int, data_rank: int) -> StepBatches:
    """What one of `ranks` data ranks trains on, step by step.

    Raises ConfigError or DataError when config, data and tokenizer do not fit each other.
    """
    if config.train.reproducibility == "bitwise":
        windows = config.objective.kind in ("next_token", "masked")
        require_ranks(ranks, list_micro_batch_counts(config.batch, windows=windows))
        return StridedStepBatches(_build_sharded_steps(config, 1, 0), ranks, data_rank)
    return _build_sharded_steps(config, ranks, data_rank)


def _build_sharded_steps(config: RunConfig, ranks: int, data_rank: int) -> StepBatches:
    if config.objective.kind in ("translation", "classification"):
        _, tokenizer = open_first_source(config, "train")
        pairs = _open_checked_pairs(config, "train")
        return BucketedStepBatches(
            pairs,
            _build_length_groups(config, pairs),
            _build_collator(config, tokenizer),
            data_ranks=ranks,
            data_rank=data_rank,
        )
    dataset = open_run_data(config, "train")
    windows, masking = _build_windows(config, dataset), None
    if config.objective.kind == "masked":
        masking = _build_masking(config, dataset.tokenizer, (windows.fingerprint, config.run.seed))
    return WindowStepBatches(
        windows,
        build_run_plan(config, ranks, data_rank),
        separate_documents=config.batch.attend == "document",
        masking=masking,
        deal=config.batch.deal,
    )


def build_evaluator(config: RunConfig, ranks_per_row: int = 1) -> Evaluator:
    """What measures a model of this config on held-back data; `together` ranks get the same rows, see `measure`."""
    if config.objective.kind in ("translation", "classification"):
        _, tokenizer = open_first_source(config, "heldout")
        pairs, make = _open_checked_pairs(config, "heldout"), _build_collator(config, tokenizer)
        heldout_pairs = HeldoutPairs(pairs, make, max_tokens=config.evaluation.max_tokens)
        return TargetEvaluator(heldout_pairs, ranks_per_row, config.evaluation_sequences)
    dataset = open_run_data(config, "heldout")
    found = {
        name: _build_heldout_evaluator(config, shards, dataset.tokenizer, ranks_per_row)
        for name, shards in zip(dataset.names, dataset.sources, strict=True)
    }
    heldout = MixtureEvaluator(found) if config.data.kind == "mixture" else next(iter(found.values()))
    return build_task_evaluator(heldout, config, dataset.tokenizer, ranks_per_row)


def _build_heldout_evaluator(
    config: RunConfig, shards: TokenShards, tokenizer: Tokenizer, ranks_per_row: int
) -> Evaluator:
    if config.objective.kind == "next_token":
        return HeldoutEvaluator(config, shards, tokenizer, ranks_per_row)
    masking = _build_masking(config, tokenizer, ("heldout", shards.fingerprint))
    masked = MaskedHeldoutWindows(build_heldout_windows(config, shards, tokenizer), masking)
    return TargetEvaluator(masked, ranks_per_row, config.evaluation_sequences)


def _build_windows(config: RunConfig, dataset: RunData) -> WindowDataset:
    """The training windows of one dataset, or of a mixture whose stages begin at whole sequences."""
    length, seed = config.batch.sequence_length, config.run.seed
    packed = [PackedDocuments(shards, length=length, seed=seed) for shards in dataset.sources]
    if not isinstance(config.data, MixtureConfig):
        return packed[0]
    stages = [(-(-tokens // length), parts) for tokens, parts in config.data.stage_weights]
    return MixtureWindows(packed, dataset.names, stages)


def get_start_token(config: RunConfig) -> int:
    """The token that opens every target of an encoder-decoder."""
    return 0 if config.model.encoder is None else config.model.encoder.decoder_start_token_id


def build_run_plan(config: RunConfig, ranks: int, data_rank: int) -> RunPlan:
    """How the windows of every step are dealt to `ranks` ranks; ConfigError when a step cannot be."""
    return RunPlan(config.batch, ranks, data_rank)


def _open_checked_pairs(config: RunConfig, split: str) -> SequencePairs:
    pairs = open_pairs(config.data.folder, split)
    if config.objective.kind == "translation":
        pairs.require_lengths(config.batch.sequence_length, config.batch.counted_sequence_length)
        return pairs
    pairs.require_lengths(config.batch.sequence_length, 1)
    labels, outputs = pairs.targets.manifest.labels, getattr(config.model.head, "num_labels", 0)
    if len(labels) != outputs:
        raise ConfigError(
            f"model.head.num_labels={outputs}, and {config.data.folder} has {len(labels)} labels "
            f"({', '.join(labels[:5])}). Set model.head.num_labels={len(labels)}."
        )
    return pairs


def _build_length_groups(config: RunConfig, pairs: SequencePairs) -> LengthBuckets:
    """Translations are counted in target tokens, labelled texts in tokens of text."""
    counted, other = pairs.targets.lengths, pairs.sources.lengths
    if config.objective.kind == "classification":
        counted, other = other, counted
    batch, key = config.batch, (pairs.fingerprint, config.run.seed)
    return LengthBuckets(counted, other, batch.tokens_per_step, batch.length_groups, key)


def _build_collator(config: RunConfig, tokenizer: Tokenizer) -> MakeBatch:
    if config.objective.kind == "translation":
        return TranslationCollator(get_start_token(config))
    return ClassificationCollator(tokenizer.eos_id)


def _build_masking(config: RunConfig, tokenizer: Tokenizer, key: tuple[str | int, ...]) -> TokenMasker:
    objective = cast(MaskedLmConfig, config.objective)
    mask = tokenizer.find_piece_id(objective.mask_token)
    if mask is None:
        raise ConfigError(
            f"objective.mask_token={objective.mask_token} is not a piece of the tokenizer. Train one that has it: set "
            f"tokenizer.control_symbols=[{objective.mask_token}] and run llmsys prepare CONFIG. One made elsewhere has "
            f"another name for it: set objective.mask_token, such as [MASK]."
        )
    return TokenMasker(objective, mask, tokenizer.eos_id, tokenizer.vocab_size, key)

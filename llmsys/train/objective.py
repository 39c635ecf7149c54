"""From a config's objective to what is trained on and what is measured: the steps of a rank, and the evaluator.

The one place that knows which data belong to which objective. Everything is opened and checked here, before a model is
built.
"""

from pathlib import Path
from typing import cast

from llmsys.config.objective import Masked
from llmsys.config.run import RunConfig
from llmsys.data.grouping import Grouping
from llmsys.data.heldout_masked import HeldoutMasked
from llmsys.data.heldout_pairs import HeldoutPairs
from llmsys.data.masking import Masking
from llmsys.data.packing import PackedDocuments
from llmsys.data.pairs import LabelledBatch, MakeBatch, Pairs, TranslationBatch, open_pairs
from llmsys.data.steps import GroupedSteps, StepPlan, Steps, WindowSteps
from llmsys.errors import ConfigError
from llmsys.shards import TokenShards, open_tokens
from llmsys.tokenizer import Tokenizer, load_tokenizer, model_file
from llmsys.train.evaluate import HeldoutEvaluator, heldout_windows
from llmsys.train.measure import Evaluator, TargetEvaluator


def steps_of(config: RunConfig, ranks: int, data_rank: int) -> Steps:
    """What one of `ranks` data ranks trains on, step by step.

    Raises ConfigError or DataError when config, data and tokenizer do not fit each other.
    """
    shards, tokenizer = open_data(config, "train")
    if config.objective.kind in ("translation", "classification"):
        pairs = _pairs(config, "train")
        return GroupedSteps(
            pairs, _grouping(config, pairs), _make(config, tokenizer), data_ranks=ranks, data_rank=data_rank
        )
    packed = PackedDocuments(shards, length=config.batch.sequence_length, seed=config.run.seed)
    masking = None
    if config.objective.kind == "masked":
        masking = _masking(config, tokenizer, (shards.fingerprint, config.run.seed))
    separate = config.batch.attend == "document"
    return WindowSteps(packed, step_plan(config, ranks, data_rank), separate_documents=separate, masking=masking)


def evaluator_of(config: RunConfig) -> Evaluator:
    """What measures a model of this config on held-back data."""
    shards, tokenizer = open_data(config, "heldout")
    if config.objective.kind == "next_token":
        return HeldoutEvaluator(config, shards, tokenizer)
    if config.objective.kind == "masked":
        masking = _masking(config, tokenizer, ("heldout", shards.fingerprint))
        return TargetEvaluator(HeldoutMasked(heldout_windows(config, shards, tokenizer), masking))
    pairs, make = _pairs(config, "heldout"), _make(config, tokenizer)
    return TargetEvaluator(HeldoutPairs(pairs, make, max_tokens=config.evaluation.max_tokens))


def open_data(config: RunConfig, split: str) -> tuple[TokenShards, Tokenizer]:
    """One split and its tokenizer, refused when they do not belong together or do not fit the model."""
    shards = open_tokens(config.data.folder, split)
    tokenizer = tokenizer_of(config)
    shards.require_tokenizer(tokenizer.fingerprint)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} pieces. "
            f"Set model.vocab_size={tokenizer.vocab_size} or more."
        )
    return shards, tokenizer


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of this config; DataError when it is not there, or nothing says what ends a document."""
    return load_tokenizer(tokenizer_path(config), getattr(config.tokenizer, "eos_token", None))


def tokenizer_path(config: RunConfig) -> Path:
    """Where the tokenizer of this config lies: the user's file, or the one `prepare` trained."""
    if config.tokenizer.kind == "file":
        return model_file(config.tokenizer.path)
    return config.data.folder / "tokenizer" / "tokenizer.model"


def start_token(config: RunConfig) -> int:
    """The token that opens every target of an encoder-decoder."""
    return 0 if config.model.encoder is None else config.model.encoder.decoder_start_token_id


def step_plan(config: RunConfig, ranks: int, data_rank: int) -> StepPlan:
    """How a full step's windows are dealt to `ranks` ranks."""
    sequences = config.batch.sequences_per_step
    return StepPlan(sequences, ranks, data_rank, config.batch.micro_of(max(1, sequences // ranks)))


def _pairs(config: RunConfig, split: str) -> Pairs:
    pairs = open_pairs(config.data.folder, split)
    if config.objective.kind == "translation":
        pairs.require_lengths(config.batch.sequence_length, config.batch.counted_length)
        return pairs
    pairs.require_lengths(config.batch.sequence_length, 1)
    labels, outputs = pairs.targets.manifest.labels, getattr(config.model.head, "num_labels", 0)
    if len(labels) != outputs:
        raise ConfigError(
            f"model.head.num_labels={outputs}, and {config.data.folder} has {len(labels)} labels "
            f"({', '.join(labels[:5])}). Set model.head.num_labels={len(labels)}."
        )
    return pairs


def _grouping(config: RunConfig, pairs: Pairs) -> Grouping:
    """Translations are counted in target tokens, labelled texts in tokens of text."""
    counted, other = pairs.targets.lengths, pairs.sources.lengths
    if config.objective.kind == "classification":
        counted, other = other, counted
    batch, key = config.batch, (pairs.fingerprint, config.run.seed)
    return Grouping(counted, other, batch.tokens_per_step, batch.length_groups, key)


def _make(config: RunConfig, tokenizer: Tokenizer) -> MakeBatch:
    if config.objective.kind == "translation":
        return TranslationBatch(start_token(config))
    return LabelledBatch(tokenizer.eos_id)


def _masking(config: RunConfig, tokenizer: Tokenizer, key: tuple[str | int, ...]) -> Masking:
    objective = cast(Masked, config.objective)
    mask = tokenizer.piece_id(objective.mask_token)
    if mask is None:
        raise ConfigError(
            f"objective.mask_token={objective.mask_token} is not a piece of the tokenizer. Train one that has it: set "
            f"tokenizer.control_symbols=[{objective.mask_token}] and run llmsys prepare CONFIG. One made elsewhere has "
            f"another name for it: set objective.mask_token, such as [MASK]."
        )
    return Masking(objective, mask, tokenizer.eos_id, tokenizer.vocab_size, key)

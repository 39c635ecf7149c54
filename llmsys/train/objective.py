"""From a config's objective to what is trained on and what is measured: the steps of a rank, and the evaluator.

The one place that knows which data belong to which objective. Everything is opened and checked here, before a model is
built.
"""

from typing import cast

from llmsys.config.bitwise import micro_batches, require_ranks
from llmsys.config.mixture import MixtureConfig
from llmsys.config.objective import Masked
from llmsys.config.run import RunConfig
from llmsys.data.grouping import Grouping
from llmsys.data.heldout_masked import HeldoutMasked
from llmsys.data.heldout_pairs import HeldoutPairs
from llmsys.data.masking import Masking
from llmsys.data.mixture import MixedWindows
from llmsys.data.packing import PackedDocuments
from llmsys.data.pairs import LabelledBatch, MakeBatch, Pairs, TranslationBatch, open_pairs
from llmsys.data.plan import RunPlan
from llmsys.data.steps import GroupedSteps, Steps, WindowSteps
from llmsys.data.turns import StepsInTurns
from llmsys.data.windows import Windows
from llmsys.errors import ConfigError
from llmsys.shards import TokenShards
from llmsys.tokenizer import Tokenizer
from llmsys.train.answers import with_answers
from llmsys.train.dataset import Dataset, open_data, open_dataset
from llmsys.train.evaluate import HeldoutEvaluator, heldout_windows
from llmsys.train.evaluate_mixture import MixtureEvaluator
from llmsys.train.measure import Evaluator, TargetEvaluator


def steps_of(config: RunConfig, ranks: int, data_rank: int) -> Steps:
    """What one of `ranks` data ranks trains on, step by step.

    Raises ConfigError or DataError when config, data and tokenizer do not fit each other.
    """
    if config.train.reproducibility == "bitwise":
        windows = config.objective.kind in ("next_token", "masked")
        require_ranks(ranks, micro_batches(config.batch, windows=windows))
        return StepsInTurns(_dealt_steps(config, 1, 0), ranks, data_rank)
    return _dealt_steps(config, ranks, data_rank)


def _dealt_steps(config: RunConfig, ranks: int, data_rank: int) -> Steps:
    if config.objective.kind in ("translation", "classification"):
        _, tokenizer = open_data(config, "train")
        pairs = _pairs(config, "train")
        return GroupedSteps(
            pairs, _grouping(config, pairs), _make(config, tokenizer), data_ranks=ranks, data_rank=data_rank
        )
    dataset = open_dataset(config, "train")
    windows, masking = _windows(config, dataset), None
    if config.objective.kind == "masked":
        masking = _masking(config, dataset.tokenizer, (windows.fingerprint, config.run.seed))
    return WindowSteps(
        windows,
        run_plan(config, ranks, data_rank),
        separate_documents=config.batch.attend == "document",
        masking=masking,
        deal=config.batch.deal,
    )


def evaluator_of(config: RunConfig, together: int = 1) -> Evaluator:
    """What measures a model of this config on held-back data; `together` ranks get the same rows, see `measure`."""
    if config.objective.kind in ("translation", "classification"):
        _, tokenizer = open_data(config, "heldout")
        pairs, make = _pairs(config, "heldout"), _make(config, tokenizer)
        heldout_pairs = HeldoutPairs(pairs, make, max_tokens=config.evaluation.max_tokens)
        return TargetEvaluator(heldout_pairs, together, config.evaluation_sequences)
    dataset = open_dataset(config, "heldout")
    found = {
        name: _evaluator(config, shards, dataset.tokenizer, together)
        for name, shards in zip(dataset.names, dataset.sources, strict=True)
    }
    heldout = MixtureEvaluator(found) if config.data.kind == "mixture" else next(iter(found.values()))
    return with_answers(heldout, config, dataset.tokenizer, together)


def _evaluator(config: RunConfig, shards: TokenShards, tokenizer: Tokenizer, together: int) -> Evaluator:
    if config.objective.kind == "next_token":
        return HeldoutEvaluator(config, shards, tokenizer, together)
    masking = _masking(config, tokenizer, ("heldout", shards.fingerprint))
    masked = HeldoutMasked(heldout_windows(config, shards, tokenizer), masking)
    return TargetEvaluator(masked, together, config.evaluation_sequences)


def _windows(config: RunConfig, dataset: Dataset) -> Windows:
    """The training windows of one dataset, or of a mixture whose stages begin at whole sequences."""
    length, seed = config.batch.sequence_length, config.run.seed
    packed = [PackedDocuments(shards, length=length, seed=seed) for shards in dataset.sources]
    if not isinstance(config.data, MixtureConfig):
        return packed[0]
    stages = [(-(-tokens // length), parts) for tokens, parts in config.data.parts]
    return MixedWindows(packed, dataset.names, stages)


def start_token(config: RunConfig) -> int:
    """The token that opens every target of an encoder-decoder."""
    return 0 if config.model.encoder is None else config.model.encoder.decoder_start_token_id


def run_plan(config: RunConfig, ranks: int, data_rank: int) -> RunPlan:
    """How the windows of every step are dealt to `ranks` ranks; ConfigError when a step cannot be."""
    return RunPlan(config.batch, ranks, data_rank)


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

"""A configured list of rules over a batch of texts: who stays, why not, with what statistics.

Reads a column of texts, gives one `RuleOutcome` per rule in order; each rule sees only what the rules before it kept,
as they left it. The outcome of a document depends on its text and the configuration alone, not on its neighbours in
the batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.rules.bad_words import BadWordsRule
from data_pipeline.rules.c4 import C4Rule
from data_pipeline.rules.c4_dolma import C4DolmaRule
from data_pipeline.rules.classifier import ClassifierRule, list_classifier_thresholds
from data_pipeline.rules.document_batch import DocumentBatch, WordSplitters
from data_pipeline.rules.fineweb_quality import FinewebQualityRule
from data_pipeline.rules.gopher_quality import GopherQualityRule
from data_pipeline.rules.gopher_repetition import GopherRepetitionRule
from data_pipeline.rules.line_corrections import LineCorrectionsRule
from data_pipeline.rules.native_text import NativeTextRule
from data_pipeline.rules.perplexity import PerplexityRule, list_perplexity_thresholds
from data_pipeline.rules.verdict import Rule, RuleOutcome, RuleVerdicts, ThresholdTest
from llmsys.config.custom_rules import (
    ANY_LANGUAGE,
    BadWordsConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    PerplexityConfig,
)
from llmsys.config.line_rules import C4Config, C4DatatroveConfig, C4DolmaConfig, LineCorrectionsConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    NativeTextConfig,
    RuleConfig,
)

_SLICE_BYTES = (
    2 << 20
)  # texts that are measured together: enough to hide the cost of a call, little enough for the cache


class RuleChain:
    """Rules in a fixed order. Keep one per process: it remembers how words are split.

    Args:
        rules: what to apply, in order; may be empty.
        splitters: where words come from; English by default.
        language: of the documents; decides which lists of words are asked.
        models: rules that hold a model, by config; chains that are given the same mapping load each model once.
    """

    def __init__(
        self,
        rules: Sequence[RuleConfig],
        splitters: WordSplitters | None = None,
        language: str = ANY_LANGUAGE,
        models: dict[RuleConfig, Rule] | None = None,
    ) -> None:
        self._rules = [(rule.title, build_rule(rule, language, models)) for rule in rules]
        self._splitters = splitters or WordSplitters()

    def apply(self, texts: pa.Array) -> list[RuleOutcome]:
        """Judge texts (string or large_string without nulls); the first outcome is over all of them."""
        parts: list[list[RuleOutcome]] = [[] for _ in self._rules]
        for piece in _iter_slices(texts):
            batch = DocumentBatch(piece, self._splitters)
            for (name, rule), outcomes in zip(self._rules, parts, strict=True):
                verdicts = rule.apply(batch)
                keep = verdicts.failed_D < 0
                if verdicts.texts is not None:
                    batch = DocumentBatch(verdicts.texts, self._splitters, verdicts.words)
                batch = batch.select_documents(keep)
                outcomes.append(_build_outcome(name, verdicts, batch.texts))
        return [_join_outcomes(outcomes) for outcomes in parts]


def build_rule(config: RuleConfig, language: str = ANY_LANGUAGE, models: dict[RuleConfig, Rule] | None = None) -> Rule:
    """The rule that a configuration describes, for documents in a language."""
    models = {} if models is None else models
    match config:
        case BadWordsConfig():
            return BadWordsRule(config, language)
        case FastTextClassifierConfig() | LinearClassifierConfig():
            return models.get(config) or models.setdefault(config, ClassifierRule(config))
        case PerplexityConfig():
            return models.get(config) or models.setdefault(config, PerplexityRule(config))
        case GopherRepetitionConfig():
            return GopherRepetitionRule(config)
        case GopherQualityConfig():
            return GopherQualityRule(config)
        case C4Config() | C4DatatroveConfig():
            return C4Rule(config)
        case C4DolmaConfig():
            return C4DolmaRule(config)
        case LineCorrectionsConfig():
            return LineCorrectionsRule(config)
        case FinewebQualityConfig():
            return FinewebQualityRule(config)
        case NativeTextConfig():
            return NativeTextRule(config)


def list_thresholds(config: RuleConfig, language: str = ANY_LANGUAGE) -> Sequence[ThresholdTest]:
    """The tests of a rule that compare a statistic with a threshold; its models and lists are not read."""
    match config:
        case FastTextClassifierConfig() | LinearClassifierConfig():
            return list_classifier_thresholds(config)
        case PerplexityConfig():
            return list_perplexity_thresholds(config)
        case BadWordsConfig():
            return build_rule(config.model_copy(update={"word_lists": ()}), language).limits
        case _:
            return build_rule(config, language).limits


def _iter_slices(texts: pa.Array) -> Iterator[list[str]]:
    """The texts in their order, in lists of a bounded number of bytes, or of one text that is longer; at least one
    list.
    """
    piece: list[str] = []
    size = 0
    for text in texts.to_pylist():
        if piece and size + len(text) > _SLICE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text)
    yield piece


def _build_outcome(name: str, verdicts: RuleVerdicts, texts: Sequence[str]) -> RuleOutcome:
    """Verdicts as Arrow columns."""
    failed = verdicts.failed_D
    keep = failed < 0
    names = pa.array(verdicts.tests, pa.string()).take(pa.array(np.maximum(failed, 0), mask=keep))
    return RuleOutcome(
        rule=name,
        keep=pa.array(keep),
        test=names,
        value=pa.array(verdicts.values_D, from_pandas=True),
        threshold=pa.array(verdicts.thresholds_D, from_pandas=True),
        match=_build_match_column(verdicts),
        texts=pa.array(texts, pa.large_string()),
        statistics={name: pa.array(column[keep], pa.float32()) for name, column in verdicts.statistics.items()},
        changes={name: int(column[keep].sum()) for name, column in verdicts.changes.items()},
    )


def _build_match_column(verdicts: RuleVerdicts) -> pa.StringArray:
    number = len(verdicts.failed_D)
    if not verdicts.matches:
        return pa.nulls(number, pa.string())
    return pa.array(map(verdicts.matches.get, range(number)), pa.string())


def _join_outcomes(outcomes: Sequence[RuleOutcome]) -> RuleOutcome:
    """The outcomes of slices as one."""
    if len(outcomes) == 1:
        return outcomes[0]

    def concat_column(name: str) -> Any:
        return pa.concat_arrays([getattr(outcome, name) for outcome in outcomes])

    first = outcomes[0]
    return RuleOutcome(
        rule=first.rule,
        keep=concat_column("keep"),
        test=concat_column("test"),
        value=concat_column("value"),
        threshold=concat_column("threshold"),
        match=concat_column("match"),
        texts=concat_column("texts"),
        statistics={
            name: pa.concat_arrays([outcome.statistics[name] for outcome in outcomes]) for name in first.statistics
        },
        changes={name: sum(outcome.changes[name] for outcome in outcomes) for name in first.changes},
    )

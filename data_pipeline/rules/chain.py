"""A configured list of rules over a batch of texts: who stays, why not, with what statistics.

Reads a column of texts, gives one `RuleOutcome` per rule in order; each rule sees only what the rules before it kept,
as they left it. The outcome of a document depends on its text and the configuration alone, not on its neighbours in
the batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.rules.bad_words import BadWords
from data_pipeline.rules.batch import Splitters, TextBatch
from data_pipeline.rules.c4 import C4
from data_pipeline.rules.c4_dolma import C4Dolma
from data_pipeline.rules.classifier import Classifier, classifier_limits
from data_pipeline.rules.fineweb_quality import FinewebQuality
from data_pipeline.rules.gopher_quality import GopherQuality
from data_pipeline.rules.gopher_repetition import GopherRepetition
from data_pipeline.rules.line_corrections import LineCorrections
from data_pipeline.rules.native_text import NativeText
from data_pipeline.rules.outcome import RuleOutcome
from data_pipeline.rules.perplexity import Perplexity, perplexity_limits
from data_pipeline.rules.verdict import Limit, Rule, Verdicts
from llmsys.config.custom_rules import (
    ANY_LANGUAGE,
    BadWordsConfig,
    FasttextClassifierConfig,
    LinearClassifierConfig,
    PerplexityConfig,
)
from llmsys.config.line_rules import C4Config, C4DatatroveConfig, C4DolmaConfig, LineCorrectionsConfig
from llmsys.config.native_text import NativeTextConfig
from llmsys.config.text import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
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
        splitters: Splitters | None = None,
        language: str = ANY_LANGUAGE,
        models: dict[RuleConfig, Rule] | None = None,
    ) -> None:
        self._rules = [(rule.title, build(rule, language, models)) for rule in rules]
        self._splitters = splitters or Splitters()

    def apply(self, texts: pa.Array) -> list[RuleOutcome]:
        """Judge texts (string or large_string without nulls); the first outcome is over all of them."""
        parts: list[list[RuleOutcome]] = [[] for _ in self._rules]
        for piece in _slices(texts):
            batch = TextBatch(piece, self._splitters)
            for (name, rule), outcomes in zip(self._rules, parts, strict=True):
                verdicts = rule.judge(batch)
                keep = verdicts.failed_D < 0
                if verdicts.texts is not None:
                    batch = TextBatch(verdicts.texts, self._splitters, verdicts.words)
                batch = batch.take(keep)
                outcomes.append(_outcome(name, verdicts, batch.texts))
        return [_joined(outcomes) for outcomes in parts]


def build(config: RuleConfig, language: str = ANY_LANGUAGE, models: dict[RuleConfig, Rule] | None = None) -> Rule:
    """The rule that a configuration describes, for documents in a language."""
    models = {} if models is None else models
    match config:
        case BadWordsConfig():
            return BadWords(config, language)
        case FasttextClassifierConfig() | LinearClassifierConfig():
            return models.get(config) or models.setdefault(config, Classifier(config))
        case PerplexityConfig():
            return models.get(config) or models.setdefault(config, Perplexity(config))
        case GopherRepetitionConfig():
            return GopherRepetition(config)
        case GopherQualityConfig():
            return GopherQuality(config)
        case C4Config() | C4DatatroveConfig():
            return C4(config)
        case C4DolmaConfig():
            return C4Dolma(config)
        case LineCorrectionsConfig():
            return LineCorrections(config)
        case FinewebQualityConfig():
            return FinewebQuality(config)
        case NativeTextConfig():
            return NativeText(config)


def limits_of(config: RuleConfig, language: str = ANY_LANGUAGE) -> Sequence[Limit]:
    """The tests of a rule that compare a statistic with a threshold; its models and lists are not read."""
    match config:
        case FasttextClassifierConfig() | LinearClassifierConfig():
            return classifier_limits(config)
        case PerplexityConfig():
            return perplexity_limits(config)
        case BadWordsConfig():
            return build(config.model_copy(update={"words": ()}), language).limits
        case _:
            return build(config, language).limits


def _slices(texts: pa.Array) -> Iterator[list[str]]:
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


def _outcome(name: str, verdicts: Verdicts, texts: Sequence[str]) -> RuleOutcome:
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
        match=_matches(verdicts),
        texts=pa.array(texts, pa.large_string()),
        statistics={name: pa.array(column[keep], pa.float32()) for name, column in verdicts.statistics.items()},
        changes={name: int(column[keep].sum()) for name, column in verdicts.changes.items()},
    )


def _matches(verdicts: Verdicts) -> pa.StringArray:
    number = len(verdicts.failed_D)
    if not verdicts.matches:
        return pa.nulls(number, pa.string())
    return pa.array(map(verdicts.matches.get, range(number)), pa.string())


def _joined(outcomes: Sequence[RuleOutcome]) -> RuleOutcome:
    """The outcomes of slices as one."""
    if len(outcomes) == 1:
        return outcomes[0]

    def concatenated(name: str) -> Any:
        return pa.concat_arrays([getattr(outcome, name) for outcome in outcomes])

    first = outcomes[0]
    return RuleOutcome(
        rule=first.rule,
        keep=concatenated("keep"),
        test=concatenated("test"),
        value=concatenated("value"),
        threshold=concatenated("threshold"),
        match=concatenated("match"),
        texts=concatenated("texts"),
        statistics={
            name: pa.concat_arrays([outcome.statistics[name] for outcome in outcomes]) for name in first.statistics
        },
        changes={name: sum(outcome.changes[name] for outcome in outcomes) for name in first.changes},
    )

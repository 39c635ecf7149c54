"""Apply a configured list of rules to a batch of texts.

Returns one `RuleOutcome` per rule, in order. A rule sees only the documents that the rules before
it kept, as they rewrote them.

Invariants:
- The outcome of a document depends on its text and the configuration, not on its neighbours in the
  batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import numpy as np
import pyarrow as pa

from llmsys.config.custom_rules import (
    ANY_LANGUAGE,
    AnnotatorConfig,
    BadWordsConfig,
    EncoderClassifierConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    MapperConfig,
    PerplexityConfig,
    PythonRuleConfig,
)
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    LineCorrectionsConfig,
)
from llmsys.config.python_code import PythonCode
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    NativeTextConfig,
    RuleConfig,
)
from llmsys.config.source_code import SourceCodeConfig
from llmsys.data_pipeline.rules.document_row import DocumentColumns
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Rule,
    RuleOutcome,
    RuleVerdicts,
    ThresholdTest,
    WordSplitters,
)

# texts measured together: enough to hide the cost of a call, and few enough for the CPU cache
_SLICE_BYTES = 2 << 20


class RuleChain:
    """Rules in a fixed order. Keep one per process: it caches how words are split.

    Args:
        rules: the rules, in order; may be empty.
        splitters: split the words; English by default.
        language: ISO code of the documents' language, such as `en`; it selects word lists.
        models: rules that hold a model, by config; chains with the same mapping load each model
            once.
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
        # Other rules see texts alone.
        self._reads_columns = any(isinstance(rule, PythonCode | SourceCodeConfig) for rule in rules)

    def apply(self, texts: pa.Array, documents: pa.RecordBatch | None = None) -> list[RuleOutcome]:
        """Apply the rules to texts (string or large_string without nulls); the first outcome
        covers all of them.

        Args:
            texts: the texts.
            documents: the other columns of the documents, for rules of the user's own code.

        Returns:
            One outcome per rule in order.
        """
        parts: list[list[RuleOutcome]] = [[] for _ in self._rules]
        known = documents if self._reads_columns else None
        start = 0
        for piece in _iter_slices(texts):
            columns = None
            if known is not None:
                columns = DocumentColumns(known.slice(start, len(piece)))
            start += len(piece)
            batch = DocumentBatch(piece, self._splitters, columns=columns)
            for (name, rule), outcomes in zip(self._rules, parts, strict=True):
                verdicts = rule.apply(batch)
                keep = verdicts.failed_D < 0
                if verdicts.texts is not None:
                    batch = DocumentBatch(verdicts.texts, self._splitters, verdicts.words)
                batch = batch.select_documents(keep)
                outcome = _build_outcome(name, verdicts, batch.texts)
                if columns is not None:
                    columns = columns.select_documents(
                        keep, name, outcome.statistics | outcome.columns
                    )
                    batch.set_columns(columns)
                outcomes.append(outcome)
        return [_join_outcomes(outcomes) for outcomes in parts]


def build_rule(
    config: RuleConfig, language: str = ANY_LANGUAGE, models: dict[RuleConfig, Rule] | None = None
) -> Rule:
    """Build the rule of a configuration.

    Args:
        config: the rule and its thresholds.
        language: ISO code of the documents' language, such as `en`; it selects word lists.
        models: rules that hold a model, by config; they are reused, and new ones are added.

    Returns:
        The rule, with its models and lists loaded.

    Raises:
        DataError: if a model or list cannot be read.
    """
    models = {} if models is None else models
    match config:  # each rule is imported where a config names it: workers start faster
        case BadWordsConfig():
            from llmsys.data_pipeline.rules.bad_words import BadWordsRule

            return BadWordsRule(config, language)
        case FastTextClassifierConfig() | LinearClassifierConfig():
            from llmsys.data_pipeline.rules.classifier import ClassifierRule

            return models.get(config) or models.setdefault(config, ClassifierRule(config))
        case EncoderClassifierConfig():
            from llmsys.data_pipeline.rules.encoder_classifier import EncoderClassifierRule

            return models.get(config) or models.setdefault(config, EncoderClassifierRule(config))
        case PerplexityConfig():
            from llmsys.data_pipeline.rules.perplexity import PerplexityRule

            return models.get(config) or models.setdefault(config, PerplexityRule(config))
        case GopherRepetitionConfig():
            from llmsys.data_pipeline.rules.gopher_repetition import GopherRepetitionRule

            return GopherRepetitionRule(config)
        case GopherQualityConfig():
            from llmsys.data_pipeline.rules.gopher_quality import GopherQualityRule

            return GopherQualityRule(config)
        case C4Config() | C4DatatroveConfig():
            from llmsys.data_pipeline.rules.c4 import C4Rule

            return C4Rule(config)
        case C4DolmaConfig():
            from llmsys.data_pipeline.rules.c4 import C4DolmaRule

            return C4DolmaRule(config)
        case LineCorrectionsConfig():
            from llmsys.data_pipeline.rules.line_corrections import LineCorrectionsRule

            return LineCorrectionsRule(config)
        case FinewebQualityConfig():
            from llmsys.data_pipeline.rules.fineweb_quality import FinewebQualityRule

            return FinewebQualityRule(config)
        case NativeTextConfig():
            from llmsys.data_pipeline.rules.native_text import NativeTextRule

            return NativeTextRule(config)
        case SourceCodeConfig():
            from llmsys.data_pipeline.rules.source_code import SourceCodeRule

            return SourceCodeRule(config)
        case PythonRuleConfig() | AnnotatorConfig() | MapperConfig():
            return _load_python_rule(config)
        case unreachable:
            assert_never(unreachable)


def _load_python_rule(config: PythonRuleConfig | AnnotatorConfig | MapperConfig) -> Rule:
    from llmsys.data_pipeline.rules.python_document import LoadedAnnotator, LoadedMapper
    from llmsys.data_pipeline.rules.python_rule import LoadedPythonRule

    match config:
        case PythonRuleConfig():
            return LoadedPythonRule(config)
        case AnnotatorConfig():
            return LoadedAnnotator(config)
        case MapperConfig():
            return LoadedMapper(config)
        case unreachable:
            assert_never(unreachable)


def list_thresholds(config: RuleConfig, language: str = ANY_LANGUAGE) -> Sequence[ThresholdTest]:
    """List the tests of a rule that compare a statistic with a threshold, without loading its
    models and lists.

    Args:
        config: the rule and its thresholds.
        language: ISO code of the documents' language, such as `en`.

    Returns:
        The tests, in the order in which they apply.
    """
    match config:
        case FastTextClassifierConfig() | LinearClassifierConfig():
            from llmsys.data_pipeline.rules.classifier import list_classifier_thresholds

            return list_classifier_thresholds(config)
        case EncoderClassifierConfig():
            from llmsys.data_pipeline.rules.encoder_folder import list_score_limits

            return list_score_limits(config)
        case PerplexityConfig():
            from llmsys.data_pipeline.rules.perplexity import list_perplexity_thresholds

            return list_perplexity_thresholds(config)
        case SourceCodeConfig():
            from llmsys.data_pipeline.rules.source_code import list_source_code_limits

            return list_source_code_limits(config)
        case AnnotatorConfig() | MapperConfig():
            return ()
        case BadWordsConfig():
            return build_rule(config.model_copy(update={"word_lists": ()}), language).limits
        case (
            GopherRepetitionConfig()
            | GopherQualityConfig()
            | C4Config()
            | C4DatatroveConfig()
            | C4DolmaConfig()
            | LineCorrectionsConfig()
            | FinewebQualityConfig()
            | NativeTextConfig()
            | PythonRuleConfig()
        ):
            return build_rule(config, language).limits
        case unreachable:
            assert_never(unreachable)


def _iter_slices(texts: pa.Array) -> Iterator[list[str]]:
    """Yield at least one list of consecutive texts, of a bounded number of bytes or one longer
    text.
    """
    piece: list[str] = []
    size = 0
    for text in texts.to_pylist():
        if piece and size + len(text) > _SLICE_BYTES:
            yield piece
            piece = []
            size = 0
        piece.append(text)
        size += len(text)
    yield piece


def _build_outcome(name: str, verdicts: RuleVerdicts, texts: Sequence[str]) -> RuleOutcome:
    """Convert verdicts to Arrow columns."""
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
        statistics={
            name: pa.array(column[keep], pa.float32())
            for name, column in verdicts.statistics.items()
        },
        changes={name: int(column[keep].sum()) for name, column in verdicts.changes.items()},
        columns={name: column.filter(pa.array(keep)) for name, column in verdicts.columns.items()},
    )


def _build_match_column(verdicts: RuleVerdicts) -> pa.StringArray:
    number = len(verdicts.failed_D)
    if not verdicts.matches:
        return pa.nulls(number, pa.string())
    return pa.array(map(verdicts.matches.get, range(number)), pa.string())


def _join_outcomes(outcomes: Sequence[RuleOutcome]) -> RuleOutcome:
    """Concatenate the outcomes of slices."""
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
            name: pa.concat_arrays([outcome.statistics[name] for outcome in outcomes])
            for name in first.statistics
        },
        changes={
            name: sum(outcome.changes[name] for outcome in outcomes) for name in first.changes
        },
        columns={
            name: pa.concat_arrays([outcome.columns[name] for outcome in outcomes])
            for name in first.columns
        },
    )

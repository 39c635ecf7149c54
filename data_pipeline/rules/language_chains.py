"""Rule chains per language: each document is judged by the word splitter and thresholds of its
language.

Reads a column of texts and a column of language codes; returns outcomes in the order of the
documents, as `RuleChain` does. Languages with the same word splitter share its cache.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.language import (
    DEFAULT,
    LanguageRules,
    SpacedWordsConfig,
    Words,
    parse_language_rules,
)
from llmsys.config.quality_rules import RuleConfig
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import Rule, RuleOutcome, WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import build_word_tokenizer

Rows = npt.NDArray[np.int64]

# Word caches are bounded for all languages together; a single language has the default cache of
# `WordSplitter`.
_MEMO_CHUNKS = 500_000
_FEWEST_CHUNKS = 20_000
_CHUNK_CHARACTERS = 16

NO_RULES = {DEFAULT: LanguageRules(words=SpacedWordsConfig(), rules=())}


@lru_cache(maxsize=2)
def get_language_chains(rules: str, files: tuple[str, ...] = ()) -> "LanguageRuleChains":
    """Return the rule chains of a process, cached across files because they cache how words are
    split.

    Args:
        rules: the rules per language, as `serialize_language_rules` writes them.
        files: digests of lists and models, so that changed files are loaded again.

    Returns:
        The chains.
    """
    return LanguageRuleChains(parse_language_rules(rules))


class LanguageRuleChains:
    """One `RuleChain` per language, built on the first document of that language.

    Args:
        rules: the rules of each language by code; `default` is for all others.
    """

    def __init__(self, rules: Mapping[str, LanguageRules]) -> None:
        self._rules = rules
        self._chains: dict[str, RuleChain] = {}
        self._splitters: dict[Words, WordSplitters] = {}
        kinds = len({profile.words for code, profile in rules.items() if code != DEFAULT})
        self._memo_chunks = max(_FEWEST_CHUNKS, _MEMO_CHUNKS // max(1, kinds))
        self._models: dict[RuleConfig, Rule] = {}

    def list_columns(self) -> list[pa.Field]:
        """Return the columns that the rules add, such as gopher_quality.words, in the order of the
        rules.
        """
        outcomes = self._get_chain(next(iter(self._rules))).apply(pa.array([], pa.large_string()))
        return [
            pa.field(f"{outcome.rule}.{name}", column.type)
            for outcome in outcomes
            for name, column in (outcome.statistics | outcome.columns).items()
        ]

    def apply(
        self, texts: pa.Array, codes: pa.Array, documents: pa.RecordBatch | None = None
    ) -> list[RuleOutcome]:
        """Apply the rules of each text's language.

        Args:
            texts: D texts without nulls.
            codes: The language code of each text. A code without rules has those of `default`.
            documents: The other columns, for rules of the user's own code.

        Returns:
            One outcome per rule in order. The first covers all texts; each later one covers those
            that the rules before it kept.
        """
        known = [code if code in self._rules else DEFAULT for code in codes.to_pylist()]
        names = sorted(set(known))
        if len(names) < 2:
            name = names[0] if names else next(iter(self._rules))
            return self._get_chain(name).apply(texts, documents)
        language = np.array([names.index(code) for code in known], np.int64)
        rows = [np.flatnonzero(language == number) for number in range(len(names))]
        parts = [
            self._get_chain(name).apply(
                texts.take(pa.array(own)), documents and documents.take(pa.array(own))
            )
            for name, own in zip(names, rows, strict=True)
        ]
        return _merge_outcomes(parts, rows)

    def _get_chain(self, code: str) -> RuleChain:
        if code not in self._chains:
            own = self._rules[code]
            # languages with equal word settings share a splitter and its cache
            if own.words not in self._splitters:
                self._splitters[own.words] = self._build_splitters(own.words)
            self._chains[code] = RuleChain(
                own.rules, self._splitters[own.words], code, self._models
            )
        return self._chains[code]

    def _build_splitters(self, words: Words) -> WordSplitters:
        characters = self._memo_chunks * _CHUNK_CHARACTERS
        chunks = build_word_tokenizer(words)
        return WordSplitters(
            WordSplitter(chunks, memo_chunks=self._memo_chunks, memo_characters=characters)
        )


def _merge_outcomes(
    parts: Sequence[Sequence[RuleOutcome]], rows: Sequence[Rows]
) -> list[RuleOutcome]:
    """Merge the outcomes of each language, for documents at `rows`, into outcomes in document
    order.
    """
    merged: list[RuleOutcome] = []
    for outcomes in zip(*parts, strict=True):
        order = np.argsort(np.concatenate(rows))
        # The next rule judges only what this one kept.
        rows = [own[_get_keep_mask(outcome)] for own, outcome in zip(rows, outcomes, strict=True)]
        merged.append(_join_outcomes(outcomes, order, np.argsort(np.concatenate(rows))))
    return merged


def _join_outcomes(outcomes: Sequence[RuleOutcome], order: Rows, kept_order: Rows) -> RuleOutcome:
    """Join outcomes of one rule; `order` sorts its rows and `kept_order` those of kept
    documents.
    """

    def concat_column(arrays: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return pa.concat_arrays(arrays).take(pa.array(rows))

    first = outcomes[0]
    return RuleOutcome(
        rule=first.rule,
        keep=concat_column([outcome.keep for outcome in outcomes], order),
        test=concat_column([outcome.test for outcome in outcomes], order),
        value=concat_column([outcome.value for outcome in outcomes], order),
        threshold=concat_column([outcome.threshold for outcome in outcomes], order),
        match=concat_column([outcome.match for outcome in outcomes], order),
        texts=concat_column([outcome.texts for outcome in outcomes], kept_order),
        statistics={
            name: concat_column([outcome.statistics[name] for outcome in outcomes], kept_order)
            for name in first.statistics
        },
        changes={
            name: sum(outcome.changes.get(name, 0) for outcome in outcomes)
            for name in first.changes
        },
        columns={
            name: concat_column([outcome.columns[name] for outcome in outcomes], kept_order)
            for name in first.columns
        },
    )


def _get_keep_mask(outcome: RuleOutcome) -> npt.NDArray[np.bool_]:
    return np.asarray(outcome.keep.to_numpy(zero_copy_only=False), np.bool_)

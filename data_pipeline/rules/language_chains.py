"""A chain of rules per language: each document is judged by the words and thresholds of its own language.

Reads a column of texts and one of language codes, gives the outcomes of the rules in the order of the documents, as
`RuleChain` does for one language. Languages whose words are found in the same way share what is remembered of words.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.rules.chain import RuleChain
from data_pipeline.rules.document_batch import WordSplitters
from data_pipeline.rules.verdict import Rule, RuleOutcome
from data_pipeline.text.word_splitter import WordSplitter
from data_pipeline.text.word_tokenizers import build_word_tokenizer
from llmsys.config.language import DEFAULT, LanguageRules, SpacedWordsConfig, Words, parse_language_rules
from llmsys.config.quality_rules import RuleConfig

Rows = npt.NDArray[np.int64]

# What is remembered of words is bounded for all languages together; one language has what `WordSplitter` has alone.
_MEMO_CHUNKS, _FEWEST_CHUNKS, _CHUNK_CHARACTERS = 500_000, 20_000, 16

NO_RULES = {DEFAULT: LanguageRules(words=SpacedWordsConfig(), rules=())}


@lru_cache(maxsize=1)
def get_language_chains(rules: str, files: tuple[str, ...] = ()) -> "LanguageRuleChains":
    """The chains of a `serialize_language_rules` text, kept from file to file: they remember how words are split.

    `files` are the digests of lists and models: changed ones are read again.
    """
    return LanguageRuleChains(parse_language_rules(rules))


class LanguageRuleChains:
    """One `RuleChain` per language, made when a document of the language comes.

    Args:
        rules: what to ask of each language, by code; `default` stands for all others.
    """

    def __init__(self, rules: Mapping[str, LanguageRules]) -> None:
        self._rules = rules
        self._chains: dict[str, RuleChain] = {}
        self._splitters: dict[Words, WordSplitters] = {}
        kinds = len({one.words for code, one in rules.items() if code != DEFAULT})
        self._memo_chunks = max(_FEWEST_CHUNKS, _MEMO_CHUNKS // max(1, kinds))
        self._models: dict[RuleConfig, Rule] = {}

    def list_statistics(self) -> list[str]:
        """Names of the statistics, such as gopher_quality.words, in the order of the rules."""
        outcomes = self._get_chain(next(iter(self._rules))).apply(pa.array([], pa.large_string()))
        return [f"{outcome.rule}.{name}" for outcome in outcomes for name in outcome.statistics]

    def apply(self, texts: pa.Array, codes: pa.Array) -> list[RuleOutcome]:
        """Judge texts whose languages are given; the first outcome is over all of them."""
        known = [code if code in self._rules else DEFAULT for code in codes.to_pylist()]
        names = sorted(set(known))
        if len(names) < 2:
            return self._get_chain(names[0] if names else next(iter(self._rules))).apply(texts)
        language = np.array([names.index(code) for code in known], np.int64)
        rows = [np.flatnonzero(language == number) for number in range(len(names))]
        parts = [self._get_chain(name).apply(texts.take(pa.array(one))) for name, one in zip(names, rows, strict=True)]
        return _merge_outcomes(parts, rows)

    def _get_chain(self, code: str) -> RuleChain:
        if code not in self._chains:
            own = self._rules[code]
            if own.words not in self._splitters:
                self._splitters[own.words] = self._build_splitters(own.words)
            self._chains[code] = RuleChain(own.rules, self._splitters[own.words], code, self._models)
        return self._chains[code]

    def _build_splitters(self, words: Words) -> WordSplitters:
        characters = self._memo_chunks * _CHUNK_CHARACTERS
        chunks = build_word_tokenizer(words)
        return WordSplitters(WordSplitter(chunks, memo_chunks=self._memo_chunks, memo_characters=characters))


def _merge_outcomes(parts: Sequence[Sequence[RuleOutcome]], rows: Sequence[Rows]) -> list[RuleOutcome]:
    """The outcomes of each language, for documents at `rows`, as outcomes over all of them in their order."""
    merged: list[RuleOutcome] = []
    for outcomes in zip(*parts, strict=True):
        order = np.argsort(np.concatenate(rows))
        rows = [one[_get_keep_mask(outcome)] for one, outcome in zip(rows, outcomes, strict=True)]
        merged.append(_join_outcomes(outcomes, order, np.argsort(np.concatenate(rows))))
    return merged


def _join_outcomes(outcomes: Sequence[RuleOutcome], order: Rows, kept_order: Rows) -> RuleOutcome:
    """Outcomes of one rule as one, its rows and those of what it kept put in order."""

    def concat_column(arrays: Sequence[pa.Array], rows: Rows) -> pa.Array:
        return pa.concat_arrays(arrays).take(pa.array(rows))

    first = outcomes[0]
    return RuleOutcome(
        rule=first.rule,
        keep=concat_column([one.keep for one in outcomes], order),
        test=concat_column([one.test for one in outcomes], order),
        value=concat_column([one.value for one in outcomes], order),
        threshold=concat_column([one.threshold for one in outcomes], order),
        match=concat_column([one.match for one in outcomes], order),
        texts=concat_column([one.texts for one in outcomes], kept_order),
        statistics={
            name: concat_column([one.statistics[name] for one in outcomes], kept_order) for name in first.statistics
        },
        changes={name: sum(one.changes.get(name, 0) for one in outcomes) for name in first.changes},
    )


def _get_keep_mask(outcome: RuleOutcome) -> npt.NDArray[np.bool_]:
    return np.asarray(outcome.keep.to_numpy(zero_copy_only=False), np.bool_)

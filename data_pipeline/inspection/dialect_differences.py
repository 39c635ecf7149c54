"""Compare dialects of the same rules on the documents of a config.

Reads the texts that an earlier preparation extracted, or extracts them from the inputs. Applies URL
filter, Unicode repair and language identification as preparation does, then each rule in each
dialect, with the words and the profile of the document's language.

Invariants:
- Counts and examples do not depend on the order of the inputs.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.data import CrawlConfig
from llmsys.config.language import DEFAULT, Words, parse_language_rules
from llmsys.data_pipeline.core.funnel import format_reason
from llmsys.data_pipeline.core.task_record import list_extracted_texts
from llmsys.data_pipeline.graph.resource_files import list_rule_libraries
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.readers.input_files import InputFiles, find_input_files
from llmsys.data_pipeline.rules.chain import build_rule
from llmsys.data_pipeline.rules.dialects import translate_rules
from llmsys.data_pipeline.rules.rule import DocumentBatch, Rule, RuleVerdicts, WordSplitters
from llmsys.data_pipeline.stages.apply_rules import prepare_rule_input
from llmsys.data_pipeline.stages.extract_text import extract_file
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import build_word_tokenizer
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import ConfigError

KEPT = "kept"
ANY = "all together"
EXAMPLES = 3


@dataclass(frozen=True, order=True)
class DisagreementExample:
    """One document on which two dialects differ, with the sentence of each."""

    id: str
    url: str
    sentences: tuple[str, str]


@dataclass
class DialectDifference:
    """The decisions of two dialects of one rule, or of all rules together.

    Attributes:
        rule: name of the family of rules.
        dialects: the two dialects.
        verdicts: number of documents by (kept by the first, kept by the second).
        tests: number of differing documents by (test of the first, test of the second), `kept`
            where one keeps.
        examples: some documents for each pair of tests, those with the smallest ids.
    """

    rule: str
    dialects: tuple[str, str]
    verdicts: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    tests: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], list[DisagreementExample]] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Number of judged documents."""
        return self.verdicts.total()

    @property
    def num_differing(self) -> int:
        """Number of documents that one keeps and the other drops."""
        return self.verdicts[True, False] + self.verdicts[False, True]

    def add_document(self, tests: tuple[str, str], example: DisagreementExample) -> None:
        """Count one document."""
        kept = (tests[0] == KEPT, tests[1] == KEPT)
        self.verdicts[kept] += 1
        if kept[0] != kept[1]:
            self.tests[tests] += 1
            found = self.examples.setdefault(tests, [])
            found.append(example)
            found.sort()
            del found[EXAMPLES:]


def compare_dialects(data: CrawlConfig, dialects: Sequence[str]) -> list[DialectDifference]:
    """Compare the first dialect with each of the others.

    Args:
        data: the config: inputs, rules and languages.
        dialects: two or more of `DIALECTS`.

    Returns:
        A comparison per other dialect and family of rules, and for all families together.

    Raises:
        ConfigError: if a dialect does not exist, or there are fewer than two.
        DataError: if there is no input.
    """
    if len(set(dialects)) < 2:
        raise ConfigError(
            f"{','.join(dialects)} names {len(set(dialects))} dialect. Give two, such as "
            "datatrove,dolma."
        )
    list_rule_libraries(data)  # fails early if a rule's library is not installed
    judges = _DialectJudge(data, dialects)
    families = list(translate_rules(data.rules, dialects[0]))
    differences = {
        (other, family): DialectDifference(family, (dialects[0], other))
        for other in dialects[1:]
        for family in [*families, *([ANY] if len(families) > 1 else [])]
    }
    for documents in _iter_language_batches(_iter_documents(data)):
        verdicts = judges.judge_documents(documents)
        names = list(
            zip(
                documents.column("id").to_pylist(), documents.column("url").to_pylist(), strict=True
            )
        )
        for (other, family), difference in differences.items():
            first = verdicts[dialects[0]][family]
            second = verdicts[other][family]
            for row, (name, url) in enumerate(names):
                tests = (first.tests[row], second.tests[row])
                sentences = (
                    first.format_sentence(row, tests[1]),
                    second.format_sentence(row, tests[0]),
                )
                difference.add_document(tests, DisagreementExample(name, url, sentences))
    return list(differences.values())


def _iter_language_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the documents of each batch, language by language."""
    for batch in batches:
        codes = batch.column("language")
        for code in sorted(set(codes.to_pylist())):
            yield batch.filter(pc.equal(codes, code))


class _DialectJudge:
    """The rules in each dialect per language, with the word splitter of the language."""

    def __init__(self, data: CrawlConfig, dialects: Sequence[str]) -> None:
        own = {dialect: translate_rules(data.rules, dialect) for dialect in dialects}
        self._names = {dialect: list(rules) for dialect, rules in own.items()}
        self._rules_by_language = {
            dialect: parse_language_rules(serialize_rules_by_language(data, tuple(rules.values())))
            for dialect, rules in own.items()
        }
        self._built: dict[str, dict[str, dict[str, Rule]]] = {}
        self._splitters: dict[Words, WordSplitters] = {}

    def judge_documents(
        self, documents: pa.RecordBatch
    ) -> dict[str, dict[str, "_DialectVerdicts"]]:
        """Return the verdicts of each dialect and family on documents of one language."""
        code = documents.column("language")[0].as_py()
        rules = {
            dialect: own.get(code, own[DEFAULT]) for dialect, own in self._rules_by_language.items()
        }
        if code not in self._built:
            self._built[code] = {
                dialect: {
                    name: build_rule(rule, code)
                    for name, rule in zip(self._names[dialect], own.rules, strict=True)
                }
                for dialect, own in rules.items()
            }
        words = next(iter(rules.values())).words
        if words not in self._splitters:
            self._splitters[words] = WordSplitters(WordSplitter(build_word_tokenizer(words)))
        batch = DocumentBatch(documents.column("text").to_pylist(), self._splitters[words])
        return {dialect: _judge_batch(own, batch) for dialect, own in self._built[code].items()}


@dataclass(frozen=True)
class _DialectVerdicts:
    """The verdicts of one dialect of one family on a batch."""

    rules: Sequence[tuple[Rule, RuleVerdicts]]
    tests: list[str]

    def format_sentence(self, row: int, asked: str) -> str:
        """Format the reason of a drop; for a kept document, the value that the other dialect's
        test measures.
        """
        for rule, verdicts in self.rules:
            number = int(verdicts.failed_D[row])
            if number >= 0:
                value, threshold = (
                    float(column[row]) for column in (verdicts.values_D, verdicts.thresholds_D)
                )
                return format_reason(
                    rule.kind, verdicts.tests[number], *_replace_nan_with_none(value, threshold)
                )
        for rule, verdicts in self.rules:
            for limit in rule.limits:
                if limit.test == asked.removeprefix(f"{rule.kind}: "):
                    value = float(verdicts.statistics[limit.statistic][row])
                    return (
                        f"{KEPT}: {limit.test} {value:.4g}, drops {limit.drop_side} "
                        f"{limit.threshold:g}"
                    )
        return KEPT if asked == KEPT else f"{KEPT}: has no such test"


def _replace_nan_with_none(value: float, threshold: float) -> tuple[float | None, float | None]:
    return (None, None) if np.isnan(value) else (value, threshold)


def _judge_batch(rules: Mapping[str, Rule], batch: DocumentBatch) -> dict[str, _DialectVerdicts]:
    """Return the verdicts of each rule, and of all together: the first that drops."""
    judged = [(family, rule, rule.apply(batch)) for family, rule in rules.items()]
    tests = {family: _list_failed_tests(verdicts, "") for family, _, verdicts in judged}
    named = [_list_failed_tests(verdicts, f"{rule.kind}: ") for _, rule, verdicts in judged]
    together = [
        next((test for test in row if test != KEPT), KEPT) for row in zip(*named, strict=True)
    ]
    alone = {
        family: _DialectVerdicts([(rule, verdicts)], tests[family])
        for family, rule, verdicts in judged
    }
    return alone | {
        ANY: _DialectVerdicts([(rule, verdicts) for _, rule, verdicts in judged], together)
    }


def _list_failed_tests(verdicts: RuleVerdicts, prefix: str) -> list[str]:
    return [
        KEPT if number < 0 else prefix + verdicts.tests[number]
        for number in verdicts.failed_D.tolist()
    ]


def _iter_documents(data: CrawlConfig) -> Iterator[pa.RecordBatch]:
    """Yield the documents as they reach the rules, from stored texts where there are any."""
    stored = list_extracted_texts(data.folder)
    for path in stored:
        yield from _iter_rule_inputs(path, data)
    files = InputFiles([], {}) if stored else find_input_files(data)
    for source in files.paths:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "texts.arrow")
            unread = path.with_suffix(".unread")
            extract_file(
                _ignore_progress,
                source=source,
                output=path,
                unread=unread,
                config=data.extract,
                read=files.get_read_config(source, data.read),
                urls=data.url,
            )
            yield from _iter_rule_inputs(path, data)


def _iter_rule_inputs(path: Path, data: CrawlConfig) -> Iterator[pa.RecordBatch]:
    for texts in read_batches(path):
        yield prepare_rule_input(texts, data)


def _ignore_progress(done: float, dropped: int) -> None:
    """Ignore progress."""

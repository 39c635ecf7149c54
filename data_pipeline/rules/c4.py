"""C4's rule on lines and pages (Raffel et al. 2020), as the original code, datatrove or dolma
implements it.

The original and datatrove: remove lines that are not sentences or are about cookies and scripts;
drop pages with code or filler text, or with too few sentences left. The remaining lines are the new
text. A page test sees only lines that no line test removed, so a brace in a removed line drops
nothing.

Both dialects count sentences with spaCy's sentencizer; the original code uses NLTK's.

dolma (tagger c4_v2 and its published mixing): drop pages that contain `{`, `lorem ipsum` or
`javascript` anywhere, and remove lines from the others. The remaining lines are unchanged: each
keeps its white space and its newline."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from llmsys.config.line_rules import C4Config, C4DatatroveConfig, C4DolmaConfig
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    prepend_test,
)
from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.text.word_columns import LineColumns, WordSplitter

_DOLMA_PAGE_TESTS = {"curly bracket": "{", "lorem ipsum": "lorem ipsum", "javascript": "javascript"}
_NO_MARK = "line taken out: no end mark"
_FEW_WORDS = "line taken out: too few words"


class C4DolmaRule:
    """A rule that drops pages and removes lines."""

    kind = "c4_dolma"
    limits: tuple[ThresholdTest, ...] = ()

    def __init__(self, config: C4DolmaConfig) -> None:
        self._config = config
        self._tests = {
            test: phrase
            for test, phrase in _DOLMA_PAGE_TESTS.items()
            if config.curly_brackets == "drop_page" or phrase != "{"
        }

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts and the rewritten texts."""
        pages = [
            self._clean_page(text, batch.splitters.language.split_chunks) for text in batch.texts
        ]
        counts = np.array([page[1:] for page in pages], np.int64).reshape(len(pages), 4)
        lines, no_mark, few_words, kept = counts.T
        statistics = {
            "kept_lines": kept.astype(np.float64),
            "lines_taken_out": (lines - kept).astype(np.float64),
        }
        verdicts = apply_thresholds(self.limits, statistics, len(batch))
        lower = [text.lower() for text in batch.texts]
        verdicts = prepend_test(verdicts, "no line left", kept == 0)
        # Each is put in front of the others: the first test is put there last.
        for test, phrase in reversed(self._tests.items()):
            verdicts = prepend_test(
                verdicts, test, np.array([phrase in text for text in lower], np.bool_)
            )
        changes = {_NO_MARK: no_mark, _FEW_WORDS: few_words}
        return replace(verdicts, texts=[page[0] for page in pages], changes=changes)

    def _clean_page(
        self, text: str, split: Callable[[str], list[str]]
    ) -> tuple[str, int, int, int, int]:
        """Return the remaining text and the counts of lines: all, without an end mark, with too
        few words, kept.
        """
        config = self._config
        lines = text.split("\n")
        kept: list[int] = []
        no_mark = few_words = 0
        for number, line in enumerate(lines):
            stripped = line.strip()
            if config.end_marks and not stripped.endswith(config.end_marks):
                no_mark += 1
            elif len(split(stripped)) < config.min_words_per_line:
                few_words += 1
            else:
                kept.append(number)
        # Every line but the last of a text has its newline.
        left = "".join(lines[number] + "\n" * (number < len(lines) - 1) for number in kept)
        return left, len(lines), no_mark, few_words, len(kept)


_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_ELLIPSIS = "..."
_FILLER = "lorem ipsum"
_SCRIPT = "javascript"
_BRACE = "{"
_POLICY = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)

_TAKEN_OUT = ("word too long", "no end mark", "too few words", "javascript", "policy")
_WITHOUT_CITATIONS = "line without its citations"
_PAGE_TESTS = ("lorem ipsum", "curly bracket")


@dataclass(slots=True)
class _Page:
    """The remaining lines of one page."""

    lines: list[str] = field(default_factory=list)
    # numbers of the lines that are kept unchanged
    unchanged: list[int] = field(default_factory=list)
    shortened: list[str] = field(default_factory=list)  # lines without their citations
    taken_out: dict[str, int] = field(default_factory=dict)
    failed: str = ""


class C4Rule:
    """A rule that removes lines and drops pages."""

    def __init__(self, config: C4Config | C4DatatroveConfig) -> None:
        self.kind = config.kind
        self._config = config
        # The original counts the words of a line after citations are removed, datatrove before.
        self._counts_before = config.kind == "c4_datatrove"
        self._brace = _BRACE if config.curly_brackets == "drop_page" else None
        self.limits = [ThresholdTest("sentences", "sentences", "below", config.min_sentences)]
        if isinstance(config, C4Config) and config.max_page_characters:
            self.limits.insert(
                0, ThresholdTest("characters", "characters", "above", config.max_page_characters)
            )

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts and the rewritten texts."""
        splitter = batch.splitters.language
        documents = [text.splitlines() for text in batch.texts]
        measured = splitter.compute_line_columns(batch.texts, documents)
        chunks = measured.group_by_document(measured.chunks_L)
        pages = [
            self._clean_page(*columns, splitter)
            for columns in zip(batch.texts, documents, chunks, strict=True)
        ]
        changes = _count_changes(batch, pages)
        words, sentences = _count_words_and_sentences(pages, measured, splitter)
        statistics = {
            "characters": batch.character_counts.astype(np.float64),
            "sentences": sentences.astype(np.float64),
            "kept_lines": batch.to_counts(len(page.lines) for page in pages).astype(np.float64),
            "lines_taken_out": batch.to_counts(
                sum(page.taken_out.values()) for page in pages
            ).astype(np.float64),
            "lines_without_citations": changes[_WITHOUT_CITATIONS].astype(np.float64),
        }
        verdicts = _add_page_tests(apply_thresholds(self.limits, statistics, len(batch)), pages)
        return replace(
            verdicts,
            texts=["\n".join(page.lines).strip() for page in pages],
            words=words,
            changes=changes,
        )

    def _clean_page(
        self, text: str, lines: Sequence[str], chunks: Sequence[int], splitter: WordSplitter
    ) -> _Page:
        """Apply the line tests to a text whose words per line are `chunks`."""
        page = _Page()
        # one search of the text saves one of every line
        suspicious = _can_hold_phrase(text, self._brace)
        for number, (whole_line, before) in enumerate(zip(lines, chunks, strict=True)):
            line = whole_line.strip()
            after = before
            is_shorter = False
            if "[" in line and (shorter := _CITATION.sub("", line)) != line:
                line = shorter
                after = len(splitter.split_chunks(shorter))
                is_shorter = True
            reason = self._find_removal_reason(
                line, whole_line, before if self._counts_before else after, splitter
            )
            if not reason and suspicious:
                reason = _find_phrase_reason(line, self._brace)
            if reason in _PAGE_TESTS:
                # The page is dropped, so that the lines after this one do not count.
                page.failed = reason
                break
            if reason:
                page.taken_out[reason] = page.taken_out.get(reason, 0) + 1
                continue
            page.lines.append(line)
            if is_shorter:
                page.shortened.append(line)
            else:
                page.unchanged.append(number)
        return page

    def _find_removal_reason(
        self, line: str, whole_line: str, num_words: int, splitter: WordSplitter
    ) -> str:
        """Return the reason why the form of a line removes it, "" if it stays."""
        config = self._config
        if len(line) > config.max_word_length < max(map(len, splitter.split_chunks(whole_line))):
            return "word too long"
        # An ellipsis ends with an end mark, and ends no sentence.
        if config.end_marks and (not line.endswith(config.end_marks) or line.endswith(_ELLIPSIS)):
            return "no end mark"
        return "too few words" if num_words < config.min_words_per_line else ""


def _count_words_and_sentences(
    pages: Sequence[_Page], measured: LineColumns, splitter: WordSplitter
) -> tuple[Integers, Integers]:
    """Return the words and sentences in the remaining lines, per page."""
    shortened = [line for page in pages for line in page.shortened]
    shorter = splitter.compute_line_columns(shortened, [[line] for line in shortened])
    whole_lines = np.array([len(page.unchanged) for page in pages], np.int64)
    numbers = np.fromiter(
        chain.from_iterable(page.unchanged for page in pages), np.int64, int(whole_lines.sum())
    )
    # From line numbers in a document to those in the batch.
    numbers += np.repeat(measured.offsets[:-1], whole_lines)
    page_of_whole = np.repeat(np.arange(len(pages)), whole_lines)
    page_of_shorter = np.repeat(np.arange(len(pages)), [len(page.shortened) for page in pages])

    def sum_per_page(whole_L: Integers, shorter_L: Integers) -> Integers:
        weights = np.append(whole_L[numbers], shorter_L)
        owners = np.append(page_of_whole, page_of_shorter)
        return np.bincount(owners, weights=weights, minlength=len(pages)).astype(np.int64)

    return sum_per_page(measured.words_L, shorter.words_L), sum_per_page(
        measured.sentences_L, shorter.sentences_L
    )


def _add_page_tests(verdicts: RuleVerdicts, pages: Sequence[_Page]) -> RuleVerdicts:
    """Return the verdicts with the tests on phrases, which come before the test on sentences."""
    tests = (*verdicts.tests, *_PAGE_TESTS)
    numbers = np.array([tests.index(page.failed) if page.failed else -1 for page in pages], np.int8)
    too_long = np.zeros(len(pages), np.bool_)
    if "characters" in verdicts.tests:
        too_long = verdicts.failed_D == verdicts.tests.index("characters")
    # The test on characters comes before the tests on phrases.
    fails = (numbers >= 0) & ~too_long
    return replace(
        verdicts,
        tests=tests,
        failed_D=np.where(fails, numbers, verdicts.failed_D),
        values_D=np.where(fails, np.nan, verdicts.values_D),
        thresholds_D=np.where(fails, np.nan, verdicts.thresholds_D),
    )


def _can_hold_phrase(text: str, brace: str | None) -> bool:
    """Return whether some line could hold a phrase or a brace; if not, no line needs to be
    searched.
    """
    plain = _CITATION.sub("", text) if "[" in text else text
    lower = plain.lower()
    return _has_brace(plain, brace) or any(
        phrase in lower for phrase in (_FILLER, _SCRIPT, *_POLICY)
    )


def _find_phrase_reason(line: str, brace: str | None) -> str:
    """Return the first reason in the words of a line, "" for none."""
    lower = line.lower()
    if _FILLER in lower:
        return "lorem ipsum"
    if _SCRIPT in lower:
        return "javascript"
    if _has_brace(line, brace):
        return "curly bracket"
    return "policy" if any(phrase in lower for phrase in _POLICY) else ""


def _has_brace(text: str, brace: str | None) -> bool:
    return brace is not None and brace in text


def _count_changes(batch: DocumentBatch, pages: Sequence[_Page]) -> dict[str, Integers]:
    """Return the number of removed and shortened lines per page, by reason."""
    changes = {
        f"line taken out: {reason}": batch.to_counts(
            page.taken_out.get(reason, 0) for page in pages
        )
        for reason in _TAKEN_OUT
    }
    return changes | {_WITHOUT_CITATIONS: batch.to_counts(len(page.shortened) for page in pages)}

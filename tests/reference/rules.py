"""The rules as their definitions say them: one document at a time, no shared columns, spaCy on the
whole text.

The fast rules in data_pipeline/rules must agree with these in decision, reason and rewritten text.
"""

import re
from collections import Counter
from functools import lru_cache
from typing import Any

import spacy

from llmsys.config.line_rules import C4Config, C4DatatroveConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RuleConfig,
)
from llmsys.data_pipeline.text.vocabulary import PUNCTUATION, TERMINAL_MARKS

Judgement = tuple[str | None, str]  # the test that failed (None: kept) and the text afterwards
POLICY = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


@lru_cache(maxsize=1)
def split_english_words() -> Any:
    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    return nlp


def split_words(text: str) -> list[str]:
    stripped = (token.text.strip() for token in split_english_words().tokenizer(text))
    return [word for word in stripped if word]


def split_sentences(text: str) -> list[str]:
    stripped = (sentence.text.strip() for sentence in split_english_words()(text).sents)
    return [sentence for sentence in stripped if sentence]


def judge(text: str, rule: RuleConfig) -> Judgement:
    match rule:
        case GopherRepetitionConfig():
            return find_repetition_violation(text, rule), text
        case GopherQualityConfig():
            return find_quality_violation(text, rule), text
        case C4Config() | C4DatatroveConfig():
            return find_c4_violation(text, rule)
        case FinewebQualityConfig():
            return find_fineweb_violation(text, rule), text
        case _:
            raise NotImplementedError(rule.kind)


def find_repeats(parts: list[str]) -> tuple[int, int]:
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        seen.add(part)
    return count, characters


def find_repetition_violation(text: str, rule: GopherRepetitionConfig) -> str | None:
    if not text:
        return "empty text"
    paragraphs = re.split(r"\n{2,}", text.strip())
    count, characters = find_repeats(paragraphs)
    if count / len(paragraphs) > rule.max_duplicate_paragraph_share:
        return "share of duplicate paragraphs"
    if characters / len(text) > rule.max_duplicate_paragraph_character_share:
        return "share of characters in duplicate paragraphs"
    lines = re.split(r"\n+", text)
    count, characters = find_repeats(lines)
    if count / len(lines) > rule.max_duplicate_line_share:
        return "share of duplicate lines"
    if characters / len(text) > rule.max_duplicate_line_character_share:
        return "share of characters in duplicate lines"
    words = split_words(text)
    for n in (2, 3, 4):
        grams = [" ".join(words[start : start + n]) for start in range(len(words) - n + 1)]
        if grams:
            gram, count = Counter(grams).most_common(1)[0]
            if len(gram) * count / len(text) > getattr(rule, f"max_top_{n}gram_share"):
                return f"share of characters in the most frequent {n}-gram"
    for n in range(5, 11):
        if count_scanned_ngrams(words, n) / len(text) > getattr(
            rule, f"max_duplicate_{n}gram_share"
        ):
            return f"share of characters in duplicate {n}-grams"
    return None


def count_scanned_ngrams(words: list[str], n: int) -> int:
    seen: set[str] = set()
    characters = start = 0
    while start <= len(words) - n:
        gram = "".join(words[start : start + n])
        if gram in seen:
            characters += len(gram)
            start += n
        else:
            seen.add(gram)
            start += 1
    return characters


def find_quality_violation(text: str, rule: GopherQualityConfig) -> str | None:
    words = split_words(text)
    real = [word for word in words if any(character not in PUNCTUATION for character in word)]
    if len(real) < rule.min_words or len(real) > rule.max_words:
        return "words"
    mean = sum(map(len, real)) / len(real) if real else 0.0
    if mean < rule.min_mean_word_length or mean > rule.max_mean_word_length:
        return "mean word length"
    if text.count("#") / max(len(words), 1) > rule.max_hash_ratio:
        return "hash signs per word"
    if (text.count("...") + text.count("…")) / max(len(words), 1) > rule.max_ellipsis_ratio:
        return "ellipses per word"
    lines = text.splitlines() or [""]
    if (
        sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
        > rule.max_bullet_line_share
    ):
        return "share of lines that start with a bullet"
    if (
        sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
        > rule.max_ellipsis_line_share
    ):
        return "share of lines that end with an ellipsis"
    letters = sum(any(character.isalpha() for character in word) for word in words)
    if letters / max(len(words), 1) < rule.min_alphabetic_word_share:
        return "share of words with a letter"
    if len(set(rule.stop_words) & set(words)) < rule.min_stop_words:
        return "stop words"
    return None


def find_c4_violation(text: str, rule: C4Config | C4DatatroveConfig) -> Judgement:
    kept: list[str] = []
    sentences = 0
    for line in text.splitlines():
        line = line.strip()
        words = line.split()
        if any(len(word) > rule.max_word_length for word in words):
            continue
        line = re.sub(r"\[\d*]|\[edit]|\[citation needed]", "", line)
        if rule.end_marks and (not line.endswith(rule.end_marks) or line.endswith("...")):
            continue
        if len(words if rule.kind == "c4_datatrove" else line.split()) < rule.min_words_per_line:
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return "lorem ipsum", text
        if "javascript" in lower:
            continue
        if "{" in line and rule.curly_brackets == "drop_page":
            return "curly bracket", text
        if any(phrase in lower for phrase in POLICY):
            continue
        sentences += len(split_sentences(line))
        kept.append(line)
    return ("sentences" if sentences < rule.min_sentences else None), "\n".join(kept).strip()


def find_fineweb_violation(text: str, rule: FinewebQualityConfig) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return "empty text"
    if (
        sum(line[-1] in TERMINAL_MARKS for line in lines) / len(lines)
        < rule.min_end_mark_line_share
    ):
        return "share of lines with an end mark"
    if (
        sum(len(line) <= rule.short_line_characters for line in lines) / len(lines)
        > rule.max_short_line_share
    ):
        return "share of short lines"
    if (
        find_repeats(lines)[1] / len(text.replace("\n", ""))
        > rule.max_duplicate_line_character_share
    ):
        return "share of characters in duplicate lines"
    if text.count("\n") / len(split_words(text)) > rule.max_newlines_per_word:
        return "newlines per word"
    return None

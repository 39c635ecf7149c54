"""Derive language profiles for configs/data/languages from sentences whose language is known.

    python tools/derive_profiles.py SENTENCES.jsonl.gz

SENTENCES has one {"lang": …, "text": …} a line. Writes a profile for every language without one,
and rewrites those that it wrote before (their first line says so). Stop words are the words that
occur in most sentences. The limits of the mean word length are scaled from Gopher's 3 and 10 by the
language's own mean.
"""

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import regex  # type: ignore[import-untyped]

from llmsys.config.quality_rules import Script
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "data" / "languages"
MARK = "# Derived by tools/derive_profiles.py from"
SOURCE = "the sentences of lingua's accuracy report (Wortschatz Leipzig, CC BY)"
LEAST_SHARE, FEWEST, MOST = 0.05, 8, 16  # stop words: of the sentences, and how many
# characters per word of the English sentences; Gopher's limits
ENGLISH_MEAN, ENGLISH_LIMITS = 4.9, (3, 10)
SCRIPT_SHARE = 0.05  # of the letters, for a script to be the language's own
END_MARKS = {
    "Arabic": "؟۔",
    "Armenian": "։՜՞",
    "Bengali": "।",
    "Devanagari": "।",
    "Ethiopic": "።፧",
    "Greek": ";",
    "Gujarati": "।",
    "Gurmukhi": "।",
}
ALSO = {"sr": ["Latin"], "az": ["Cyrillic"]}  # scripts of a language that the sentences do not show
NAMES = {
    "af": "Afrikaans", "am": "Amharic", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian",
    "bg": "Bulgarian",
    "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish",
    "el": "Greek",
    "eo": "Esperanto", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish",
    "ga": "Irish",
    "gu": "Gujarati", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian",
    "hy": "Armenian",
    "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ka": "Georgian", "kk": "Kazakh",
    "la": "Latin",
    "lg": "Ganda", "lt": "Lithuanian", "lv": "Latvian", "mi": "Maori", "mk": "Macedonian",
    "mn": "Mongolian",
    "mr": "Marathi", "ms": "Malay", "nb": "Norwegian Bokmål", "nl": "Dutch",
    "nn": "Norwegian Nynorsk", "om": "Oromo",
    "pa": "Punjabi", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "si": "Sinhala",
    "sk": "Slovak",
    "sl": "Slovene", "sn": "Shona", "so": "Somali", "sq": "Albanian", "sr": "Serbian",
    "st": "Sotho", "sv": "Swedish",
    "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "ti": "Tigrinya", "tl": "Tagalog",
    "tn": "Tswana",
    "tr": "Turkish", "ts": "Tsonga", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese",
    "xh": "Xhosa",
    "yo": "Yoruba", "zu": "Zulu",
}  # fmt: skip


def main() -> None:
    """Read the sentences and write the profiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", type=Path)
    by_code: defaultdict[str, list[str]] = defaultdict(list)
    text = gzip.decompress(parser.parse_args().sentences.read_bytes()).decode()
    for line in text.split("\n"):
        if line:
            one = json.loads(line)
            by_code[one["lang"]].append(one["text"])
    for code, sentences in sorted(by_code.items()):
        path = FOLDER / f"{code}.yaml"
        if not path.exists() or path.read_text().startswith(MARK):
            path.write_text(format_profile(code, sentences))


def format_profile(code: str, sentences: Sequence[str]) -> str:
    """Return the YAML of one language."""
    rules, chunks = build_splitter(code)
    words = [
        [word for found in chunks.split_words(text.split()) for word in found] for text in sentences
    ]
    mean = compute_mean_length([word for sentence in words for word in sentence])
    own = select_scripts("".join(sentences))
    own += [script for script in ALSO.get(code, []) if script not in own]
    marks = "".join(END_MARKS.get(script, "") for script in own)
    low, high = (round(mean / ENGLISH_MEAN * limit, 1) for limit in ENGLISH_LIMITS)
    lines = [
        MARK,
        f"# {SOURCE}: {len(sentences)} sentences, {mean:.1f} characters per word.",
        f"name: {NAMES[code]}",
        f"scripts: [{', '.join(own)}]",
        f"words: {{kind: spaces, rules: {rules}}}",
        f"end_marks: {format_list(['.', '?', '!', chr(34), '”', '»', *marks])}",
        f"stop_words: {format_list(select_stop_words(words))}",
        "rules:",
        "  gopher_quality:",
        f"    min_mean_word_length: {low}",
        f"    max_mean_word_length: {high}",
        "    min_alphabetic_word_share: 0.75",
        "  fineweb_quality:",
        "    max_duplicate_line_character_share: 0.1",
        "  native_text:",
        "    min_script_share: 0.7",
    ]
    return "\n".join(lines) + "\n"


def build_splitter(code: str) -> tuple[str, SpacyTokenizer]:
    """Return spaCy's rules for a language, or the multilingual ones where these need further
    packages.
    """
    for rules in (code, "xx"):
        chunks = SpacyTokenizer(rules)
        try:
            chunks.split_words(["(word)"])
        except (ImportError, ModuleNotFoundError):
            continue
        return rules, chunks
    raise SystemExit("spaCy has no rules for any language")


def compute_mean_length(words: Sequence[str]) -> float:
    """Return characters per word with a letter or digit."""
    lengths = [len(word) for word in words if any(map(str.isalnum, word))]
    return sum(lengths) / len(lengths)


def select_stop_words(sentences: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that occur in most sentences, without those that begin with a capital."""
    counts = Counter(
        word for words in sentences for word in sorted(set(words)) if word.lower() == word
    )
    common = [(word, count) for word, count in counts.most_common(60) if all(map(_is_letter, word))]
    least = LEAST_SHARE * len(sentences)
    return [word for i, (word, count) in enumerate(common[:MOST]) if i < FEWEST or count >= least]


def _is_letter(character: str) -> bool:
    return bool(regex.match(r"[\p{L}\p{M}'’]", character))


def select_scripts(text: str) -> list[str]:
    """Return the scripts with at least SCRIPT_SHARE of the letters, the largest first."""
    letters = regex.findall(r"\p{L}", text)
    joined = "".join(letters)
    counts = {
        script: len(regex.findall(rf"\p{{Script={script}}}", joined)) for script in get_args(Script)
    }
    chosen = [script for script, count in counts.items() if count >= SCRIPT_SHARE * len(letters)]
    return sorted(chosen, key=lambda script: -counts[script])


def format_list(values: Sequence[str]) -> str:
    """Return a YAML list on one line, every value quoted."""
    return "[" + ", ".join(json.dumps(value, ensure_ascii=False) for value in values) + "]"


if __name__ == "__main__":
    main()

"""Files that a config names beside the crawl: lists, models, evaluation sets.

Reads the sections of a config, gives the files and their digests, which decide what is done again. Promises: a file
that is missing is named before the crawl is read, not hours later.
"""

from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from data_pipeline.core.journal import Journal
from data_pipeline.extract.trafilatura import list_extractor_versions
from data_pipeline.language.rules_by_language import list_dictionaries
from llmsys.config.custom_rules import ANY_LANGUAGE, BadWordsConfig, FastTextClassifierConfig, PerplexityConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.quality_rules import RuleConfig
from llmsys.errors import ConfigError, DataError


def iter_resource_files(data: CrawlConfig) -> Iterator[tuple[str, Path]]:
    """Yield (key of the section, file) for every file that the sections of a crawl name."""
    sections: list[tuple[str, Any]] = [("url", data.url), ("decontaminate", data.decontaminate)]
    sections += [(f"rules.{number}", rule) for number, rule in enumerate(data.rules)]
    for key, section in sections:
        for path in getattr(section, "files", ()):
            yield f"data.{key}", path


def list_url_files(data: CrawlConfig) -> list[Path]:
    """Return the list files of URLs."""
    return [path for key, path in iter_resource_files(data) if key == "data.url"]


def list_rule_files(data: CrawlConfig) -> list[Path]:
    """Return the lists and models of rules."""
    return [path for key, path in iter_resource_files(data) if key.startswith("data.rules")]


def list_rule_libraries(data: CrawlConfig) -> list[str]:
    """Return the versions of what only some rules or languages need; ConfigError when one is not installed."""
    found = [found for rule in data.rules for found in _iter_rule_libraries(rule)]
    for name in list_dictionaries(data):
        packages, extra = _DICTIONARIES[name]
        found += [_require_package_version(package, f"the dictionary {name}", extra) for package in packages]
    return found


def _iter_rule_libraries(rule: RuleConfig) -> Iterator[str]:
    match rule:
        case FastTextClassifierConfig():
            package, extra, instead = "fasttext-predict", "fasttext", ""
        case PerplexityConfig(backend="kenlm"):
            package, extra, instead = "kenlm", "kenlm", " (cmake and a C++ compiler build it), or set reader: arpa"
        case _:
            return
    yield _require_package_version(package, f"the rule {rule.kind}", extra, instead)


# What finds the words of `words: {kind: dictionary}`, and the extra that installs it.
_DICTIONARIES = {
    "jieba": (("jieba",), "zh"),
    "sudachipy": (("SudachiPy", "SudachiDict-core"), "ja"),
    "pythainlp": (("pythainlp",), "th"),
}


def _require_package_version(package: str, what: str, extra: str, instead: str = "") -> str:
    """A package with its version; ConfigError says what needs it and how to install it."""
    try:
        return f"{package}=={metadata.version(package)}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{what} needs the package {package}, which is not installed. "
            f"Install it with: pip install 'llmsys[{extra}]'{instead}."
        ) from None


def require_languages(data: CrawlConfig, codes: Collection[str]) -> None:
    """Raise ConfigError for a list of words in a language that no document is judged by, when all languages stay."""
    for number, rule in enumerate(data.rules):
        for one in rule.word_lists if isinstance(rule, BadWordsConfig) and not data.language.languages else ():
            if one.language not in (*codes, ANY_LANGUAGE):
                raise ConfigError(
                    f"data.rules.{number}.words: no document is judged as {one.language!r}, so its list would never be "
                    f"asked. Give the language a profile in data.language.profiles, or write language: any."
                )


def require_resource_files(data: CrawlConfig) -> None:
    """Raise DataError for the first file that is not there, ConfigError for a library that is not installed."""
    list_rule_libraries(data)
    list_extractor_versions(data.extract)
    for key, path in iter_resource_files(data):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(
                f"{key}: {path} {what} (in {Path.cwd()}). Correct the path; relative ones start in the working folder."
            )


def compute_file_digests(journal: Journal, files: Sequence[Path]) -> list[str]:
    """Return the digests of files, each hashed again only when its size or time changed."""
    return [journal.get_input_digest(path) for path in files]

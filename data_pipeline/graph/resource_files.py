"""Resource files and libraries that a config names: lists, models, evaluation sets and their
versions.

Invariants:
    - A missing file or library is reported before the crawl is read, not hours later.
    - Digests of files and versions of libraries are part of task keys.
"""

from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, assert_never

from llmsys.config.cleaning import (
    PdfiumConfig,
    PythonExtractorConfig,
    TrafilaturaExtractorConfig,
)
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
from llmsys.config.data import CrawlConfig
from llmsys.config.deduplication import (
    ColumnEmbeddingsConfig,
    EncoderEmbeddingsConfig,
    SemanticDedupConfig,
)
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    LineCorrectionsConfig,
)
from llmsys.config.python_code import compute_code_digest
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    NativeTextConfig,
    RuleConfig,
)
from llmsys.config.source_code import SourceCodeConfig
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.language.rules_by_language import list_dictionaries, list_word_rules
from llmsys.data_pipeline.rules.python_document import load_python_annotator, load_python_mapper
from llmsys.data_pipeline.rules.python_rule import load_python_rule
from llmsys.data_pipeline.text.splitting_rules import has_splitting_rules
from llmsys.errors import ConfigError, DataError


def iter_resource_files(data: CrawlConfig) -> Iterator[tuple[str, Path]]:
    """List the files that the sections of a crawl name, such as word lists and models.

    Args:
        data: The section `data`.

    Yields:
        (config key, file) of each.
    """
    sections: list[tuple[str, Any]] = [("url", data.url), ("decontaminate", data.decontaminate)]
    if isinstance(data.deduplicate.semantic, SemanticDedupConfig):
        sections += [("deduplicate.semantic.embeddings", data.deduplicate.semantic.embeddings)]
    sections += [(f"rules.{number}", rule) for number, rule in enumerate(data.rules)]
    for key, section in sections:
        for path in getattr(section, "files", ()):
            yield f"data.{key}", path


def list_url_files(data: CrawlConfig) -> list[Path]:
    """Return the list files of the URL filter.

    Args:
        data: The crawl section of a run.

    Returns:
        Paths in the order of the config.
    """
    return [path for key, path in iter_resource_files(data) if key == "data.url"]


def list_rule_files(data: CrawlConfig) -> list[Path]:
    """Return the list and model files of the rules.

    Args:
        data: The crawl section of a run.

    Returns:
        Paths in the order of the config.
    """
    return [path for key, path in iter_resource_files(data) if key.startswith("data.rules")]


def list_rule_libraries(data: CrawlConfig) -> list[str]:
    """Return the versions of libraries that only some rules or languages need.

    Args:
        data: The crawl section of a run.

    Returns:
        `package==version` entries for the keys of the tasks of the stage `filter`.

    Raises:
        ConfigError: If one is not installed.
    """
    found = [found for rule in data.rules for found in _iter_rule_libraries(rule)]
    for name in list_dictionaries(data):
        packages, extra = _DICTIONARIES[name]
        found += [
            _require_package_version(package, f"the dictionary {name}", extra)
            for package in packages
        ]
    codes = [code for code in list_word_rules(data) if not has_splitting_rules(code)]
    # One entry, however many languages need it.
    return found + sorted({_require_spacy(code) for code in codes})


def _require_spacy(code: str) -> str:
    """Return spaCy's version, which splits words by the rules of a language.

    Raises:
        ConfigError: It is not installed, or has no such language.
    """
    found = _require_package_version(
        "spacy",
        f"words.rules: {code} of a language profile",
        "spacy",
        instead=", or take the rules for any language: xx",
    )
    spec = find_spec("spacy")
    # Without an import, which takes half a second.
    folders = [] if spec is None else [Path(one) for one in spec.submodule_search_locations or ()]
    files = [folder / "lang" / code / "__init__.py" for folder in folders]
    if not code.isidentifier() or not any(file.is_file() for file in files):
        raise ConfigError(
            f"words.rules: {code} of a language profile is no language of {found}. Take the code "
            "of another language, as in https://spacy.io/usage/models#languages, or xx for any "
            "that puts spaces between words."
        )
    return found


def _iter_rule_libraries(rule: RuleConfig) -> Iterator[str]:
    match rule:
        case FastTextClassifierConfig():
            package = "fasttext-predict"
            extra = "fasttext"
            instead = ""
        case EncoderClassifierConfig():
            package = "transformers"
            extra = "encoder"
            instead = ""
        case SourceCodeConfig():
            package = "pygments"
            extra = "code"
            instead = ""
        case PerplexityConfig(backend="kenlm"):
            package = "kenlm"
            extra = "kenlm"
            instead = " (cmake and a C++ compiler build it), or set backend: arpa"
        case (
            PerplexityConfig()
            | BadWordsConfig()
            | LinearClassifierConfig()
            | GopherRepetitionConfig()
            | GopherQualityConfig()
            | C4Config()
            | C4DatatroveConfig()
            | C4DolmaConfig()
            | LineCorrectionsConfig()
            | FinewebQualityConfig()
            | NativeTextConfig()
            | PythonRuleConfig()
            | AnnotatorConfig()
            | MapperConfig()
        ):
            return
        case unreachable:
            assert_never(unreachable)
    yield _require_package_version(package, f"the rule {rule.kind}", extra, instead)


def list_embedding_libraries(config: SemanticDedupConfig) -> list[str]:
    """Return the versions of libraries that compute embeddings.

    Args:
        config: The semantic duplicates.

    Returns:
        `package==version` entries for the keys of the tasks of the stage `embeddings`.

    Raises:
        ConfigError: One is not installed.
    """
    if isinstance(config.embeddings, ColumnEmbeddingsConfig):
        return []
    what = "data.deduplicate.semantic.embeddings.kind=encoder"
    return [_require_package_version("transformers", what, "encoder")]


def list_extractor_versions(data: CrawlConfig) -> list[str]:
    """Return the versions of libraries that only the configured extractor and PDF need, or the
    digest of the user's own code.

    Args:
        data: The crawl section of a run.

    Returns:
        `package==version` entries for the key of the extract tasks. Empty for what is always
        installed.

    Raises:
        ConfigError: If the library is not installed, or the user's class cannot be used.
    """
    found: list[str] = []
    if isinstance(data.read.pdf, PdfiumConfig):
        what = "data.read.pdf.kind=pdfium"
        found.append(_require_package_version("pypdfium2", what, "pdf"))
    if isinstance(data.extract, PythonExtractorConfig):
        from llmsys.data_pipeline.extract.python_extractor import load_python_extractor

        load_python_extractor(data.extract)
        found.append(compute_code_digest(data.extract))
    elif isinstance(data.extract, TrafilaturaExtractorConfig):
        from llmsys.data_pipeline.extract.extractor import get_trafilatura_version

        found.append(get_trafilatura_version())
    return found


# Packages behind `words: {kind: dictionary}`, and the extra that installs them.
_DICTIONARIES = {
    "jieba": (("jieba",), "zh"),
    "sudachipy": (("SudachiPy", "SudachiDict-core"), "ja"),
    "pythainlp": (("pythainlp",), "th"),
}


def _require_package_version(package: str, what: str, extra: str, instead: str = "") -> str:
    """Return `package==version`. Raise ConfigError with the pip command if it is not installed."""
    try:
        return f"{package}=={metadata.version(package)}"
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{what} needs the package {package}, which is not installed. "
            f"Install it with: pip install 'llmsys[{extra}]'{instead}."
        ) from None


def require_languages(data: CrawlConfig, codes: Collection[str]) -> None:
    """Check that every word list has a language that some document can have.

    Args:
        data: The crawl section of a run.
        codes: Languages with a profile.

    Raises:
        ConfigError: For the first list that would never be used. Only if `data.language.keep` is
            empty.
    """
    for number, rule in enumerate(data.rules):
        for word_list in (
            rule.word_lists
            if isinstance(rule, BadWordsConfig) and not data.language.languages
            else ()
        ):
            if word_list.language not in (*codes, ANY_LANGUAGE):
                raise ConfigError(
                    f"data.rules.{number}.words: no document is recognized as "
                    f"{word_list.language!r}, so its list would never be asked. Add a profile in "
                    "data.language.profiles, or use language: any."
                )


def require_resource_files(data: CrawlConfig) -> None:
    """Check that all resource files and libraries exist.

    Args:
        data: The crawl section of a run.

    Raises:
        DataError: For the first missing file.
        ConfigError: For a missing library.
    """
    list_rule_libraries(data)
    list_extractor_versions(data)
    semantic = data.deduplicate.semantic
    if isinstance(semantic, SemanticDedupConfig):
        list_embedding_libraries(semantic)
    for entry in (*data.inputs, *data.heldout_inputs, data.read):
        if not isinstance(entry, str) and entry.reader is not None:
            from llmsys.data_pipeline.readers.python_reader import load_python_reader

            load_python_reader(entry.reader)
    for key, path in iter_resource_files(data):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(
                f"{key}: {path} {what} (in {Path.cwd()}). Correct the path; relative paths start "
                "in the working directory."
            )
    if isinstance(semantic, SemanticDedupConfig) and isinstance(
        semantic.embeddings, EncoderEmbeddingsConfig
    ):
        from llmsys.data_pipeline.rules.encoder_folder import require_embedding_folder

        require_embedding_folder(semantic.embeddings, "data.deduplicate.semantic.embeddings")
    for number, rule in enumerate(data.rules):
        if isinstance(rule, EncoderClassifierConfig):
            from llmsys.data_pipeline.rules.encoder_folder import read_encoder_folder

            read_encoder_folder(rule, f"data.rules.{number}")
            _require_score_column(data, rule.title)
        elif isinstance(rule, SourceCodeConfig):
            from llmsys.data_pipeline.rules.source_code import list_languages

            list_languages(rule)
        elif isinstance(rule, PythonRuleConfig):
            load_python_rule(rule)
        elif isinstance(rule, AnnotatorConfig):
            load_python_annotator(rule)
        elif isinstance(rule, MapperConfig):
            load_python_mapper(rule)


def _require_score_column(data: CrawlConfig, title: str) -> None:
    """Raise ConfigError for sampling by a column that a model does not make: it would be found
    after hours of scoring.
    """
    for number, sampling in enumerate(data.sampling):
        column = sampling.column
        if column.startswith(f"{title}.") and column != f"{title}.score":
            raise ConfigError(
                f"data.sampling.{number}.column: the rule {title} makes no column {column}. Its "
                f"column is {title}.score."
            )


def compute_file_digests(journal: Journal, files: Sequence[Path]) -> list[str]:
    """Hash resource files.

    Args:
        journal: Remembers digests of unchanged files.
        files: The files.

    Returns:
        One digest per file, "" if it is unreadable.
    """
    return [journal.get_input_digest(path) for path in files]

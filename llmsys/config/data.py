"""Configuration of a dataset (`data:`): input files, pipeline stages and the layout of the token shards.

Invariants:
- `folder` and `executor` never change the bytes of a dataset.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.cleaning import (
    ArticleExtractorConfig,
    ExtractConfig,
    NoPiiReplacement,
    NoUnicodeRepair,
    NoUrlFilter,
    PiiConfig,
    ReadConfig,
    UnicodeConfig,
    UrlConfig,
)
from llmsys.config.decontamination import DecontaminateConfig, NoDecontamination
from llmsys.config.deduplication import DeduplicationConfig
from llmsys.config.executor import ExecutorConfig, LocalExecutorConfig
from llmsys.config.language import LanguageConfig
from llmsys.config.line_rules import find_name_violations
from llmsys.config.local_path import LocalPath
from llmsys.config.mixture import MixtureConfig
from llmsys.config.pairs import LabelledTextConfig, PairsConfig
from llmsys.config.quality_rules import RULE_KINDS, RuleConfig
from llmsys.config.section import Section
from llmsys.config.violation import raise_violations

# Rows of the funnel that are not rules: reserved as names of rules.
STAGES = (
    *("read", "url", "extract", "unicode", "language", "decontaminate", "pii", "documents"),
    *("url_duplicates", "exact_duplicates", "duplicate_spans", "near_duplicates", "duplicate_substrings"),
)


class HeldoutSplitConfig(Section):
    """The held-out split: documents that are evaluated and not trained on."""

    heldout_fraction: float = Field(
        0.005, ge=0, le=0.5, description="Share of the documents, chosen by the hash of their id, kept for evaluation."
    )
    seed: int = Field(0, ge=0, description="Another seed holds back other documents.")


class TokenFilesConfig(Section):
    """Layout of the token shards. The shuffle is global and depends on document ids and the seed alone."""

    shard_tokens: int = Field(100_000_000, ge=1, description="Tokens per file, about.")
    batch_tokens: int = Field(1_000_000, ge=1, description="Tokens per record batch, at least; each has a checksum.")
    seed: int = Field(0, ge=0, description="Another seed gives another order of the documents.")
    encoder: Literal["columns", "library"] = Field(
        "columns",
        description="Encode distinct parts of texts once, or ask the tokenizer's library for each text: the same ids.",
    )


class DocumentFilesConfig(Section):
    """Layout of the document files."""

    num_shards: int = Field(8, ge=1, le=4096, description="Number of files; a document's file follows from its id.")
    batch_bytes: int = Field(8_000_000, ge=1, description="UTF-8 bytes of text per record batch, about: memory in use.")
    export_formats: tuple[Literal["parquet", "jsonl.zst"], ...] = Field(
        (),
        description="Formats that documents are written in for other tools, beside the Arrow that later stages read.",
    )


class CrawlConfig(Section):
    """A dataset of documents, from crawl files to token shards."""

    kind: Literal["crawl"] = "crawl"
    name: str = Field("data", min_length=1, description="Name of the dataset, for people.")
    folder: LocalPath = Field(Path("runs/data"), description="Folder that `prepare` writes and `train` reads.")
    inputs: tuple[str, ...] = Field(
        (),
        description="Crawl files and files of documents: paths, URLs, patterns (`**` enters folders), or @ and a list.",
    )
    read: ReadConfig = Field(ReadConfig(), description="How files are read.")
    url: UrlConfig = Field(NoUrlFilter(), description="Which pages are refused by their URL, before extraction.")
    extract: ExtractConfig = Field(ArticleExtractorConfig(), description="How pages become text.")
    unicode: UnicodeConfig = Field(NoUnicodeRepair(), description="Whether damaged characters of texts are repaired.")
    language: LanguageConfig = Field(LanguageConfig(), description="Which languages stay.")
    rules: tuple[RuleConfig, ...] = Field((), description="Rules in the order in which they are asked.")
    deduplicate: DeduplicationConfig = Field(DeduplicationConfig(), description="Which duplicates are dropped.")
    decontaminate: DecontaminateConfig = Field(
        NoDecontamination(), description="Which evaluation sets must not be trained on."
    )
    pii: PiiConfig = Field(NoPiiReplacement(), description="Whether personal data are replaced.")
    split: HeldoutSplitConfig = Field(HeldoutSplitConfig(), description="What is held back for evaluation.")
    tokens: TokenFilesConfig = Field(TokenFilesConfig(), description="How token files are laid out.")
    documents: DocumentFilesConfig = Field(DocumentFilesConfig(), description="How document files are laid out.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Who does the work.")

    @model_validator(mode="after")
    def _check_rule_names(self) -> Self:
        raise_violations(find_name_violations(self.rules, (*STAGES, *RULE_KINDS)))
        return self


def list_dataset_folders(data: "DataConfig") -> tuple[Path, ...]:
    """Return the dataset folders of a run.

    Args:
        data: the `data:` section.

    Returns:
        One folder, or one per source of a mixture in their order.
    """
    return tuple(source.folder for source in data.sources) if isinstance(data, MixtureConfig) else (data.folder,)


DataConfig = Annotated[CrawlConfig | PairsConfig | LabelledTextConfig | MixtureConfig, Field(discriminator="kind")]

"""Configuration of a dataset (`data:`): input files, pipeline stages and the layout of the token shards.

Invariants:
- `folder` and `executor` never change the bytes of a dataset.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.decontamination import DecontaminateConfig, NoDecontamination
from llmsys.config.deduplication import DeduplicationConfig
from llmsys.config.executor import ExecutorConfig, LocalExecutorConfig
from llmsys.config.extraction import ArticleExtractorConfig, ExtractConfig
from llmsys.config.language import LanguageConfig
from llmsys.config.local_path import LocalPath
from llmsys.config.mixture import MixtureConfig
from llmsys.config.named_rule import find_name_violations
from llmsys.config.pairs import LabelledTextConfig, PairsConfig
from llmsys.config.pii import NoPiiReplacement, PiiConfig
from llmsys.config.quality_rules import RULE_KINDS, RuleConfig
from llmsys.config.read import ReadConfig
from llmsys.config.section import Section
from llmsys.config.unicode import NoUnicodeRepair, UnicodeConfig
from llmsys.config.url import NoUrlFilter, UrlConfig
from llmsys.config.violation import raise_violations

# Rows of the funnel that are not rules: reserved as names of rules.
STAGES = (
    *("read", "url", "extract", "unicode", "language", "decontaminate", "pii", "documents"),
    *("url_duplicates", "exact_duplicates", "duplicate_spans", "near_duplicates", "duplicate_substrings"),
)


class HeldoutSplitConfig(Section):
    """The held-out split: documents that are evaluated and not trained on."""

    heldout_fraction: float = Field(
        0.005,
        ge=0,
        le=0.5,
        description="Share of the documents held out for evaluation, selected by the hash of their id.",
    )
    seed: int = Field(0, ge=0, description="Seed of that selection.")


class TokenFilesConfig(Section):
    """Layout of the token shards. The shuffle is global and depends on document ids and the seed alone."""

    shard_tokens: int = Field(100_000_000, ge=1, description="Approximate number of tokens per file.")
    batch_tokens: int = Field(
        1_000_000, ge=1, description="Minimum tokens per record batch; each batch has a checksum."
    )
    seed: int = Field(0, ge=0, description="Seed of the document order.")
    encoder: Literal["columns", "library"] = Field(
        "columns",
        description="columns: encode each distinct part of the texts once, as arrays. library: call the tokenizer "
        "library for every text. The ids are the same.",
    )


class DocumentFilesConfig(Section):
    """Layout of the document files."""

    num_shards: int = Field(8, ge=1, le=4096, description="Number of files; the id of a document selects its file.")
    batch_bytes: int = Field(
        8_000_000, ge=1, description="Approximate UTF-8 bytes of text per record batch; bounds memory."
    )
    export_formats: tuple[Literal["parquet", "jsonl.zst"], ...] = Field(
        (),
        description="Additional formats of the documents, for other tools; later stages read Arrow.",
    )


class CrawlConfig(Section):
    """A dataset of documents, from crawl files to token shards."""

    kind: Literal["crawl"] = "crawl"
    name: str = Field("data", min_length=1, description="Display name of the dataset.")
    folder: LocalPath = Field(
        Path("runs/data"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    inputs: tuple[str, ...] = Field(
        (),
        description="Crawl files and document files: paths, URLs, glob patterns (`**` matches folders recursively), "
        "or @FILE with one per line.",
    )
    read: ReadConfig = Field(ReadConfig(), description="Reading of input files.")
    url: UrlConfig = Field(NoUrlFilter(), description="URL filter, applied before extraction.")
    extract: ExtractConfig = Field(ArticleExtractorConfig(), description="HTML-to-text extraction.")
    unicode: UnicodeConfig = Field(NoUnicodeRepair(), description="Unicode repair (ftfy).")
    language: LanguageConfig = Field(LanguageConfig(), description="Language identification and filter.")
    rules: tuple[RuleConfig, ...] = Field((), description="Rules, applied in this order.")
    deduplicate: DeduplicationConfig = Field(DeduplicationConfig(), description="Deduplication.")
    decontaminate: DecontaminateConfig = Field(
        NoDecontamination(), description="Removal of documents that contain evaluation items."
    )
    pii: PiiConfig = Field(NoPiiReplacement(), description="Replacement of personal data.")
    split: HeldoutSplitConfig = Field(HeldoutSplitConfig(), description="Held-out documents.")
    tokens: TokenFilesConfig = Field(TokenFilesConfig(), description="Layout of token files.")
    documents: DocumentFilesConfig = Field(DocumentFilesConfig(), description="Layout of document files.")
    executor: ExecutorConfig = Field(LocalExecutorConfig(), description="Executor that runs the tasks.")

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

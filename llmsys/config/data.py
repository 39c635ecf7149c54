"""Configuration of a dataset (`data:`): input files, pipeline stages and the layout of the token
shards.

A dataset is made of documents (`crawl`), of token ids (`tokens`), of chats (`chat`), of lines
(`pairs`, `labelled`), of images (`images`) or of other datasets (`mixture`). Pairs, labelled texts
and images are stored as pairs of token sequences. The target of a labelled text or image is the
index of its label.

Invariants:
- `folder` and `executor` never change the bytes of a dataset.
"""

from collections.abc import Iterator
from functools import partial
from operator import eq
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

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
from llmsys.config.custom_rules import ANY_LANGUAGE, BadWordsConfig, MapperConfig
from llmsys.config.decontamination import DecontaminateConfig, NoDecontamination
from llmsys.config.deduplication import (
    ColumnEmbeddingsConfig,
    DeduplicationConfig,
    SemanticDedupConfig,
)
from llmsys.config.document_order import DocumentOrder, HashOrder
from llmsys.config.executor import ExecutorConfig, LocalExecutorConfig
from llmsys.config.images import ImagesConfig
from llmsys.config.input_files import InputEntry
from llmsys.config.language import LanguageConfig, find_code_violations, find_name_violations
from llmsys.config.mixture import MixtureConfig
from llmsys.config.quality_rules import RULE_KINDS, RuleConfig
from llmsys.config.sampling import SamplingRule
from llmsys.config.section import FolderPath, LocalPath, Section, raise_violations
from llmsys.config.source_code import SourceCodeConfig, find_field_violations
from llmsys.errors import Violation


class PairsConfig(Section):
    """Parallel text files: line n of a target file is the translation of line n of its source file.

    Files are UTF-8, plain or .gz. A pair with an empty or unreadable side is dropped and counted.
    Training pairs longer than `max_tokens` are also dropped and counted. Held-out pairs are never
    dropped for length, because scores are compared over the full test set.
    """

    kind: Literal["pairs"] = "pairs"
    name: str = Field("pairs", min_length=1, description="Display name of the dataset.")
    folder: FolderPath = Field(
        Path("runs/pairs"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    source: tuple[LocalPath, ...] = Field((), description="Source files, one sentence per line.")
    target: tuple[LocalPath, ...] = Field((), description="Target files, one for each source file.")
    heldout_source: tuple[LocalPath, ...] = Field((), description="Held-out source files.")
    heldout_target: tuple[LocalPath, ...] = Field(
        (), description="Reference translations of the held-out source files."
    )
    max_tokens: int = Field(
        256,
        ge=2,
        description="Maximum tokens of either side of a training pair, including the end token; "
        "longer pairs are dropped.",
    )
    shard_pairs: int = Field(
        500_000, ge=1, description="Approximate number of pairs per token file."
    )
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )

    @model_validator(mode="after")
    def _check_file_pairs(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        for name, sources, targets in (
            ("target", self.source, self.target),
            ("heldout_target", self.heldout_source, self.heldout_target),
        ):
            if len(sources) != len(targets):
                yield Violation(
                    name,
                    f"{len(targets)} target files for {len(sources)} source files. Give one for "
                    "each, in their order.",
                )


class LabelledTextConfig(Section):
    """Labelled texts for classification: .tsv lines `label<TAB>text`, or .jsonl with `text` and
    `label`.

    Plain or .gz. Texts longer than `max_tokens` are cut and counted.
    """

    kind: Literal["labelled"] = "labelled"
    name: str = Field("labelled", min_length=1, description="Display name of the dataset.")
    folder: FolderPath = Field(
        Path("runs/labelled"),
        description="Dataset folder, written by `prepare` and read by `train`.",
    )
    inputs: tuple[LocalPath, ...] = Field(
        (), description="Training files: .tsv or .jsonl; .gz is decompressed."
    )
    heldout_inputs: tuple[LocalPath, ...] = Field((), description="Held-out files.")
    labels: tuple[str, ...] = Field(
        (), description="Labels in order of their ids. Empty: the labels of the files, sorted."
    )
    max_tokens: int = Field(
        256,
        ge=2,
        description="Maximum tokens of a text, including the end token; longer texts are "
        "truncated.",
    )
    shard_pairs: int = Field(
        500_000, ge=1, description="Approximate number of texts per token file."
    )
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )


# Rows of the funnel that are not rules: reserved as names of rules.
STAGES = (
    *("read", "url", "extract", "unicode", "language", "decontaminate", "pii", "documents"),
    *(
        "url_duplicates",
        "exact_duplicates",
        "repeated_segments",
        "near_duplicates",
        "semantic_duplicates",
        "duplicate_substrings",
    ),
)


class HeldoutSplitConfig(Section):
    """The held-out split: documents that are evaluated and not trained on."""

    heldout_fraction: float = Field(
        0.005,
        ge=0,
        le=0.5,
        description="Share of the documents held out for evaluation, by the hash of their id.",
    )
    seed: int = Field(0, ge=0, description="Seed of that selection.")


class TokenFilesConfig(Section):
    """Layout of the token shards. The shuffle is global and depends on document ids and the seed
    alone.
    """

    shard_tokens: int = Field(
        100_000_000, ge=1, description="Approximate number of tokens per file."
    )
    batch_tokens: int = Field(
        1_000_000, ge=1, description="Minimum tokens per record batch, which has a checksum."
    )
    seed: int = Field(0, ge=0, description="Seed of the document order.")
    encoder: Literal["columns", "library"] = Field(
        "columns",
        description="columns: encode each distinct part of the texts once, as arrays. library: "
        "call the tokenizer library for every text. The ids are the same.",
    )


def _is_own(value: object) -> bool:
    return value == "own"


class DocumentFilesConfig(Section):
    """Layout of the document files."""

    num_shards: int = Field(
        8, ge=1, le=4096, description="Number of files; the id of a document selects its file."
    )
    batch_bytes: int = Field(
        8_000_000, ge=1, description="UTF-8 bytes of text per record batch; bounds memory."
    )
    export_formats: tuple[Literal["parquet", "jsonl.zst"], ...] = Field(
        (),
        description="Additional formats of the documents, for other tools; later stages read "
        "Arrow.",
    )
    export_columns: Literal["own", "fineweb"] = Field(
        "own",
        exclude_if=_is_own,  # keys of datasets that were prepared before it
        description="Columns in these formats. own: those of the Arrow files. fineweb: FineWeb's "
        "names where there is an equivalent, and token_count.",
    )


_HASH_ORDER = HashOrder()


class CrawlConfig(Section):
    """A dataset of documents, from crawl files to token shards."""

    kind: Literal["crawl"] = "crawl"
    name: str = Field("data", min_length=1, description="Display name of the dataset.")
    folder: FolderPath = Field(
        Path("runs/data"), description="Dataset folder; `prepare` writes and `train` reads it."
    )
    inputs: tuple[InputEntry, ...] = Field(
        (),
        description="Crawl files and document files: paths, URLs, glob patterns (`**` matches "
        "folders recursively), @FILE with one per line, folders of Hugging Face's datasets, "
        "or a section with `path` and its own fields.",
    )
    heldout_inputs: tuple[InputEntry, ...] = Field(
        (),
        description="Files whose documents are held out for evaluation, and no others; without "
        "inputs, the whole dataset. Empty: split.heldout_fraction of the documents.",
    )
    read: ReadConfig = Field(ReadConfig(), description="Reading of input files.")
    url: UrlConfig = Field(NoUrlFilter(), description="URL filter, applied before extraction.")
    extract: ExtractConfig = Field(ArticleExtractorConfig(), description="HTML-to-text extraction.")
    unicode: UnicodeConfig = Field(NoUnicodeRepair(), description="Unicode repair (ftfy).")
    language: LanguageConfig = Field(
        LanguageConfig(), description="Language identification and filter."
    )
    rules: tuple[RuleConfig, ...] = Field(
        (), validate_default=False, description="Rules, applied in this order."
    )
    deduplicate: DeduplicationConfig = Field(DeduplicationConfig(), description="Deduplication.")
    decontaminate: DecontaminateConfig = Field(
        NoDecontamination(), description="Removal of evaluation items."
    )
    pii: PiiConfig = Field(NoPiiReplacement(), description="Replacement of personal data.")
    split: HeldoutSplitConfig = Field(HeldoutSplitConfig(), description="Held-out documents.")
    sampling: tuple[SamplingRule, ...] = Field(
        (),
        description="Weights and caps by column, which decide how often a document is in the "
        "training tokens. documents/ and the held-out split have each once.",
    )
    document_order: DocumentOrder = Field(
        _HASH_ORDER,
        exclude_if=partial(eq, _HASH_ORDER),  # keys of datasets that were prepared before it
        description="Order of documents in the token files.",
    )
    tokens: TokenFilesConfig = Field(TokenFilesConfig(), description="Layout of token files.")
    documents: DocumentFilesConfig = Field(
        DocumentFilesConfig(), description="Layout of document files."
    )
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )

    @field_validator("rules")
    @classmethod
    def _check_rules(
        cls, rules: tuple[RuleConfig, ...], info: ValidationInfo
    ) -> tuple[RuleConfig, ...]:
        found = list(find_name_violations(rules, (*STAGES, *RULE_KINDS)))
        codes = [
            (f"{number}.word_lists.{place}.language", words.language)
            for number, rule in enumerate(rules)
            if isinstance(rule, BadWordsConfig)
            for place, words in enumerate(rule.word_lists)
            if words.language != ANY_LANGUAGE
        ]
        extract = info.data.get("extract")
        if isinstance(extract, ArticleExtractorConfig) and extract.format == "markdown":
            found += [
                Violation(
                    str(number),
                    "a mapper changes the text form, and documents are Markdown "
                    "(data.extract.format=markdown). Use data.extract.format=text, or leave the "
                    "mapper out.",
                )
                for number, rule in enumerate(rules)
                if isinstance(rule, MapperConfig)
            ]
        if language := info.data.get("language"):  # a wrong one has a message of its own
            found += find_code_violations(language.kind, codes)
        read = info.data.get("read")
        if read and any(isinstance(rule, SourceCodeConfig) for rule in rules):
            found += find_field_violations(rules, read)
        raise_violations(found)
        return rules

    @property
    def drops_embedding_column(self) -> bool:
        """Embeddings are a column of the input that `read` does not keep."""
        semantic = self.deduplicate.semantic
        kept = self.read.keep_fields
        return (
            isinstance(semantic, SemanticDedupConfig)
            and isinstance(semantic.embeddings, ColumnEmbeddingsConfig)
            and (kept == "none" or (kept != "all" and semantic.embeddings.column not in kept))
        )


class TokensConfig(Section):
    """Token ids that another program made: Megatron-LM's indexed datasets. Needs
    tokenizer.kind=file.
    """

    kind: Literal["tokens"] = "tokens"
    name: str = Field("tokens", min_length=1, description="Display name of the dataset.")
    folder: LocalPath = Field(
        Path("runs/tokens"), description="Dataset folder, written by `prepare` and read by `train`."
    )
    inputs: tuple[LocalPath, ...] = Field(
        (),
        description="Index files (.idx) of training documents, each with its .bin file next to it.",
    )
    heldout_inputs: tuple[LocalPath, ...] = Field(
        (),
        description="Index files of held-out documents. Empty: split.heldout_fraction of the "
        "documents.",
    )
    split: HeldoutSplitConfig = Field(HeldoutSplitConfig(), description="Held-out documents.")
    tokens: TokenFilesConfig = Field(TokenFilesConfig(), description="Layout of token files.")
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )


class ChatConfig(Section):
    """Chats: JSON lines with a list of messages each, rendered with the tokenizer's own chat
    template.

    The loss is on what the assistant writes. A message is `{role, content}`, or `{from, value}` as
    in ShareGPT. Needs tokenizer.kind=file and batch.attention_scope=document.
    """

    kind: Literal["chat"] = "chat"
    name: str = Field("chats", min_length=1, description="Display name of the dataset.")
    folder: FolderPath = Field(
        Path("runs/chats"), description="Dataset folder; `prepare` writes and `train` reads it."
    )
    inputs: tuple[LocalPath, ...] = Field((), description="Training files: .jsonl, or .jsonl.gz.")
    heldout_inputs: tuple[LocalPath, ...] = Field(
        (),
        description="Files whose chats are held out. Empty: split.heldout_fraction of the chats.",
    )
    messages_field: str = Field(
        "messages", min_length=1, description="Field with the list of messages."
    )
    tools_field: str = Field(
        "tools", min_length=1, description="Field that is given to the template as `tools`."
    )
    template: LocalPath | None = Field(
        None,
        description="Jinja file of the chat template. null: the tokenizer's own, in its folder.",
    )
    max_tokens: int = Field(
        4_096,
        ge=2,
        description="Maximum tokens of a chat; longer ones are left out and counted, training and "
        "held-out.",
    )
    split: HeldoutSplitConfig = Field(HeldoutSplitConfig(), description="Held-out chats.")
    tokens: TokenFilesConfig = Field(TokenFilesConfig(), description="Layout of token files.")
    executor: ExecutorConfig = Field(
        LocalExecutorConfig(), description="Executor that runs the tasks."
    )


def list_dataset_folders(data: "DataConfig") -> tuple[Path, ...]:
    """Return the dataset folders of a run.

    Args:
        data: the `data:` section.

    Returns:
        One folder, or one per source of a mixture in their order.
    """
    return (
        tuple(source.folder for source in data.sources)
        if isinstance(data, MixtureConfig)
        else (data.folder,)
    )


DataConfig = Annotated[
    CrawlConfig
    | TokensConfig
    | ChatConfig
    | PairsConfig
    | LabelledTextConfig
    | ImagesConfig
    | MixtureConfig,
    Field(discriminator="kind"),
]

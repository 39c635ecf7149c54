"""Configuration of deduplication (`data.deduplicate:`): URL, exact, segment, MinHash, semantic and
substring.

Invariants:
- The surviving copy depends on the data alone, never on the order of files or the number of
  workers.
- A kind that is not enabled costs nothing.
"""

from functools import partial
from operator import eq
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.encoder_model import EncoderModelConfig
from llmsys.config.section import LocalPath, Section


class NoDeduplication(Section):
    """No deduplication of this kind."""

    kind: Literal["none"] = "none"


class UrlDedupConfig(Section):
    """Documents with the same URL, byte for byte. One capture stays; ties go to the smallest id."""

    kind: Literal["url"] = "url"
    keep: Literal["latest", "earliest", "longest"] = Field("latest", description="Capture to keep.")


class ExactDedupConfig(Section):
    """Documents with the same text. The one with the smallest id stays."""

    kind: Literal["text"] = "text"


class _SegmentDedupConfig(Section):
    """Fields of all repeated segments. The occurrence in the document with the smallest id
    stays.
    """

    min_words: int = Field(
        50,
        ge=0,
        description="Minimum words left in a document after removal; a document with fewer is "
        "dropped.",
    )
    min_sentences: int = Field(
        3,
        ge=0,
        description="Minimum sentences left in a document after removal; a document with fewer is "
        "dropped.",
    )


class ParagraphDedupConfig(_SegmentDedupConfig):
    """Paragraphs (between blank lines) that occur more than once, compared without white space
    at their ends.
    """

    kind: Literal["paragraphs"] = "paragraphs"
    min_characters: int = Field(
        0, ge=0, description="Minimum characters of a paragraph to compare; shorter ones are kept."
    )


class LineDedupConfig(_SegmentDedupConfig):
    """Lines that occur more than once, compared stripped and in lower case, as the code of C4
    does.
    """

    kind: Literal["lines"] = "lines"
    min_characters: int = Field(
        0, ge=0, description="Minimum characters of a line to compare; shorter ones are kept."
    )


class SentenceDedupConfig(_SegmentDedupConfig):
    """Runs of sentences that occur more than once (Raffel et al. 2020: three), compared simplified
    as for MinHash.

    Sentence splitting, comparison and removal follow datatrove for English.
    """

    kind: Literal["sentences"] = "sentences"
    sentences: int = Field(3, ge=1, le=16, description="Sentences per span.")


class MinHashDedupConfig(Section):
    """Near duplicates by MinHash-LSH over word n-grams (Broder 1997) with FineWeb's parameters.

    Two documents are linked when all hashes of one bucket agree. The longest document of a
    connected cluster stays; ties go to the smallest id. The Jaccard similarity at which half of the
    pairs are found is about (1 / buckets) ^ (1 / hashes_per_bucket), 0.72 for 14 x 8.
    """

    kind: Literal["minhash"] = "minhash"
    buckets: int = Field(
        14,
        ge=1,
        le=256,
        description="Number of LSH buckets (bands); one equal bucket links two documents.",
    )
    hashes_per_bucket: int = Field(
        8,
        ge=1,
        le=64,
        description="Hashes per bucket; all must be equal for two documents to match.",
    )
    ngram_words: int = Field(
        5,
        ge=1,
        le=32,
        description="Words per shingle; documents with fewer words are never duplicates.",
    )
    hash: Literal["combined", "sha1"] = Field(
        "combined",
        description="64-bit hash of a shingle. combined: derived from the hashes of its words. "
        "sha1: as FineWeb, slower.",
    )
    seed: int = Field(1, ge=0, le=(1 << 32) - 1, description="Seed of the hash permutations.")


class EncoderEmbeddingsConfig(EncoderModelConfig):
    """Embeddings by an encoder of Hugging Face: a folder with config.json, weights and tokenizer,
    such as those of sentence-transformers. They are stored, so that another threshold embeds
    nothing again.
    """

    kind: Literal["encoder"] = "encoder"
    pooling: Literal["mean", "cls"] = Field(
        "mean",
        description="Embedding of a text. mean: the mean of its last hidden states. cls: the first "
        "of them.",
    )
    prefix: str = Field(
        "", description="Put before each text, as some models need it; `query: ` for E5."
    )


class ColumnEmbeddingsConfig(Section):
    """Embeddings that the input files have: a column of lists of numbers, all of one length.
    `data.read.keep_fields` must keep it.
    """

    kind: Literal["column"] = "column"
    column: str = Field(
        min_length=1, description="Name of the column, as `data.read.keep_fields` would have it."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """No files."""
        return ()


class SemanticDedupConfig(Section):
    """Semantic duplicates by the cosine of embeddings within clusters of k-means (SemDeDup, Abbas
    et al. 2023).

    In a cluster documents are taken by falling length, ties by the smallest id. One is dropped if
    its cosine with a document that stays is at least `threshold`. Documents of two clusters are not
    compared. One without an embedding (an empty text, a value that is not finite, zeros alone)
    stays.
    """

    kind: Literal["embeddings"] = "embeddings"
    embeddings: Annotated[
        EncoderEmbeddingsConfig | ColumnEmbeddingsConfig, Field(discriminator="kind")
    ] = Field(description="Where the embeddings come from.")
    threshold: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Minimum cosine of duplicates. It depends on the encoder: read some of the "
        "dropped documents.",
    )
    precision: Literal["float16", "float32"] = Field(
        "float16", description="Stored numbers of an embedding."
    )
    clusters: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of clusters. null: the square root of the number of documents, but so "
        "few that a cluster has about 1,000 documents, and a tenth of `sample` at most.",
    )
    sample: int = Field(
        100_000,
        ge=1,
        le=500_000,
        description="About so many documents decide the clusters; each takes 10 bytes of memory "
        "for each number of its embedding.",
    )
    iterations: int = Field(10, ge=1, le=1_000, description="Maximum iterations of k-means.")
    seed: int = Field(0, ge=0, le=(1 << 32) - 1, description="Seed of the first centroids.")
    documents_per_task: int = Field(
        200_000,
        ge=1,
        description="Approximate number of documents per task, in whole clusters; does not change "
        "the result.",
    )


class SubstringDedupConfig(Section):
    """Strings of at least `min_characters` that occur more than once, whatever their word borders
    (Lee et al. 2022).

    The result equals that of a suffix array over the corpus: every character in a later occurrence
    is removed. The first occurrence, in the document with the smallest id, stays.
    """

    kind: Literal["substring"] = "substring"
    min_characters: int = Field(
        250,
        ge=20,
        le=100_000,
        description="Minimum length of a repeated string, in characters; the paper's 50 tokens "
        "are about 200 to 250 English characters.",
    )
    min_words: int = Field(
        50,
        ge=0,
        description="Minimum words left in a document after removal; a document with fewer is "
        "dropped.",
    )


class ExactKeyFilterConfig(Section):
    """Sort all keys of a task in memory: about 100 bytes per key, and 270 where most keys
    repeat.
    """

    kind: Literal["sorted"] = "sorted"
    keys_per_task: int = Field(2_000_000, ge=1, description="Approximate number of keys per task.")


class BloomKeyFilterConfig(Section):
    """Sort only the keys that a counting Bloom filter reports as possible repeats.

    Counters take two bits each; their number follows from keys and error rate. All keys are counted
    before any is tested, so order has no effect, and the sort removes false positives. A repeated
    key takes 270 bytes more: use this filter where few keys repeat.
    """

    kind: Literal["bloom"] = "bloom"
    keys_per_task: int = Field(
        16_000_000,
        ge=1,
        description="Approximate number of keys per task; the expected items of its filter.",
    )
    error_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="False-positive rate: share of unique keys that pass the filter.",
    )


class NoDedupIndex(Section):
    """No deduplication index."""

    kind: Literal["none"] = "none"


class DedupIndexConfig(Section):
    """An index in `index/` of the dataset: URL hashes, text digests and MinHash keys of the
    remaining documents.
    """

    kind: Literal["kept"] = "kept"


class DeduplicationConfig(Section):
    """Stages of deduplication, in this order: URL, exact text, segments, MinHash, semantic,
    substrings.
    """

    url: Annotated[UrlDedupConfig | NoDeduplication, Field(discriminator="kind")] = Field(
        NoDeduplication(), description="Deduplication by URL."
    )
    exact: Annotated[ExactDedupConfig | NoDeduplication, Field(discriminator="kind")] = Field(
        ExactDedupConfig(), description="Deduplication by text, exact."
    )
    repeated_segments: Annotated[
        ParagraphDedupConfig | LineDedupConfig | SentenceDedupConfig | NoDeduplication,
        Field(discriminator="kind"),
    ] = Field(
        NoDeduplication(), description="Removal of repeated paragraphs, lines or runs of sentences."
    )
    minhash: Annotated[MinHashDedupConfig | NoDeduplication, Field(discriminator="kind")] = Field(
        MinHashDedupConfig(), description="Near-duplicate removal by MinHash-LSH."
    )
    semantic: Annotated[SemanticDedupConfig | NoDeduplication, Field(discriminator="kind")] = Field(
        NoDeduplication(),
        exclude_if=partial(eq, NoDeduplication()),  # keys of datasets that were prepared before it
        description="Removal of documents that say the same, by embeddings.",
    )
    substring: Annotated[SubstringDedupConfig | NoDeduplication, Field(discriminator="kind")] = (
        Field(NoDeduplication(), description="Removal of long repeated strings.")
    )
    earlier_datasets: tuple[LocalPath, ...] = Field(
        (),
        description="Dataset folders with an index; documents that duplicate one of theirs are "
        "dropped here.",
    )
    index: Annotated[DedupIndexConfig | NoDedupIndex, Field(discriminator="kind")] = Field(
        NoDedupIndex(),
        description="Write an index, so that later configs can name this dataset in "
        "`earlier_datasets`.",
    )
    key_filter: Annotated[
        ExactKeyFilterConfig | BloomKeyFilterConfig, Field(discriminator="kind")
    ] = Field(
        ExactKeyFilterConfig(), description="Method of comparing keys; does not change the result."
    )

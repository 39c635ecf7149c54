"""Code version of each stage: a part of every task key in the journal.

A version is a number that is raised by hand when the outputs of a stage change. Hashing the source
instead would make every dataset again after a rename or a corrected comment.

Invariants:
    - The same version, configuration, inputs and package versions give the same bytes.
    - tests/data_pipeline/pipelines/test_stage_code.py fails when a source listed here changed in
      substance and nobody has decided about the version.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from llmsys.data_pipeline.core.journal import compute_json_digest


@dataclass(frozen=True)
class StageCode:
    """The code that the outputs of one stage depend on.

    Attributes:
        version: Raise it when the same inputs and settings give other bytes. Datasets then make the
            stage again.
        sources: Our files and folders that the outputs depend on, relative to the repository root.
            Only the test reads them.
        packages: Libraries that the outputs depend on. Their installed versions are part of the
            key.
    """

    version: int
    sources: tuple[str, ...]
    packages: tuple[str, ...]


_COMMON = (
    "data_pipeline/core/document_schema.py",
    "llmsys/dataset/token_file.py",
    "llmsys/storage/arrow_file.py",
    "llmsys/dataset/manifest_section.py",
)
_TOKENIZER = (
    "tokenize/train_sentencepiece.py",
    "tokenize/train_wordpiece.py",
    "pipelines/copy_tokenizer.py",
    "tokenize/tokenizer_files.py",
)
_ENCODE = tuple(
    f"tokenize/{name}.py"
    for name in (
        "encode_documents",
        "column_encoder",
        "gigatoken_encoder",
        "cut_points",
        "json_word_encoder",
        "known_tokens",
        "repository_order",
        "token_cache",
        "tokenizer_files",
    )
)
_ARRAYS = "text/ragged_arrays.py"
_CONTAMINATION = (
    "decontaminate",
    "text/word_hashes.py",
    "text/simplify_text.py",
    "text/vocabulary.py",
    "stages/find_contamination.py",
    _ARRAYS,
)
_COMPARING = tuple(
    f"stages/{name}.py"
    for name in (
        "compute_signatures",
        "find_equal_keys",
        "join_near_duplicates",
        "write_dedup_index",
        "cut_repeats",
        "find_substrings",
    )
)


def _describe_code(version: int, sources: tuple[str, ...], packages: str) -> StageCode:
    return StageCode(
        version,
        (*_COMMON, *(f"data_pipeline/{source}" for source in sources)),
        tuple(packages.split()),
    )


# One entry for all comparisons: they share keys, decisions and text segments.
_DEDUPLICATION = _describe_code(1, ("dedup", "rules", "text", *_COMPARING), "pyarrow numpy xxhash")
_DEDUPLICATION_STAGES = (
    "signatures",
    "url_duplicates",
    "exact_duplicates",
    "signatures_after_cuts",
    "cluster",
    "near_duplicates",
    "segments",
    "repeated_segments",
    "remove_segments",
    "anchors",
    "repeated_anchors",
    "windows",
    "repeated_windows",
    "remove_substrings",
    "index_documents_0",
    "index_ids_0",
    "index_documents_1",
    "index_ids_1",
    "index_url",
    "index_exact",
    "index_minhash",
    "index",
    "groups",
)

_SEMANTIC_STAGES = ("embeddings", "centroids", "assigned", "semantic_duplicates")

# Stages of a dataset of documents, by the name of the stage up to the first dot.
DOCUMENT_STAGES = {
    "split_inputs": _describe_code(1, ("stages/split_inputs.py",), "xxhash"),
    "extract": _describe_code(
        4,
        (
            "readers",
            "extract",
            "core/csv_types.py",
            "core/input_fields.py",
            "stages/extract_text.py",
            "rules/url.py",
            "rules/entry_lists.py",
            "rules/entry_table.py",
        ),
        "pyarrow fastwarc resiliparse selectolax zstandard tldextract",
    ),
    "filter": _describe_code(
        1,
        ("language", "rules", "text", "core/funnel.py", "stages/apply_rules.py"),
        "pyarrow numpy py3langid pycld2 regex ftfy",
    ),
    **dict.fromkeys(_DEDUPLICATION_STAGES, _DEDUPLICATION),
    **dict.fromkeys(
        _SEMANTIC_STAGES,
        _describe_code(
            1,
            (
                "dedup/embeddings.py",
                "dedup/spherical_kmeans.py",
                "dedup/duplicate_decisions.py",
                "dedup/duplicate_graph.py",
                "dedup/keys.py",
                "rules/encoder_model.py",
                "stages/embed_documents.py",
                "stages/cluster_embeddings.py",
                "stages/find_semantic_duplicates.py",
            ),
            "pyarrow numpy xxhash",
        ),
    ),
    "collect": _describe_code(
        1,
        (
            "core/funnel.py",
            "core/csv_types.py",
            "core/input_fields.py",
            "core/input_columns.py",
            "stages/collect.py",
            "dedup/duplicate_decisions.py",
        ),
        "pyarrow numpy",
    ),
    "gather": _describe_code(
        1, ("core/funnel.py", "stages/collect.py", "dedup/duplicate_decisions.py"), "pyarrow numpy"
    ),
    "export": _describe_code(1, ("stages/export_documents.py",), "pyarrow zstandard"),
    "thresholds": _describe_code(
        1, ("stages/near_thresholds.py", "core/funnel.py", "rules", "text"), "pyarrow numpy"
    ),
    "ngram_index": _describe_code(2, _CONTAMINATION, "numpy pyarrow xxhash"),
    "contamination": _describe_code(2, _CONTAMINATION, "numpy pyarrow xxhash"),
    "matches": _describe_code(2, ("stages/find_contamination.py",), "numpy pyarrow"),
    "clean": _describe_code(
        2, ("decontaminate", "text", "core/funnel.py", "stages/clean.py"), "numpy pyarrow"
    ),
    "tokenizer": _describe_code(1, _TOKENIZER, "sentencepiece tokenizers"),
    "encode": _describe_code(
        1, (*_ENCODE, _ARRAYS), "pyarrow numpy sentencepiece tokenizers xxhash"
    ),
    **dict.fromkeys(
        ("sampling_keys", "sampling_cutoffs", "sampling"),
        _describe_code(
            1,
            (
                "stages/sample_documents.py",
                "rules/derived_columns.py",
                "rules/url.py",
                "tokenize/repository_order.py",
            ),
            "pyarrow numpy xxhash tldextract",
        ),
    ),
    "tokens": _describe_code(
        2,
        (
            "tokenize/shuffle_documents.py",
            "tokenize/encode_documents.py",
            "tokenize/repository_order.py",
            _ARRAYS,
        ),
        "pyarrow numpy xxhash",
    ),
    "token_index": StageCode(
        1,
        (*_COMMON, "llmsys/dataset/token_split.py", "data_pipeline/tokenize/shuffle_documents.py"),
        ("pyarrow",),
    ),
}

# Stages of a dataset of pairs or labelled texts, by the name of the stage.
PAIR_STAGES = {
    "read": _describe_code(1, ("core/funnel.py", "pairs/read.py"), "pyarrow"),
    "tokenizer": _describe_code(
        1, ("core/funnel.py", "pairs/train_tokenizer.py", *_TOKENIZER), "sentencepiece tokenizers"
    ),
    "encode": _describe_code(
        1,
        ("core/funnel.py", "pairs", "tokenize/encode_documents.py"),
        "pyarrow numpy sentencepiece tokenizers xxhash",
    ),
}

# The one stage of a dataset of images. The version of Pillow, which is optional, is in the keys of
# its tasks.
IMAGE_STAGE = _describe_code(1, ("core/funnel.py", "images"), "pyarrow numpy")


# The first stage of a dataset of token ids; its others are those of documents.
TOKENS_STAGE = _describe_code(
    1, ("tokenize/megatron_files.py",), "pyarrow numpy sentencepiece tokenizers"
)

# The first stages of a dataset of chats; its others are those of documents.
CHAT_STAGE = _describe_code(
    1,
    ("core/funnel.py", "chats", "pairs/read.py", "tokenize/encode_documents.py"),
    "pyarrow numpy sentencepiece tokenizers jinja2",
)


def compute_code_version(code: StageCode) -> str:
    """Compute the part of a task's key that stands for code.

    Args:
        code: The code of a stage.

    Returns:
        A digest of the version of the stage and of the installed versions of its packages.
    """
    return compute_json_digest(
        code.version, {package: _get_package_version(package) for package in code.packages}
    )


@cache
def _get_package_version(package: str) -> str:
    """Return the installed version of a package: a line at the head of its metadata, all of which
    `metadata.version` would parse, with the description.
    """
    found = metadata.distribution(package)
    head, _, _ = (found.read_text("METADATA") or "").partition("\n\n")
    lines = [line for line in head.splitlines() if line.startswith("Version:")]
    return lines[0].partition(":")[2].strip() if lines else found.version

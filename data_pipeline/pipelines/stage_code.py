"""What the outputs of each stage depend on besides configuration and inputs: our source, and libraries at work in it.

Reads the files named here; gives a version per stage, which is part of the key of its tasks in the journal.
"""

from data_pipeline.core.journal import compute_code_version
from data_pipeline.pipelines.deduplication_stages import DEDUPLICATION_STAGES

_COMMON = (
    "data_pipeline/core/document_schema.py",
    "data_pipeline/core/block_writer.py",
    "llmsys/arrow_file.py",
    "llmsys/threshold_report.py",
)
_TOKENIZER = ("tokenize/train_sentencepiece.py", "pipelines/copy_tokenizer.py", "tokenize/publish_tokenizer.py")
_ENCODE = tuple(
    f"tokenize/{name}.py"
    for name in (
        "encode_documents",
        "column_encoder",
        "cut_points",
        "json_cut_points",
        "json_word_encoder",
        "short_word_table",
        "token_cache",
        "sentencepiece_model",
        "tokenizer_usage",
    )
)
_ARRAYS = ("text/ragged_arrays.py",)
_URL = ("rules/url.py", "rules/entry_lists.py")
_CONTAMINATION = (
    "decontaminate",
    "text/word_hashes.py",
    "text/hidden_words.py",
    "text/simplify_text.py",
    "text/character_sets.py",
    "stages/find_contamination.py",
    *_ARRAYS,
)
_COMPARING = (
    "compute_signatures",
    "find_equal_keys",
    "cluster_near_duplicates",
    "write_dedup_index",
    "duplicate_filter",
    "cut_repeats",
    "find_substrings",
)
_DEDUPLICATION = (
    ("dedup", "rules", "text", *(f"stages/{name}.py" for name in _COMPARING)),
    ("pyarrow", "numpy", "spacy", "xxhash", "scipy"),
)
_CODE = {
    "survey": (("readers/split_file.py", "stages/split_inputs.py"), ("xxhash",)),
    "extract": (
        ("readers", "extract", "stages/extract_text.py", "stages/url_gate.py", *_URL),
        ("pyarrow", "fastwarc", "resiliparse", "selectolax", "zstandard", "tldextract"),
    ),
    "judge": (
        ("language", "rules", "text", "unicode", "classify", "core/funnel.py", "stages/apply_rules.py"),
        ("pyarrow", "numpy", "py3langid", "pycld2", "scipy", "regex", "spacy", "ftfy"),
    ),
    **dict.fromkeys(DEDUPLICATION_STAGES, _DEDUPLICATION),
    "collect": (
        ("core/funnel.py", "stages/collect.py", "stages/duplicate_filter.py", "dedup/duplicate_decisions.py"),
        ("pyarrow", "numpy"),
    ),
    "copies": (("stages/export_documents.py",), ("pyarrow", "zstandard")),
    "thresholds": (("inspection/near_thresholds.py", "core/funnel.py", "rules", "text"), ("pyarrow", "numpy")),
    "index": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "contamination": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "matches": (("stages/find_contamination.py",), ("numpy", "pyarrow")),
    "clean": (("decontaminate", "text", "pii", "core/funnel.py", "stages/clean.py"), ("numpy", "pyarrow")),
    "tokenizer": (_TOKENIZER, ("sentencepiece", "tokenizers")),
    "encode": ((*_ENCODE, *_ARRAYS), ("pyarrow", "numpy", "sentencepiece", "tokenizers", "xxhash")),
    "tokens": (
        ("tokenize/shuffle_documents.py", "tokenize/encode_documents.py", *_ARRAYS),
        ("pyarrow", "numpy", "xxhash"),
    ),
}


def get_stage_code_version(stage: str) -> str:
    """The version of the code that makes the outputs of a stage."""
    rooms, packages = _CODE[stage]
    return compute_code_version([*_COMMON, *(f"data_pipeline/{room}" for room in rooms)], packages)

"""What the outputs of each stage depend on besides configuration and inputs: our source, and libraries at work in it.

Reads the files named here; gives a version per stage, which is part of the key of its tasks in the journal.
"""

from data_pipeline.deduplication import DEDUPLICATION_STAGES
from data_pipeline.journal import compute_code_version

_COMMON = ("data_pipeline/document.py", "data_pipeline/waiting.py", "llmsys/shard_file.py", "llmsys/threshold.py")
_TOKENIZER = ("tokenize/train.py", "tokenize/sample.py", "tokenize/copy.py", "tokenize/publish.py")
_ENCODE = tuple(
    f"tokenize/{name}.py"
    for name in (
        "encode",
        "columns",
        "cuts",
        "json_cuts",
        "json_words",
        "library",
        "word_cuts",
        "short_words",
        "memo",
        "model",
        "usage",
        "check",
    )
)
_ARRAYS = ("rules/growing.py", "rules/ragged.py")
_URL = ("rules/url.py", "rules/entry_list.py", "rules/word_pattern.py")
_SIMPLE = ("decontaminate/words.py", "decontaminate/hidden.py", "dedup/simplify.py")
_CONTAMINATION = ("decontaminate", "dedup/simplify.py", "rules/characters.py", "stages/decontaminate.py", *_ARRAYS)
_COMPARING = ("sign", "same", "link", "keep_index", "leave_out", "take_out", "strings")
_DEDUPLICATION = (
    ("dedup", "rules", *(f"stages/{name}.py" for name in _COMPARING)),
    ("pyarrow", "numpy", "spacy", "xxhash", "scipy"),
)
_CODE = {
    "survey": (("readers/survey.py", "stages/survey.py"), ("xxhash",)),
    "extract": (
        ("readers", "extract", "stages/extract.py", "stages/refuse.py", *_URL),
        ("pyarrow", "fastwarc", "resiliparse", "selectolax", "zstandard", "tldextract"),
    ),
    "judge": (
        ("language", "rules", "unicode", "classify", *_SIMPLE, "funnel.py", "stages/judge.py", "stages/partition.py"),
        ("pyarrow", "numpy", "py3langid", "pycld2", "scipy", "regex", "spacy", "ftfy"),
    ),
    **dict.fromkeys(DEDUPLICATION_STAGES, _DEDUPLICATION),
    "collect": (("funnel.py", "stages/collect.py", "stages/leave_out.py", "dedup/naming.py"), ("pyarrow", "numpy")),
    "copies": (("stages/copy.py",), ("pyarrow", "zstandard")),
    "thresholds": (("inspect/borders.py", "inspect/nearest.py", "funnel.py", "rules"), ("pyarrow", "numpy")),
    "index": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "contamination": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "matches": (("stages/decontaminate.py",), ("numpy", "pyarrow")),
    "clean": (("decontaminate", *_ARRAYS, "pii", "funnel.py", "stages/clean.py"), ("numpy", "pyarrow")),
    "tokenizer": (_TOKENIZER, ("sentencepiece", "tokenizers")),
    "encode": ((*_ENCODE, *_ARRAYS), ("pyarrow", "numpy", "sentencepiece", "tokenizers", "xxhash")),
    "tokens": (("tokenize/layout.py", "tokenize/encode.py", "rules/ragged.py"), ("pyarrow", "numpy", "xxhash")),
}


def get_stage_code_version(stage: str) -> str:
    """The version of the code that makes the outputs of a stage."""
    rooms, packages = _CODE[stage]
    return compute_code_version([*_COMMON, *(f"data_pipeline/{room}" for room in rooms)], packages)

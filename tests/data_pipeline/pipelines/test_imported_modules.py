"""A preparation imports what it needs: a few records are ready, and an unchanged dataset is known,
before slow libraries would have been imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.helpers.paths import ROOT, SAMPLE_CRAWL

CODE = """
import gc, json, sys
from llmsys.launch.main import main
sys.argv[0] = "llmsys"
main(["prepare", "my.yaml", "--until", "documents"])
assert gc.get_threshold() == (50_000, 20, 20)
print(json.dumps(sorted(sys.modules)))
"""
# of a library that is imported in parts, the part that is slow
NEVER = {
    "torch", "spacy", "py3langid", "scipy", "sklearn", "transformers", "tokenizers", "fsspec",
    "botocore", "jinja2", "requests", "pandas", "trafilatura", "ftfy", "sentencepiece",
    "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet", "numpy.testing", "unittest", "asyncio",
}  # fmt: skip
UNCHANGED = NEVER | {
    "pyarrow.compute", "fastwarc", "resiliparse", "selectolax", "pycld2", "zstandard",
    "numpy.random", "xml", "http", "charset_normalizer",
}  # fmt: skip


def list_imported_modules(folder: Path) -> set[str]:
    """Return the modules of a process that has prepared the dataset of the folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_small_crawl_and_an_unchanged_dataset_import_no_slow_library(tmp_path: Path) -> None:
    data = {
        "name": "small",
        "folder": "prepared",
        "inputs": [str(SAMPLE_CRAWL / "shard-00000.warc.gz")],
        "language": {"languages": []},
        "rules": [
            {"kind": "gopher_repetition"},
            {"kind": "gopher_quality"},
            {"kind": "c4_datatrove", "end_marks": []},
        ],
        "deduplicate": {"exact": {"kind": "text"}, "minhash": {"kind": "minhash"}},
        "executor": {"kind": "inline"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"data": data}))
    assert list_imported_modules(tmp_path) & NEVER == set()
    assert list_imported_modules(tmp_path) & UNCHANGED == set()

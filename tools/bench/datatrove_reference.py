"""Run datatrove's side of tools/bench/data.py under another interpreter, because the two cannot
share an environment.

Returns CPU seconds of datatrove 0.10.1 (its process and its extractor's), its decisions and its
signatures on given inputs. It is called as in its FineWeb example. Its language filter needs a
download and is replaced by our verdicts, which cost it nothing; the URL filter is left out on both
sides.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMMON = """
import json, os, statistics, sys
given, made = json.load(open(sys.argv[1])), sys.argv[2]
def spent():
    # of this process and of those that have ended: its extractor works in another one
    return sum(os.times()[:4])
def timed(work):
    start = spent()
    result = work()
    return spent() - start, result
def answer(seconds, results, **more):
    json.dump({"seconds": statistics.median(seconds), "results": results, **more}, open(made, "w"))
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
filters = [GopherRepetitionFilter(), GopherQualityFilter(),
           C4QualityFilter(filter_no_terminal_punct=False), FineWebQualityFilter()]
def judge(document):
    return all(one.filter(document) is True for one in filters)
judge(Document(text="Load the word splitter before the clock starts.", id="0", metadata={}))
"""

_CHAIN = """
def all_of_them():
    results = []
    for text in given["texts"]:
        document = Document(text=text, id="0", metadata={})
        results.append(document.text if judge(document) else None)
    return results
runs = [timed(all_of_them) for _ in range(given["repeats"])]
answer([seconds for seconds, _ in runs], runs[-1][1])
"""

_PIPELINE = """
import logging, os
logging.disable(logging.CRITICAL)
import trafilatura  # one that cannot be imported would cost a time-out for each page
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.readers import WarcReader
wanted = set(given["english"])
def all_of_them():
    html = kept = pages = 0
    for path in given["files"]:
        folder, name = os.path.split(path)
        reader = WarcReader(folder, glob_pattern=name, limit=given["limit"])
        extractor = Trafilatura(favour_precision=True, timeout=60)
        def counted(documents):
            nonlocal html, pages
            for document in documents:
                html, pages = html + len(document.text.encode("utf-8", "replace")), pages + 1
                yield document
        for document in extractor.run(counted(reader.run())):
            if document.metadata.get("url") in wanted:
                kept += judge(document)
    return {"html": html, "pages": pages, "kept": kept}
runs = [timed(all_of_them) for _ in range(given["repeats"])]
answer([seconds for seconds, _ in runs], runs[-1][1])
"""

_MINHASH = """
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
sha1 = HashConfig(precision=64, hash_fc="sha1")
signer = MinhashDedupSignature("/tmp", config=MinhashConfig(hash_config=sha1))
def all_of_them():
    signatures = (signer.get_signature(signer.get_shingles(text)) for text in given["texts"])
    return [[[int(value) for value in bucket] for bucket in one] for one in signatures]
runs = [timed(all_of_them) for _ in range(given["repeats"])]
answer([seconds for seconds, _ in runs], runs[-1][1])
"""


def _run_datatrove(python: str, program: str, given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        question, made = Path(folder, "given.json"), Path(folder, "made.json")
        question.write_text(json.dumps(given))
        subprocess.run([python, "-c", _COMMON + program, str(question), str(made)], check=True)
        answer: dict[str, Any] = json.loads(made.read_text())
    return answer


def measure_datatrove_rules(
    python: str, texts: Sequence[str], repeats: int
) -> tuple[float, list[str | None]]:
    """Return CPU seconds of FineWeb's filters, and the rewritten text of each kept document."""
    found = _run_datatrove(python, _CHAIN, {"texts": list(texts), "repeats": repeats})
    return found["seconds"], found["results"]


def measure_datatrove_pipeline(
    python: str, files: Sequence[str], english: Sequence[str], limit: int, repeats: int
) -> tuple[float, dict[str, int]]:
    """Return CPU seconds from WARC to filtered documents, with bytes of HTML, pages and kept
    documents.
    """
    given = {"files": list(files), "english": list(english), "limit": limit, "repeats": repeats}
    found = _run_datatrove(python, _PIPELINE, given)
    return found["seconds"], found["results"]


def measure_datatrove_minhash(
    python: str, texts: Sequence[str], repeats: int
) -> tuple[float, list[list[list[int]]]]:
    """Return CPU seconds of FineWeb's signatures (14 x 8, SHA-1, 5-grams), and the signature of
    each text.
    """
    found = _run_datatrove(python, _MINHASH, {"texts": list(texts), "repeats": repeats})
    return found["seconds"], found["results"]

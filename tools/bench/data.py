"""Measure each part of the data pipeline next to the tools in common use, on the same files in one
run.

    python tools/bench/data.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--pages 60] [--repeats 3]
    [--output table.md]

PYTHON is an interpreter that has datatrove (`python -m venv ref; ref/bin/pip install
'datatrove[processing]==0.10.1' lxml_html_clean`, and libmagic).

- Speeds are medians of CPU seconds of one process. datatrove's extractor works in a second process,
  which counts.
- Token ids, SentencePiece's too, are medians of three. From WARC to documents, the first row and
  resiliparse's are of one run.
- One process and two are wall time: the best of the repeats.
- The table shows agreement next to speed. Our encoder is compared with SentencePiece.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmsys.config.cleaning import ResiliparseExtractorConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.readers.input_files import find_inputs
from tools.bench import data_parts as ours
from tools.bench import datatrove_reference as theirs
from tools.bench import token_encoding
from tools.bench.measurement import build_datatrove_parser, measure_median_seconds
from tools.bench.rules import RULES

HEAD = "| part | this | beside | that | ratio | agreement |\n|---|---|---|---|---|---|"

# One whole preparation in a separate process: seconds by the clock, CPU seconds of all its
# processes, and the peak memory of any of them.
PREPARE = """
import json, os, resource, sys, time
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.config.run import RunConfig
start = time.monotonic()
prepare_dataset(RunConfig.model_validate(json.loads(sys.argv[1])), until="documents")
seconds = time.monotonic() - start
kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
peaks = [resource.getrusage(kind).ru_maxrss for kind in kinds]
print(json.dumps({"seconds": seconds, "peak": max(peaks) * 1024, "cpu": sum(os.times()[:4])}))
"""


class PartRow(NamedTuple):
    """One line of the table."""

    part: str
    this: str
    beside: str
    that: str
    ratio: str
    agreement: str

    def to_markdown(self) -> str:
        """Return the line as Markdown."""
        return f"| {' | '.join(self)} |"


def build_row(
    part: str,
    unit: str,
    amount: float,
    seconds: float,
    beside: str,
    other: float | None,
    agreement: str,
) -> PartRow:
    """Return one part: `amount` of a unit in our seconds, and the other tool's seconds per
    amount where it ran.
    """
    this = f"{amount / seconds:,.4g} {unit}/s"
    if other is None:
        return PartRow(part, this, beside, "not run", "", "")
    return PartRow(
        part, this, beside, f"{amount / other:,.4g} {unit}/s", f"{other / seconds:.2f}", agreement
    )


def measure_reading(files: list[str], repeats: int) -> PartRow:
    """Measure reading WARC records next to FastWARC."""
    size = sum(Path(path).stat().st_size for path in files) / 1e6
    mine, found = measure_median_seconds(lambda: ours.read_llmsys_records(files), repeats)
    fast, other = measure_median_seconds(lambda: ours.read_fastwarc_records(files), repeats)
    agreement = f"{found[0]:,} records, {'the same' if found == other else 'DIFFERENT'} bytes"
    return build_row("WARC records", "MB of gzip", size, mine, "FastWARC", fast, agreement)


def measure_documents(
    files: list[str], config: CrawlConfig, addresses: list[str], arguments: argparse.Namespace
) -> list[PartRow]:
    """Measure WARC to filtered documents: the recipe's extractor cold and warm, and resiliparse.

    datatrove reads only `--pages` records of each file, since it takes minutes.
    """
    found: dict[str, int] = {}
    if arguments.datatrove:
        took, found = theirs.measure_datatrove_pipeline(
            arguments.datatrove, files, addresses, arguments.pages, arguments.repeats
        )
    plain = config.model_copy(update={"extract": ResiliparseExtractorConfig()})
    rows = []
    for chosen, state, repeats in (
        (config, "first", 1),
        (config, "again", arguments.repeats),
        (plain, "again", 1),
    ):
        seconds, made = measure_median_seconds(
            partial(ours.prepare_documents, files, chosen), repeats
        )
        other = took * made["html"] / found["html"] if found else None
        agreement = (
            f"kept {made['kept'] / made['pages']:.1%} of {made['pages']:,} pages, they "
            f"{found.get('kept', 0):,}"
        )
        agreement += f" of {found.get('pages', 0):,}: other texts"
        name = f"WARC to filtered documents, {chosen.extract.kind}, {state}"
        rows.append(
            build_row(
                name,
                "MB of HTML",
                made["html"] / 1e6,
                seconds,
                "datatrove, trafilatura",
                other,
                agreement,
            )
        )
    return rows


def measure_rules(texts: list[str], arguments: argparse.Namespace) -> list[PartRow]:
    """Measure the FineWeb rules on the same texts."""
    cold, warm, results = ours.measure_rule_chain(texts, arguments.repeats)
    other, agreement = None, ""
    if arguments.datatrove:
        other, found = theirs.measure_datatrove_rules(arguments.datatrove, texts, arguments.repeats)
        equal = sum(one == two for one, two in zip(results, found, strict=True))
        agreement = f"{equal:,} of {len(texts):,} verdicts and texts"
    rows = [("FineWeb rules, cold", cold), ("FineWeb rules, words known", warm)]
    return [
        build_row(name, "documents", len(texts), took, "datatrove", other, agreement)
        for name, took in rows
    ]


def measure_signatures(texts: list[str], arguments: argparse.Namespace) -> list[PartRow]:
    """Measure MinHash 14 x 8 over 5-grams."""
    other, found = None, None
    if arguments.datatrove:
        other, found = theirs.measure_datatrove_minhash(
            arguments.datatrove, texts, arguments.repeats
        )
    rows = []
    for kind in ("sha1", "combined"):
        seconds, mine = ours.measure_minhash(texts, kind, arguments.repeats)
        agreement = "another hash, the same estimate"
        if kind == "sha1" and found is not None:
            agreement = f"{ours.compute_equal_share(mine, found):.2%} of signatures, bit by bit"
        rows.append(
            build_row(
                f"MinHash, {kind}", "documents", len(texts), seconds, "datatrove", other, agreement
            )
        )
    return rows


def measure_encoding(texts: list[str]) -> list[PartRow]:
    """Measure token ids of a BPE of 32,000 pieces next to SentencePiece, called per document."""
    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = next(token_encoding.train_tokenizers(Path(folder), texts, 32_000))
        found = token_encoding.measure_tokenizer(texts, tokenizer)
    size = sum(len(text.encode()) for text in texts) / 1e6
    agreement = f"{found['equal']:.2%} of texts with equal ids"
    names = [("token ids, cold", "cold"), ("token ids, words known", "warm")]
    return [
        build_row(name, "MB", size, found[key], "SentencePiece", found["library"], agreement)
        for name, key in names
    ]


def measure_processes(files: list[str], config: CrawlConfig, repeats: int) -> list[PartRow]:
    """Measure a whole preparation by one process and by two: wall time, and the largest process."""
    best: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for workers in (1, 2):
                data = config.model_dump(mode="json") | {
                    "folder": f"{folder}/{turn}-{workers}",
                    "inputs": files,
                    "executor": {"kind": "local", "workers": workers},
                }
                command = [sys.executable, "-c", PREPARE, json.dumps({"data": data})]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(told.splitlines()[-1])
                if workers not in best or found["seconds"] < best[workers]["seconds"]:
                    best[workers] = found
    one, two = best[1]["seconds"], best[2]["seconds"]
    peak = max(found["peak"] for found in best.values()) / 2**20
    seconds = PartRow(
        "prepare --until documents",
        f"{two:.1f} s",
        "one process",
        f"{one:.1f} s",
        f"{one / two:.2f}",
        "",
    )
    spent = (
        f"best of the repeats, by the clock; CPU seconds {best[2]['cpu']:.1f} and "
        f"{best[1]['cpu']:.1f}"
    )
    return [seconds._replace(agreement=spent), _build_peak_row(peak)]


def _build_peak_row(mebibytes: float) -> PartRow:
    return PartRow("largest process", f"{mebibytes:,.0f} MiB", "", "", "", "")


def main() -> int:
    """Measure and print."""
    parser = build_datatrove_parser(__doc__, 500)
    parser.add_argument(
        "--pages", type=int, default=60, help="records a file for datatrove (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of most measurements (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the table goes too")
    arguments = parser.parse_args()
    files = find_inputs(arguments.crawl)
    config = CrawlConfig(rules=RULES)
    began = time.monotonic()
    lines = [HEAD]

    def print_rows(*rows: PartRow) -> None:
        for one in rows:
            lines.append(one.to_markdown())
            print(one.to_markdown(), flush=True)

    print(HEAD)
    print_rows(measure_reading(files, arguments.repeats))
    print_rows(
        *measure_processes(files, config, arguments.repeats)
    )  # early: a process counts the memory of what started it
    texts, addresses = ours.extract_english_texts(files, config)
    if not texts:
        print(f"no English page in {' '.join(arguments.crawl)}", file=sys.stderr)
        return 2
    print_rows(*measure_documents(files, config, addresses, arguments))
    some = texts[: arguments.limit] if arguments.limit else texts
    print_rows(*measure_rules(some, arguments))
    print_rows(*measure_signatures(some, arguments))
    print_rows(*measure_encoding(some))
    print(
        f"\n{len(files)} files, {len(texts):,} English pages, {time.monotonic() - began:,.0f} s",
        file=sys.stderr,
    )
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

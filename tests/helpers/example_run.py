"""A made-up run folder and dataset folder as `train` and `prepare` write them, hostile page text
included.

Deterministic. `write_run` and `write_dataset` fill a folder; `run_events` and `example_manifest`
give the content.
"""

import json
import math
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmsys.dataset.manifest import (
    DocumentFiles,
    DropCount,
    DropExample,
    FunnelStage,
    Histogram,
    LanguageCount,
    Manifest,
    ReadSummary,
    SkippedInput,
    Split,
    TokenFile,
    write_manifest,
)

TOKENS_PER_STEP = 16_384
BEGAN = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC

HOSTILE = (
    "</script></pre><script>document.title='broken out'; console.error('broken out')</script>"
    "<img src=x onerror=\"console.error('broken out')\"> %{x} {{7*7}} & &lt;b&gt; "
    "\u2028 \u202eright to left\x00 theme:blue"
)
HELD_BACK = {
    "evaluated_tokens": 96_214,
    "evaluated_bytes": 375_235,
    "gzip_bits_per_byte": 2.914,
    "xz_bits_per_byte": 2.377,
}
PROSE = (
    "The quarry opened in 1871 and gave the town its grey walls. By the turn of the century a "
    "narrow railway ran down. "
)


def run_events(
    steps: int = 400, layers: int = 4, experts: int = 8, every: int = 5
) -> list[dict[str, Any]]:
    """The events of a finished run; `layers=0` stands for a dense model."""
    chance = random.Random(7)
    start = {"engine": "torch", "world_size": 2, "parameters": 10_240_000,
        "parameters_active": 4_120_000,
             "device": "cpu", "tokens_per_step": TOKENS_PER_STEP, "steps": steps,
             "resumed_from": None}  # fmt: skip
    events: list[dict[str, Any]] = [{"time": BEGAN, "event": "start", **start}]
    events.append({"time": BEGAN, "event": "prediction", "step": 0, "device": "abacus",
                   "memory": {"peak_bytes": 2**31, "instant": "in the loss", "kind": "reserved"},
                   "step_seconds": {"p10": 0.7, "p50": 0.8, "p90": 0.95}})  # fmt: skip
    for step in (100, 200):
        events.append({"time": BEGAN + 9.0, "event": "norms", "step": step, "tokens": 1,
                       "activation": {"blocks.0": 1.5},
                       "gradient": {"blocks.0": 0.01, "embed": 0.0}, "update": {"blocks.0": 0.02,
                           "embed": 0.0},
                       "weight": {"blocks.0": 2.0, "embed": 4.0}})  # fmt: skip
    events.append({"time": BEGAN + 9.0, "event": "profile", "step": 10, "seconds": 0.81,
        "host_wait_seconds": 0.0,
                   "trace": "profile/step-00000010-rank-0.trace.json.gz",
                   "shares": {"matmul": 0.812, "other": 0.188},
                   "kernels": [["aten::mm", 87, 0.812], ["aten::mul", 1030, 0.188]]})  # fmt: skip
    for step in range(every, steps + 1, every):
        now = {"time": round(BEGAN + step * 0.9, 3), "step": step, "tokens": step * TOKENS_PER_STEP}
        loss = 3.1 + 5.9 * math.exp(-step / 60) + chance.gauss(0, 0.06)
        norm = (
            0.6
            + 3 * math.exp(-step / 25)
            + abs(chance.gauss(0, 0.12))
            + (6 if step == every * (steps // every // 2) else 0)
        )
        rate = 3e-3 * min(1, step / 20) * min(1, max(0.1, (steps - step) / (0.2 * steps)))
        events.append({**now, "event": "step", "loss": loss, "learning_rate": rate,
            "gradient_norm": norm,
                       "tokens_per_second": 18_200 + chance.gauss(0, 350), "seconds": 0.9,
                       "data_wait_seconds": abs(chance.gauss(0.004, 0.003)), "utilisation": 0.31,
                       "utilisation_of": "causal, abacus, bf16",
                       "memory_bytes": 3 * 2**30})  # fmt: skip
        if layers and step % (4 * every) == 0:
            events.append(
                {**now, "event": "experts", "load": _load(chance, layers, experts, step / steps)}
            )
        if step % (steps // 4 // every * every) == 0:
            nats = 3.2 + 5.9 * math.exp(-step / 60)
            bits = nats / math.log(2) / 3.9
            measured = {"loss": nats, "bits_per_byte": bits, "perplexity": math.exp(nats)}
            answers = {
                "accuracy": 0.61,
                "accuracy_per_byte": 0.6,
                "accuracy_per_token": 0.58,
                "questions": 1_000,
            }
            sets = {"sets": {HOSTILE[:40]: answers}}
            events.append({**now, "event": "evaluation", **measured, **HELD_BACK, **sets})
            events.append(
                {
                    **now,
                    "event": "checkpoint",
                    "folder": f"checkpoints/step-{step:08d}",
                    "seconds": 0.8,
                }
            )
    samples = [{"prompt": "The town", "text": ("The town was built on the river in the early years "
    "of the century.")},
               {"prompt": "<b>Once</b>", "text": HOSTILE}]  # fmt: skip
    final = {"time": BEGAN + steps, "step": steps}
    events.append(
        {**final, "event": "measured", "step_seconds": 0.9, "steps": steps, "peak_bytes": 3 * 2**30}
    )
    events.append({**final, "event": "samples", "samples": samples})
    events.append(
        {**final, "event": "finish", "tokens": steps * TOKENS_PER_STEP, "seconds": steps * 0.9}
    )
    return events


def _load(chance: random.Random, layers: int, experts: int, done: float) -> list[list[float]]:
    """Shares that start uneven and end nearly even."""
    spread = 0.9 * (1 - done) ** 2 + 0.08
    raw = [[math.exp(chance.gauss(0, spread)) for _ in range(experts)] for _ in range(layers)]
    return [[share / sum(layer) for share in layer] for layer in raw]


def write_run(folder: Path, events: list[dict[str, Any]] | None = None) -> Path:
    """Fill a run folder; `events` as from `run_events`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    environment = {
        "format_version": 2,
        "python": "3.11.2",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6"},
        "git": {"commit": "3c4f18d0a1", "dirty": False},
        "host": "laptop",
        "cores": 2,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    write_events(folder / "events.jsonl", run_events() if events is None else events)
    return folder


def write_events(path: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write an event file with given times."""
    head = {"time": BEGAN, "event": "format", "format_version": 2}
    path.write_text("".join(json.dumps(event) + "\n" for event in (head, *events)))


CONFIG = """\
format_version: 2
run:
  name: demo
  folder: demo/run
  seed: 0
model:
  hidden_size: 192
  moe:
    num_experts: 8
    num_experts_per_tok: 2
"""


LANGUAGES = {
    "en": 4_903,
    "de": 611,
    "ru": 540,
    "zh": 402,
    "fr": 377,
    "ja": 290,
    "es": 288,
    HOSTILE: 1,
}


def write_dataset(folder: Path) -> Path:
    """Fill a dataset folder with the manifest alone."""
    write_manifest(folder, build_example_manifest())
    return folder


def build_example_manifest() -> Manifest:
    """The manifest of a small crawl, with hostile text wherever a page can put text."""
    return Manifest(
        name="sample",
        fingerprint="5f0c" * 8,
        config={"data": {"name": "sample"}},
        config_digest="ab12" * 8,
        vocab_size=8192,
        token_dtype="uint16",
        tokenizer_fingerprint="77aa" * 8,
        splits={"train": _split("train", 2_870, 2_950_114, 11_505_447),
                "heldout": _split("heldout", 92, 96_214, 375_235)},
        documents=DocumentFiles(),
        dropped=DocumentFiles(),
        funnel=_build_funnel(),
        languages={code: LanguageCount(documents=count, bytes=4_100 * count) for code,
            count in LANGUAGES.items()},
        lengths=Histogram(edges=(0, *(round(100 * 10 ** (i / 5)) for i in range(17))),
                          counts=(0, 4, 12, 40, 120, 260, 420, 560, 540, 420, 290, 170, 80, 30, 10,
                              4, 2)),
        read=ReadSummary(files=2, records=9_412, html_bytes=612_000_000, skipped=_build_skips()),
    )  # fmt: skip


STAGES: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("read", 9_412, 612_000_000, {"not_html": 542}),
    ("extract", 8_870, 590_000_000, {"no_text": 768}),
    ("language", 8_102, 38_000_000, {"not_wanted": 2_904, "unsure": 295}),
    ("gopher_repetition", 4_903, 21_400_000, {"duplicate_lines": 322, "top_3_gram": 271}),
    (
        "gopher_quality",
        4_310,
        18_900_000,
        {"mean_word_length": 118, "stop_words": 240, "words": 297},
    ),
    ("c4", 3_655, 16_200_000, {"curly_bracket": 301, "sentences": 114}),
    ("exact_duplicates", 3_240, 13_600_000, {"same_text": 119}),
    ("near_duplicates", 3_121, 13_000_000, {"minhash": 159}),
    ("", 2_962, 11_880_682, {}),
)


def _build_funnel() -> tuple[FunnelStage, ...]:
    return tuple(
        FunnelStage(
            stage=stage,
            documents_in=before,
            documents_out=after,
            bytes_in=size,
            bytes_out=size_after,
            dropped=tuple(_drop(stage, test, number) for test, number in drops.items()),
        )
        for (stage, before, size, drops), (_, after, size_after, _) in pairwise(STAGES)
    )


def _drop(rule: str, test: str, documents: int) -> DropCount:
    plain = DropExample(url="https://quarry.example/history", value=11.2, threshold=10.0,
                    reason=f"{rule}: {test.replace('_', ' ')} 11.2 > 10",
                    excerpt=PROSE * 9)  # fmt: skip
    hostile = DropExample(
        url=f"https://evil.example/?q={HOSTILE}",
        value=HOSTILE,
        threshold=None,
        reason=HOSTILE,
        excerpt=HOSTILE,
    )
    return DropCount(
        rule=rule,
        test=test,
        documents=documents,
        bytes=documents * 4_100,
        examples=(plain, hostile),
    )


def _build_skips() -> tuple[SkippedInput, ...]:
    return (
        SkippedInput(
            file="CC-MAIN-sample-00001.warc.gz",
            offset=88_120_443,
            reason="the file ends within a record",
            count=1,
        ),
        SkippedInput(file=f"{HOSTILE}.warc.gz", offset=0, reason="not HTML: image/png", count=541),
    )


def _split(name: str, documents: int, tokens: int, text_bytes: int) -> Split:
    file = TokenFile(name=f"tokens/{name}-00000.arrow", rows=documents, tokens=tokens,
        text_bytes=text_bytes,
                     size=2 * tokens, digest="c0de" * 8, frame_checksum="9e" * 8,
                     batches=())  # fmt: skip
    return Split(documents=documents, tokens=tokens, bytes=text_bytes, files=(file,))

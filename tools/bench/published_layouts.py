"""Judge published layouts by `llmsys plan --check --compare`: legal, memory, time, and the layout
that a plan chooses.

python tools/bench/published_layouts.py              print the table, a row per published layout
python tools/bench/published_layouts.py --commands   print the commands
"""

import argparse
import json
import shlex
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.launch.main import main as run_llmsys
from tools.bench.fits.published_row import list_gpt_words, load_shapes

GIB = 2**30


@dataclass(frozen=True)
class PublishedLayout:
    """A layout that a report gives, and the seconds of a step that it measured; None: it has
    none.
    """

    name: str
    source: str
    words: tuple[str, ...]
    layout: str
    measured: float | None = None

    @property
    def arguments(self) -> list[str]:
        """Arguments of `llmsys`."""
        return ["plan", *self.words, "--check", self.layout, "--compare"]


def _list_gpt_run(shape: str, sequences: int, gpus: int) -> tuple[str, ...]:
    """Return CONFIG and overrides of a GPT of Megatron's tables on A100s, with full
    recomputation.
    """
    found = load_shapes()[shape]
    model = list_gpt_words(found["hidden"], found["layers"], found["heads"], 51_200)
    batch = (
        "batch.sequence_length=2048",
        f"batch.sequences={sequences}",
        "batch.micro_sequences=1",
        "train.precision=fp16",
        "train.activation_checkpoint=full",
    )
    return (*model, *batch, f"gpus={gpus}", "device=a100-80gb", "program=megatron-2021")


def _list_llama_run(length: int, sequences: int, gpus: int) -> tuple[str, ...]:
    batch = (
        f"batch.sequence_length={length}",
        f"batch.sequences={sequences}",
        "batch.micro_sequences=1",
    )
    return ("model/llama3.1-405b", *batch, f"gpus={gpus}", "device=h100-sxm", "program=llama3")


DEEPSEEK = (
    "model/deepseek-v3",
    "model.multi_token_prediction.depth=1",
    "batch.sequence_length=4096",
    "batch.sequences=15360",
    "batch.micro_sequences=1",
    "train.activation_checkpoint=selective",
    "gpus=2048",
    "device=h800",
    "program=hai-llm-v3",
)
# The first chunk has only the embedding and the last one only the head, each instead of one block:
# 128 chunks on 16 ranks (section 3.3.2).
LLAMA = "Llama 3 (2407.21783), table 4, by its TFLOP/s with causal attention"
LAYOUTS = (
    PublishedLayout(
        "Llama 3 405B, 8k, 8,192 H100",
        LLAMA,
        _list_llama_run(8192, 2048, 8192),
        "tp=8,pp=16,vp=8,dp=64",
        12.0,
    ),
    PublishedLayout(
        "Llama 3 405B, 128k, 16,384 H100",
        LLAMA,
        _list_llama_run(131_072, 128, 16_384),
        "tp=8,cp=16,pp=16,vp=8,dp=8",
        10.9,
    ),
    # 180,000 accelerator-hours for a trillion tokens, restarts included.
    PublishedLayout(
        "DeepSeek-V3, 2,048 H800",
        "DeepSeek-V3 (2412.19437), table 1",
        DEEPSEEK,
        "pp=16,ep=64,dp=128",
        19.9,
    ),
    PublishedLayout(
        "MT-NLG 530B, 2,240 A100",
        "Smith 2022, 2.4",
        _list_gpt_run("530B", 1920, 2240),
        "tp=8,pp=35,dp=8",
        60.1,
    ),
    PublishedLayout(
        "MT-NLG 530B, 3,360 A100",
        "Smith 2022, 2.4",
        _list_gpt_run("530B", 1920, 3360),
        "tp=8,pp=35,dp=12",
        44.4,
    ),
    PublishedLayout(
        "Megatron 530B, 2,520 A100",
        "Narayanan 2021, table 1",
        _list_gpt_run("530B", 2520, 2520),
        "tp=8,pp=35,vp=3,dp=9",
        54.1,
    ),
    PublishedLayout(
        "Megatron 1T, 3,072 A100",
        "Narayanan 2021, table 1",
        _list_gpt_run("1T", 3072, 3072),
        "tp=8,pp=64,vp=2,dp=6",
        102.4,
    ),
)


def judge_layout(row: PublishedLayout) -> dict[str, Any]:
    """Return what `llmsys plan --check --compare --json` prints for a layout.

    Args:
        row: the published layout.

    Returns:
        The values, with `cpu_seconds` of the call.
    """
    start, printed = time.process_time(), StringIO()
    with redirect_stdout(printed):
        run_llmsys([*row.arguments, "--json"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found | {"cpu_seconds": time.process_time() - start}


def format_judged_row(row: PublishedLayout, found: dict[str, Any]) -> str:
    """Return the line of a layout.

    Args:
        row: the published layout.
        found: values of `judge_layout`.

    Returns:
        A row of a Markdown table.
    """
    step = found["step_seconds"]
    seconds = f"{step['p50']:.3g} ({step['p10']:.3g} to {step['p90']:.3g})"
    size = f"{found['peak_bytes'] / GIB:.1f} GiB, {'fits' if found['fits'] else 'too large'}"
    judged = "legal" if found["legal"] else "illegal"
    measured = "" if row.measured is None else f"{row.measured:g}"
    chosen = found["own"].removeprefix("llmsys would choose ")
    columns = (row.name, f"`{row.layout}`", judged, size, seconds, measured, chosen)
    return f"| {' | '.join(columns)} | {found['cpu_seconds']:.0f} |"


def main() -> int:
    """Print the table, or the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--commands", action="store_true", help="print the commands, and run nothing"
    )
    if parser.parse_args().commands:
        print(
            "\n".join(
                f"# {row.name}: {row.source}\n{shlex.join(['llmsys', *row.arguments])}"
                for row in LAYOUTS
            )
        )
        return 0
    print(
        "| report | layout | | memory | step, s | measured, s | what a plan chooses | CPU seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in LAYOUTS:
        print(format_judged_row(row, judge_layout(row)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

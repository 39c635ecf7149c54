"""Measure in thirty minutes what decides how llmsys uses this accelerator, and keep the raw rows.

    python -m tools.bench.device_plan [--output device-plan] [--minutes 30] [--only WORD] [--list]

Rows are in the order of what they decide, so the first minutes count most. Each row is a process of
its own with a limit of time, and one line in OUTPUT/rows.jsonl: its command, the versions, what it
measured or how it failed. A row that is there already is not run again, so the same command goes
on after an interruption. After each group its rows are compared with the first: time, utilisation,
and whether the losses have the same bits. Send the folder back with an issue, or keep it below
docs/measurements.

Reads nothing but this checkout. Writes OUTPUT/rows.jsonl, and what `llmsys doctor device` and
`llmsys calibrate` write there.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.host_time import PATHS

STEP = ("-m", "tools.bench.device_step")
LLMSYS = ("-m", "llmsys.launch.main")
LARGE = (
    "model/llama3.1-8b", "model.num_hidden_layers=4", "batch.sequence_length=8192",
    "batch.sequences=2", "batch.micro_sequences=1", "train.precision=bf16",
)  # fmt: skip
SMALL = (
    "model/qwen2.5-0.5b", "model.num_hidden_layers=12", "batch.sequence_length=2048",
    "batch.sequences=4", "batch.micro_sequences=2", "train.precision=bf16",
)  # fmt: skip
SMALL_IN_ONE = (
    "model/qwen2.5-0.5b", "batch.sequence_length=2048", "batch.sequences=16",
    "batch.micro_sequences=16", "train.precision=bf16",
)  # fmt: skip
MIDDLE = (
    "model/llama3.2-1b", "batch.sequence_length=4096", "batch.sequences=16",
    "batch.micro_sequences=4", "train.precision=bf16",
)  # fmt: skip
TINY = (
    "model/gpt2-small", "batch.sequence_length=1024", "batch.sequences=16",
    "batch.micro_sequences=16", "train.precision=bf16",
)  # fmt: skip
EXPERTS = (
    "model/qwen3-30b-a3b", "model.num_hidden_layers=3", "batch.sequence_length=4096",
    "batch.sequences=8", "batch.micro_sequences=4", "train.precision=bf16",
)  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """A measurement.

    Attributes:
        group: Rows of a group are compared with its first one.
        name: What differs in the group.
        decides: What the row is for.
        arguments: Of the Python interpreter. `{output}` is the folder of the results.
        limit_seconds: The process is ended after it.
    """

    group: str
    name: str
    decides: str
    arguments: tuple[str, ...]
    limit_seconds: int = 120

    @property
    def key(self) -> str:
        """Name in the file of rows."""
        return f"{self.group}: {self.name}"


def _list_paths(
    group: str, decides: str, words: Sequence[str], paths: Sequence[str], *more: str
) -> list[PlanRow]:
    return [PlanRow(group, path, decides, (*STEP, *words, *PATHS[path], *more)) for path in paths]


ROWS: tuple[PlanRow, ...] = (
    *_list_paths("8B slice", "whether one rank needs a wrapper", LARGE, ("fsdp", "plain")),
    *_list_paths(
        "0.5B, 12 layers",
        "what the host's work costs a small model",
        SMALL,
        ("fsdp", "plain", "fsdp-step-whole", "fsdp-step", "fsdp-never", "ddp"),
    ),
    *_list_paths(
        "0.5B, 24 layers, one micro-batch",
        "what is left where kernels are long",
        SMALL_IN_ONE,
        ("fsdp", "plain"),
    ),
    *_list_paths(
        "experts slice", "FSDP's share of a step with experts", EXPERTS, ("fsdp", "plain")
    ),
    *_list_paths("1B", "the middle of the range", MIDDLE, ("fsdp", "plain")),
    *_list_paths("124M", "the smallest models of a first run", TINY, ("fsdp", "plain")),
    *_list_paths(
        "8B slice, kernels",
        "where the time goes",
        LARGE,
        ("fsdp", "plain"),
        "--kernels",
        "40",
    ),
    PlanRow(
        "device",
        "doctor",
        "which kernels agree with plain operations here",
        (*LLMSYS, "doctor", "device", "--output", "{output}"),
        420,
    ),
    PlanRow(
        "device",
        "calibrate",
        "the rates of the estimate",
        (*LLMSYS, "calibrate", "--output", "{output}/profile.yaml"),
        420,
    ),
)


def run_row(row: PlanRow, folder: Path) -> dict[str, Any]:
    """Run a row in a process, and return its line of the file.

    Args:
        row: The row.
        folder: Folder of the results.

    Returns:
        key, group, name, arguments, seconds, status (done, failed, or over its limit), and
        `found`: the numbers of a step, or the last lines of another command or of an error.
    """
    arguments = [word.replace("{output}", str(folder)) for word in row.arguments]
    began = time.monotonic()
    status, found = "done", {}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=row.limit_seconds,
        )
        lines = done.stdout.splitlines()
        if done.returncode:
            status, found = "failed", {"lines": done.stderr.splitlines()[-20:]}
        elif row.arguments[:2] == STEP:
            found = json.loads(lines[0]) | {"kernels": lines[1:]}
        else:
            found = {"lines": lines[-40:]}
    except subprocess.TimeoutExpired:
        status, found = "over its limit", {"lines": [f"ended after {row.limit_seconds} s"]}
    return {
        "key": row.key,
        "group": row.group,
        "name": row.name,
        "arguments": arguments,
        "seconds": round(time.monotonic() - began, 1),
        "status": status,
        "found": found,
    }


def describe_group(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Compare the rows of a group with its first one.

    Args:
        lines: Lines of the file, of one group.

    Returns:
        A text for each row.
    """
    texts = []
    first = lines[0]["found"] if lines[0]["status"] == "done" else {}
    for line in lines:
        found = line["found"]
        if line["status"] != "done":
            texts.append(f"{line['key']}: {line['status']}: {(found['lines'] or [''])[-1]}")
        elif "step_ms" not in found:
            texts.append(f"{line['key']}: done in {line['seconds']:.0f} s")
        else:
            parts = [f"{line['key']}: {found['step_ms']:.1f} ms"]
            if "mfu" in found:
                parts.append(f"{found['mfu']:.1%} MFU")
            if "step_ms" in first and line is not lines[0]:
                same = "equal" if found["losses"] == first["losses"] else "other"
                parts.append(
                    f"{found['step_ms'] / first['step_ms']:.2f} times {lines[0]['name']}, {same} "
                    "losses"
                )
            texts.append(", ".join(parts))
    return texts


def run_plan(rows: Sequence[PlanRow], folder: Path, minutes: float) -> list[str]:
    """Run the rows that are not in the file yet, as long as there is time to begin one.

    Args:
        rows: The rows in their order; those of a group are neighbours.
        folder: Folder of the results, which may hold those of an earlier call.
        minutes: No row begins after them.

    Returns:
        Keys of the rows that were left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    known: dict[str, dict[str, Any]] = {}
    if file.exists():
        written = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        known = {line["key"]: line for line in written}
    began = time.monotonic()
    left = []
    for number, row in enumerate(rows):
        if row.key not in known:
            if time.monotonic() - began > 60 * minutes:
                left.append(row.key)
                continue
            known[row.key] = run_row(row, folder)
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(known[row.key]) + "\n")
        if number + 1 == len(rows) or rows[number + 1].group != row.group:
            group = [known[one.key] for one in rows if one.group == row.group and one.key in known]
            if group:
                print("\n".join(describe_group(group)), flush=True)
    return left


def describe_machine() -> dict[str, Any]:
    """Return versions and the name of the accelerator."""
    import torch

    return {
        "key": "machine",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "devices": torch.cuda.device_count(),
    }


def main(words: Sequence[str]) -> int:
    """Run the plan; the status is 1 if rows are left, and 2 without an accelerator."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("device-plan"))
    parser.add_argument("--minutes", type=float, default=30, help="No row begins after them.")
    parser.add_argument("--only", default="", help="Rows whose group or name has this word.")
    parser.add_argument("--list", action="store_true", help="Print the rows and run nothing.")
    asked = parser.parse_args(words)
    rows = [row for row in ROWS if asked.only in row.key]
    if asked.list:
        print("\n".join(f"{row.key}: {row.decides}" for row in rows))
        return 0
    machine = describe_machine()
    if machine["device"] == "cpu":
        print(
            "tools.bench.device_plan: torch sees no accelerator on this machine, and the plan "
            "measures one. Install the CUDA build of torch, or run it on a machine with a GPU; "
            "`python -m tools.bench.host_time` measures the host on any machine.",
            file=sys.stderr,
        )
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "machine.json").write_text(json.dumps(machine) + "\n", "utf-8")
    left = run_plan(rows, asked.output, asked.minutes)
    if left:
        print(f"{len(left)} rows are left; the same command runs them: {', '.join(left)}")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run the dry runs of llmsys/dryrun/README.md: five models at three lengths, on clusters that do
not exist.

Reads configs and a device profile. Writes one JSON file for each dry run, and prints the table of
the README from those those that are there.

    python tools/bench/dry_runs.py --output runs/dry --models llama mixtral --lengths 8192 32768
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmsys.dryrun.dry_run import run_dry_run
from llmsys.dryrun.dry_run_request import DryRunRequest, format_dry_run_command
from llmsys.errors import LlmsysError
from llmsys.estimate.memory_timeline import GIB

# Quantiles of the lengths of the 145 documents that train/demo keeps of the sample crawl, shuffled.
DOCUMENTS = {
    8_192: "164,152,4059,553,1791,778,1372",
    32_768: "288,2066,106,1048,1499,434,2609,158,1339,318,570,4649,222,1688,4239,744,11813",
    131_072: "94,155,226,319,553,744,1073,1452,1928,2609,5490,21658,141,222,316,501,718,1048,1372,"
    "1866,2496,4928,21658,131,203,282,468,674,944,1339,1759,2318,4076,12476,107,171,276,434,607,909,"
    "1286,1688,2279,3857,8638,103,163,260,376,570,881,1207,1615,2166,3119,6459",
}
FULL = ("train.precision=bf16", "train.activation_checkpoint=full", "batch.micro_sequences=1")
TOKENS = {8: 4_194_304, 256: 16_777_216}


@dataclass(frozen=True)
class DryRunRow:
    """A model on a cluster, and its layout for each length of sequences.

    Attributes:
        config: name of the config.
        nodes: machines with 8 devices each.
        layouts: overrides by positions of a sequence.
    """

    config: str
    nodes: int
    layouts: dict[int, tuple[str, ...]]

    def build_request(self, length: int, overrides: list[str]) -> DryRunRequest:
        """Return the dry run at this length."""
        words = [
            f"batch.sequence_length={length}",
            f"batch.sequences={TOKENS[self.nodes] // length}",
            *self.layouts[length],
            *overrides,
        ]
        documents = tuple(int(one) for one in DOCUMENTS[length].split(","))
        return DryRunRequest(self.config, tuple(words), self.nodes, 8, 0, "h100-sxm", documents)


LONG = (*FULL, "layout.context=4", "model.max_position_embeddings=131072")
ROWS = {
    "llama": DryRunRow(
        "train/llama-8b-64xh100",
        8,
        {
            8_192: ("train.precision=bf16", "batch.micro_sequences=1"),
            32_768: FULL,
            131_072: LONG,
        },
    ),
    "qwen3": DryRunRow(
        "train/qwen3-30b-a3b-64xh100",
        8,
        {8_192: (*FULL, "batch.micro_sequences=4"), 32_768: FULL, 131_072: LONG},
    ),
    "mixtral": DryRunRow("model/mixtral-8x7b", 8, {8_192: FULL, 32_768: FULL, 131_072: LONG}),
    "llama-405b": DryRunRow(
        "model/llama3.1-405b",
        256,
        {
            8_192: (*FULL, "layout.tensor=8"),
            32_768: (*FULL, "layout.tensor=8"),
            131_072: (*LONG, "layout.tensor=8"),
        },
    ),
    "deepseek-v3": DryRunRow(
        "model/deepseek-v3",
        256,
        {
            8_192: (*FULL, "layout.expert=64"),
            32_768: (*FULL, "layout.expert=64", "layout.context=4"),
            131_072: (*FULL, "layout.expert=64", "layout.context=16"),
        },
    ),
}


def run_row(name: str, length: int, overrides: list[str], folder: Path) -> None:
    """Run one dry run and write its result, or print why it has none."""
    request = ROWS[name].build_request(length, overrides)
    command = format_dry_run_command(
        request.config, request.overrides, request.nodes, 8, request.device
    )
    print(f"{command} --documents {DOCUMENTS[length]}", file=sys.stderr, flush=True)
    try:
        result = run_dry_run(request)
    except LlmsysError as error:
        print(f"{name} at {length}: {error}", file=sys.stderr, flush=True)
        return
    (folder / f"{name}_{length}.json").write_text(json.dumps(result), encoding="utf-8")
    print(format_row(name, length, result), file=sys.stderr, flush=True)


def format_row(name: str, length: int, result: dict[str, Any]) -> str:
    """Return a row of the table."""
    layout = [
        f"{axis} {size}" for axis, size in result["layout"].items() if size != 1 and axis != "shard"
    ]
    estimate = result["estimate"]
    evaluation = next(one for one in estimate["phases"] if one["phase"] == "evaluation")
    cells = [
        name,
        f"{result['world_size']:,}",
        f"{length:,}",
        ", ".join(layout),
        f"{result['memory']['peak_bytes'] / GIB:.1f}",
        f"{estimate['peak_bytes'] / GIB:.1f}",
        f"{estimate['difference']:+.1%}",
        f"{evaluation['dry_run_bytes'] / GIB:.1f}",
        f"{result['parameters']['imbalance']:.3f}",
        f"{result['attention_flops']['ratio']:.3f}",
        str(len(result["squares"])),
        f"{sum(result['seconds'].values()):.0f}",
        f"{result['process_bytes'] / GIB:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def iter_table(folder: Path) -> Iterator[str]:
    """Yield the table of all results in a folder."""
    yield (
        "| model | ranks | tokens | layout | peak, GiB | estimate, GiB | difference | evaluation, "
        "GiB | largest rank | attention FLOPs | tables | CPU seconds | host GiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for name in ROWS:
        for length in DOCUMENTS:
            if (path := folder / f"{name}_{length}.json").exists():
                yield format_row(name, length, json.loads(path.read_text(encoding="utf-8")))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=ROWS, default=list(ROWS), help="(default: all)"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, choices=DOCUMENTS, default=list(DOCUMENTS)
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="further values of the config"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/dry_runs"), help="folder of the results"
    )
    return parser


def main() -> None:
    """Run the chosen dry runs one after the other, and print the table."""
    arguments = build_parser().parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for length in arguments.lengths:
        for name in arguments.models:
            run_row(name, length, arguments.set, arguments.output)
    print("\n".join(iter_table(arguments.output)))


if __name__ == "__main__":
    main()

"""Measure one block of each attention at growing lengths: CPU seconds and bytes saved for backward.

    python tools/bench/long_range.py [--lengths 1024 4096 16384] [--width 64] [--heads 4] [--json]
    [--plot FILE]

One row of tokens, one thread, fp32, forward and backward. CPU seconds are changed least by other
work on the machine; saved bytes are those of the storages that autograd holds after the forward
pass. Windows: 256 positions; mixtures: 128; hashes: 4 rounds of chunks of 64; segments and their
memory: 256 each. `reformer` has reversible layers and a chunked feed-forward too. All are encoders
but `segment_memory`, which is causal.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llmsys.config.model import ModelConfig
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer

KINDS: dict[str, dict[str, Any]] = {
    "multi_head": {},
    "longformer": {"windows": [256]},
    "linformer": {"projected_length": 128, "sharing": "key_value"},
    "lsh": {"num_hashes": 4, "chunk_length": 64},
    "segment_memory": {"segment_length": 256, "memory_length": 256},
}
REFORMER: dict[str, Any] = {"residual": {"kind": "reversible"}, "feed_forward_chunk": 512}
# Causal: the others are measured as encoders.
TRANSFORMER_XL: dict[str, Any] = {
    "family": "decoder",
    "position": {"kind": "transformer_xl"},
    "head": {"kind": "lm"},
}
# Pixels of a panel, and of its margins.
PANEL, MARGIN = 360, 60
LINE_HEIGHT = 13
COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#d62728")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="default: %(default)s"
    )
    parser.add_argument(
        "--width", type=int, default=64, help="channels of the stream (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw time and memory by length, as SVG"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # torch imports much at the first checkpoint
    measure_block("reformer", 128, arguments.width, arguments.heads)
    found = [
        {
            "kind": kind,
            "length": length,
            **measure_block(kind, length, arguments.width, arguments.heads),
        }
        for kind in [*KINDS, "reformer"]
        for length in arguments.lengths
    ]
    if arguments.plot is not None:
        arguments.plot.write_text(draw_plot(found), encoding="utf-8")
    print(json.dumps(found, indent=1) if arguments.json else format_table(found))
    return 0


def measure_block(kind: str, length: int, width: int, heads: int) -> dict[str, float]:
    """Return CPU seconds of forward and backward, and the bytes saved between them, of an
    encoder of one block.
    """
    changes = REFORMER if kind == "reformer" else TRANSFORMER_XL if kind == "segment_memory" else {}
    kind = "lsh" if kind == "reformer" else kind
    config = ModelConfig.model_validate({
        "family": "encoder", "vocab_size": 128, "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 1, "num_attention_heads": heads, "max_position_embeddings": length,
        "position": {"kind": "none"}, "head": {"kind": "features"}, "attention": {"kind": kind,
            **KINDS[kind]},
        **changes,
    })  # fmt: skip
    model = Transformer(config)
    initialize_parameters(model, 0)
    tokens_BT = torch.randint(128, (1, length), generator=torch.Generator().manual_seed(0))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    start = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = model.train()(tokens_BT).square().mean()
    loss.backward()
    return {"cpu_seconds": time.process_time() - start, "saved_mib": sum(saved.values()) / 2**20}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return one line per measurement, with its growth since the shorter length of the same
    kind.
    """
    lines = [
        "| attention | positions | CPU seconds | times | saved MiB | times |",
        "|---|---|---|---|---|---|",
    ]
    for earlier, row in zip([None, *rows[:-1]], rows, strict=True):
        text = f"| {row['kind']} | {row['length']:,} "
        for name in ("cpu_seconds", "saved_mib"):
            is_first = earlier is None or earlier["kind"] != row["kind"]
            growth = "" if is_first or earlier is None else f"{row[name] / earlier[name]:.1f}"
            text += f"| {row[name]:.2f} | {growth} "
        lines.append(f"{text}|")
    return "\n".join(lines)


def draw_plot(rows: list[dict[str, Any]]) -> str:
    """Return an SVG with two panels by length, both axes logarithmic: CPU seconds, and saved
    MiB.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    parts = [
        _draw_panel(rows, kinds, name, number)
        for number, name in enumerate(("cpu_seconds", "saved_mib"))
    ]
    size = f'width="{2 * (PANEL + MARGIN) + MARGIN}" height="{PANEL + 2 * MARGIN}"'
    body = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
        f'font-size="12">{body}</svg>\n'
    )


def _draw_panel(rows: list[dict[str, Any]], kinds: list[str], name: str, number: int) -> str:
    lengths = sorted({row["length"] for row in rows})
    low, high = (limit(row[name] for row in rows) for limit in (min, max))

    def get_place(length: int, value: float) -> tuple[float, float]:
        across = math.log(length / lengths[0]) / max(math.log(lengths[-1] / lengths[0]), 1e-9)
        up = math.log(value / low) / max(math.log(high / low), 1e-9)
        return MARGIN + number * (PANEL + MARGIN) + across * (PANEL - 90), MARGIN + PANEL * (1 - up)

    title = {"cpu_seconds": "CPU seconds, forward and backward", "saved_mib": "saved MiB"}[name]
    x, y = get_place(lengths[0], high)
    text = '<rect width="100%" height="100%" fill="white"/>' if not number else ""
    text += f'<text x="{x:.0f}" y="{y - 30:.0f}">{title}: {low:.3g} to {high:.3g}</text>'
    for length in lengths:
        x, y = get_place(length, low)
        text += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN}" y2="{y:.1f}" stroke="#dddddd"/>'
        text += f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle">{length:,}</text>'
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        x, y = get_place(lengths[0], 10.0**power)
        text += (
            f'<line x1="{x:.1f}" x2="{x + PANEL - 90:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#dddddd"/>'
        )
        text += f'<text x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
    ends = []
    for kind, colour in zip(kinds, COLOURS, strict=True):
        own = {row["length"]: row[name] for row in rows if row["kind"] == kind}
        places = [get_place(length, value) for length, value in own.items()]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        text += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        ends.append((places[-1][1] + 4, places[-1][0] + 6, kind, colour))
    lowest = 0.0
    for y, x, kind, colour in sorted(ends):
        lowest = max(y, lowest + LINE_HEIGHT)  # names of lines that end together stay legible
        text += f'<text x="{x:.0f}" y="{lowest:.0f}" fill="{colour}">{kind}</text>'
    return text


if __name__ == "__main__":
    sys.exit(main())

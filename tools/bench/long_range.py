"""Measure one block of each attention at growing lengths: CPU seconds and bytes saved for backward.

    python tools/bench/long_range.py [--lengths 1024 4096 16384] [--width 64] [--heads 4] [--json]

One row of tokens, one thread, fp32, forward and backward. CPU seconds are changed least by other work on the machine;
saved bytes are those of the storages that autograd holds after the forward pass. Windows: 256 positions; mixtures: 128;
hashes: 4 rounds of chunks of 64. `reformer` has reversible layers and a chunked feed-forward too; all are encoders.
"""

import argparse
import json
import sys
import time
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
}
REFORMER: dict[str, Any] = {"residual": {"kind": "reversible"}, "feed_forward_chunk": 512}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="default: %(default)s")
    parser.add_argument("--width", type=int, default=64, help="channels of the stream (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure_block("reformer", 128, arguments.width, arguments.heads)  # torch imports much at the first checkpoint
    found = [
        {"kind": kind, "length": length, **measure_block(kind, length, arguments.width, arguments.heads)}
        for kind in [*KINDS, "reformer"]
        for length in arguments.lengths
    ]
    print(json.dumps(found, indent=1) if arguments.json else format_table(found))
    return 0


def measure_block(kind: str, length: int, width: int, heads: int) -> dict[str, float]:
    """Return CPU seconds of forward and backward, and the bytes saved between them, of an encoder of one block."""
    changes = REFORMER if kind == "reformer" else {}
    kind = "lsh" if kind == "reformer" else kind
    config = ModelConfig.model_validate({
        "family": "encoder", "vocab_size": 128, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": 1, "num_attention_heads": heads, "max_position_embeddings": length,
        "position": {"kind": "none"}, "head": {"kind": "features"}, "attention": {"kind": kind, **KINDS[kind]},
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
    """Return one line per measurement, with its growth since the shorter length of the same kind."""
    lines = ["| attention | positions | CPU seconds | times | saved MiB | times |", "|---|---|---|---|---|---|"]
    for earlier, row in zip([None, *rows[:-1]], rows, strict=True):
        text = f"| {row['kind']} | {row['length']:,} "
        for name in ("cpu_seconds", "saved_mib"):
            is_first = earlier is None or earlier["kind"] != row["kind"]
            growth = "" if is_first or earlier is None else f"{row[name] / earlier[name]:.1f}"
            text += f"| {row[name]:.2f} | {growth} "
        lines.append(f"{text}|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

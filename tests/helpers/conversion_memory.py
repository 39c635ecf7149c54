"""Converts a synthetic folder both ways in a separate process and prints how much memory each way
took, as JSON.

    python tests/helpers/conversion_memory.py FOLDER LAYERS HIDDEN SHARD_BYTES [EXPERTS]

Memory is the growth of the largest resident set over what it was after a tiny conversion, in bytes:
libraries are not counted, pages that are read through a mapping are.
"""

import json
import resource
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch

from llmsys.config.loading.load import build_model_config
from llmsys.convert.conversion_plan import build_conversion_plan
from llmsys.convert.family_mappings import get_family_mapping
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.safetensors_folder import INDEX, SafetensorsShardWriter
from llmsys.convert.to_hugging_face import convert_to_hugging_face


def build_config(layers: int, hidden: int, experts: int) -> dict[str, Any]:
    values = {
        "model_type": "mixtral" if experts else "llama",
        "vocab_size": 1000,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return values | ({"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {})


def write_synthetic_model(folder: Path, values: dict[str, Any], shard_bytes: int) -> int:
    """A folder of random bf16 weights in shards; gives its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    model = build_model_config(values)
    shapes = build_conversion_plan(
        model, get_family_mapping(values["model_type"], model)
    ).their_shapes
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    room = shard_bytes
    for name, shape in shapes.items():
        room -= 2 * prod(shape)
        if room < 0 and shards[-1]:
            shards.append({})
            room = shard_bytes - 2 * prod(shape)
        shards[-1][name] = (torch.bfloat16, shape)
    files = {}
    for number, shard in enumerate(shards):
        with SafetensorsShardWriter(folder / f"model-{number}.safetensors", shard) as writer:
            for name, (_, shape) in shard.items():
                writer.write(
                    name, torch.randint(0, 1 << 14, shape, dtype=torch.int16).view(torch.bfloat16)
                )
                files[name] = f"model-{number}.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(2 * prod(shape) for shape in shapes.values())


def measure_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: Path, layers: int, hidden: int, shard_bytes: int, experts: int = 0) -> None:
    write_synthetic_model(folder / "tiny", build_config(1, 64, experts), 1 << 30)
    convert_from_hugging_face(folder / "tiny", folder / "tiny_ours")
    convert_to_hugging_face(folder / "tiny_ours", folder / "tiny_back")
    total = write_synthetic_model(
        folder / "theirs", build_config(layers, hidden, experts), shard_bytes
    )
    before, began = measure_peak_bytes(), time.monotonic()
    convert_from_hugging_face(folder / "theirs", folder / "ours")
    middle, halfway = measure_peak_bytes(), time.monotonic()
    convert_to_hugging_face(folder / "ours", folder / "back")
    after, ended = measure_peak_bytes(), time.monotonic()
    result = {"bytes": total, "shard": shard_bytes, "in": middle - before, "out": after - before}
    print(json.dumps(result | {"in_seconds": halfway - began, "out_seconds": ended - halfway}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

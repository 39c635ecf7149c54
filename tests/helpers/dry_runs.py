"""Dry runs of a tiny model on eight pretended devices, each in a separate process and once for
all tests.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmsys.dryrun.dry_run import run_dry_run
from llmsys.dryrun.dry_run_request import DryRunRequest

LAYERS, WIDTH, INNER, VOCABULARY, LENGTH, RANKS = 2, 64, 96, 4096, 32, 8
CONFIG = f"""
run: {{name: tiny, folder: nowhere}}
data: {{folder: nowhere}}
model:
  vocab_size: {VOCABULARY}
  hidden_size: {WIDTH}
  intermediate_size: {INNER}
  num_hidden_layers: {LAYERS}
  num_attention_heads: 8
  num_key_value_heads: 8
  max_position_embeddings: {LENGTH}
batch: {{sequence_length: {LENGTH}, sequences: 16, micro_sequences: 1}}
engine: {{kind: torch, data_parallel: fsdp}}
train: {{tokens: 10_000, precision: bf16}}
evaluation: {{micro_sequences: 1}}
"""
EXPERTS = (
    "model.moe.num_experts=8",
    "model.moe.num_experts_per_tok=2",
    "model.moe.moe_intermediate_size=32",
)


@functools.cache
def write_tiny_config() -> Path:
    """Path of the config; the folder is removed when the tests end."""
    folder = tempfile.TemporaryDirectory(prefix="dryrun-")
    path = Path(folder.name) / "tiny.yaml"
    path.write_text(CONFIG)
    _FOLDERS.append(folder)
    return path


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def build_request(
    *overrides: str, rank: int = 0, skew: float = 1.0, device: str = "h100-sxm"
) -> DryRunRequest:
    return DryRunRequest(
        str(write_tiny_config()), overrides, 1, RANKS, rank, device, expert_skew=skew
    )


@functools.cache
def run_tiny(
    *overrides: str, rank: int = 0, skew: float = 1.0, device: str = "h100-sxm"
) -> dict[str, Any]:
    return run_dry_run(build_request(*overrides, rank=rank, skew=skew, device=device))


def run_planted(plant: str, *overrides: str) -> dict[str, Any]:
    """The result of a run in which `plant`, Python with `torch` imported, has changed llmsys
    before it starts.
    """
    code = f"""
import json, sys
from llmsys.config.loading.load import read_config
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.guard_library import load_guard_library
from llmsys.estimate.device_profile import load_device_profile

guard = load_guard_library()
import torch

guard.llmsys_install_guard()
{plant}
from llmsys.dryrun.rank_result import build_rank_result
from llmsys.dryrun.rank_session import RankSession

request = DryRunRequest.from_dict(json.load(sys.stdin))
config = read_config(request.config, list(request.overrides)).run
session = RankSession(request, config, load_device_profile(request.device))
print(json.dumps(build_rank_result(session, session.run())))
"""
    given = json.dumps(build_request(*overrides).to_dict())
    run = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result

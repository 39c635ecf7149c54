"""Dry runs of a tiny model on eight pretended devices, each in a separate process and once for
all tests.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.estimate_comparison import compare_with_estimate
from llmsys.dryrun.rank_run import resolve_request
from llmsys.errors import RefutedStepError

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
    *overrides: str,
    rank: int = 0,
    skew: float = 1.0,
    device: str = "h100-sxm",
    documents: tuple[int, ...] = (),
) -> DryRunRequest:
    path = str(write_tiny_config())
    return DryRunRequest(path, overrides, 1, RANKS, rank, device, documents, skew)


@functools.cache
def run_tiny(
    *overrides: str, rank: int = 0, skew: float = 1.0, device: str = "h100-sxm"
) -> dict[str, Any]:
    request = build_request(*overrides, rank=rank, skew=skew, device=device)
    result = run_forked(request)
    return result | {"estimate": compare_with_estimate(result, resolve_request(request)[1])}


def run_planted(plant: str, *overrides: str, rank: int = 0) -> dict[str, Any]:
    """The result of a run in which `plant`, Python with `torch` imported, has changed llmsys
    before it starts.
    """
    return run_forked(build_request(*overrides, rank=rank), plant)


SERVER = """
import json, os, sys, traceback
from pathlib import Path
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.guard_library import load_guard_library

guard = load_guard_library()
import torch

guard.llmsys_install_guard()
torch.set_num_threads(1)
from llmsys.dryrun.rank_run import resolve_request, run_session
from llmsys.errors import RefutedStepError

def run(asked):
    exec(asked["plant"], {"torch": torch})
    request = DryRunRequest.from_dict(asked["request"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(request.node_devices)}
    try:
        result = run_session(request, *resolve_request(request))
    except RefutedStepError as error:
        result = {"failure": str(error)}
    return json.dumps(result)

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            Path(asked["path"]).write_text(run(asked))
            status = 0
        except BaseException:
            Path(asked["path"]).write_text(traceback.format_exc())
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def start_server() -> subprocess.Popen[str]:
    """A process that has imported torch behind a pretended device, and forks for each dry run: the
    import takes as long as a run.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # its loop ends
    server.wait()


def run_forked(request: DryRunRequest, plant: str = "") -> dict[str, Any]:
    """The result of a dry run in a fork of the server, without the comparison with the estimate."""
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        asked = {"request": request.to_dict(), "plant": plant, "path": str(path)}
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        assert status == "0", path.read_text() if path.exists() else f"ended with status {status}"
        result: dict[str, Any] = json.loads(path.read_text())
    if "failure" in result:
        raise RefutedStepError(result["failure"])
    return result

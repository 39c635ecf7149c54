"""Memory follows the size of a shard, not that of the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARD = 20_000_000


@pytest.mark.parametrize("experts", [0, 2])
def test_both_ways_need_little_more_than_one_shard(
    experts: int, tmp_path: Path, repository: Path
) -> None:
    script = repository / "tests" / "helpers" / "conversion_memory.py"
    layers = 10 if not experts else 6
    words = [sys.executable, script, tmp_path / "made", layers, 1024, SHARD, experts]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=repository)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bytes"] > 9 * SHARD
    assert result["in"] < 2.5 * SHARD
    assert result["out"] < 2.5 * SHARD
